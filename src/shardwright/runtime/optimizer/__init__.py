"""The user's optimizer, kept as the object it is: `adopt.py` gives it the shards, `state.py` its state dicts."""
