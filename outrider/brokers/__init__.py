"""Broker adapters, one package each."""
