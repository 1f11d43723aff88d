"""Staging through the caller's own database driver, one module each."""
