"""Observers: what turns facts into logs, metrics and traces."""
