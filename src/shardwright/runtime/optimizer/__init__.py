"""The user's optimizer, which stays the same object.

`adopt.py` gives it the shards and decides what a step has to gather, `state.py` has its state dicts, `fused.py` uses
torch's fused Adam on CPUs, `unadopted.py` refuses steps of optimizers that don't know they update shards.
"""
