"""Checks and generators that make runs."""
