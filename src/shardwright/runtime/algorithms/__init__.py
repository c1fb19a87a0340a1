"""Ops whose shards communicate, and ops that depend on the rank on which they run.

`linears.py` overlaps a reshard with matmuls, `losses.py` has losses over split classes or samples, `norms.py` batch
norm over a split batch, `lookup.py` embedding tables split on the vocabulary, `experts.py` MoE layers, `random.py`
dropout masks by position, `context_attention.py` attention on shards of a sequence (`attention_blocks.py` what each
block sees, `attention_kernels.py` the kernels), `weight_gradients.py` weight gradients that a schedule delays,
`custom_ops.py` custom algorithms.
"""
