"""Communication between ranks.

`comm.py` has the reshards that generated code calls, each a collective with its backward. Under it are
`process_group.py` (collectives on plain tensors, by torch.distributed or `shared_memory.py`) and `blocks.py` (which
elements of a dim a rank has). `pending.py` is a result that is still on its way, `objects.py` small Python objects.
"""
