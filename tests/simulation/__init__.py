"""The real engine over the memory store and a model broker, in virtual time, with everything going wrong.

A seed decides everything, so a failing seed can be replayed: `python -m tests.simulation.replay SEED`.
"""
