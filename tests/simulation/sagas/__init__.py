"""A world of one saga: real workers that die, participants that fail, a network that loses and repeats, operators."""
