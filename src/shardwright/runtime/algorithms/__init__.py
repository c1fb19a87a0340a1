"""Ops whose shards communicate, and ops that depend on the rank on which they run.

`linears.py` overlaps a reshard with matmuls, `losses.py` has losses over split classes or samples, `norms.py` batch
norm over a split batch, `lookup.py` embedding tables split on the vocabulary, `experts.py` MoE layers, `random.py`
dropout masks by position, `attention_blocks.py` attention of some queries on some keys, `weight_gradients.py` weight
gradients that a schedule delays, `custom_ops.py` custom algorithms.
"""
