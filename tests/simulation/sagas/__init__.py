"""A world of one saga: workers that die, participants that fail, a network that loses, repeats and delays, people."""
