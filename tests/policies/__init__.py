"""Random policies on random models: what is accepted is right, the rest is refused (`python -m tests.policies`)."""
