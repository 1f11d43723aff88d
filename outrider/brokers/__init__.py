"""The broker adapters."""
