"""Saga definitions: steps, their compensation, validation, fingerprint."""
