"""Benchmarks: ``raddle bench cpu``, ``raddle bench plan``, ``raddle bench balance``, ``raddle bench gpu``."""
