"""Scenarios that run inside the project, a function each; the tests run them by name."""
