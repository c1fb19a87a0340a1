"""Communication between ranks.

`comm.py` has the reshards that generated code calls, each a collective with its backward. Under it are
`process_group.py` (collectives on plain tensors, by torch.distributed or `shared_memory.py`) and `blocks.py` (which
elements of a dim a rank has). `pending.py` has scalars whose all_reduce is under way; `objects.py` gathers objects.
"""
