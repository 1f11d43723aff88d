"""Benchmarks, on real servers. Every figure is a ratio within one run; absolute numbers depend on the machine."""
