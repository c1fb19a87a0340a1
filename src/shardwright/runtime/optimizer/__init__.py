"""The user's optimizer, which stays the same object.

`adopt.py` gives it the shards and decides what a step has to gather: nothing (`declared.py` holds strangers to that),
one tensor for each owner (`owners.py`, with `exchange.py` and `settings.py`), or everything (`gathered.py`). `state.py`
has its state dicts, `step_hooks.py` its hooks, `fused.py` uses torch's fused Adam on CPUs, `unadopted.py` refuses steps
of optimizers that don't know they update shards.
"""
