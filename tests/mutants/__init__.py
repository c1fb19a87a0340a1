"""Mutants: the package with one thing changed, which some test must notice. `python -m tests.mutants --help`."""
