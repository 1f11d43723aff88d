"""Telemetry events, and observers for logs, metrics and traces."""
