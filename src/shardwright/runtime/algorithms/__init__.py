"""Ops whose shards talk to each other, and ops that know on which rank they run.

A linear that overlaps its reshard with matmuls, losses over split classes or samples, batch norm over a split batch,
embedding tables split on their rows, experts, dropout masks by position, custom algorithms of registered ops.
"""
