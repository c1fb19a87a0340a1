"""Ops whose shards communicate, and ops that depend on the rank on which they run.

A linear that overlaps its reshard with matmuls, losses over split classes or samples, batch norm over a split batch,
embedding tables split on their rows, experts, dropout masks by position, custom algorithms of registered ops.
"""
