"""Benchmarks: ratios against peers, taken in one interleaved run. `make bench`."""
