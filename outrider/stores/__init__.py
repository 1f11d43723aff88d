"""Store adapters, one package each."""
