"""Random policies on random models: what the policy API accepts is right, the rest is refused (`python -m tests.policies`)."""
