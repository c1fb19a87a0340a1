"""Parameters and gradients on a rank.

`table.py` reads how parameters are stored, `sharded.py` is the tensor. `gradient_sync.py` sums gradients in buckets
(`buckets.py`) while backward runs; `zero3.py` gathers units of parameters where they are used; `refresh.py` brings
updates to the ranks that do not own them. `local_ops.py`, `norms.py` and `outside.py` are what a loop may do with
shards, and `state_dicts.py` is the model as a state dict.
"""
