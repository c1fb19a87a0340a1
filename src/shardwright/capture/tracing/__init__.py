"""One trace of the user's module by `torch.export`, made safe.

Read `export.py` first: it runs the trace inside of the contexts that the other files define. Each of them
makes one thing traceable that torch would drop, refuse or fix silently (masks of `nn.Transformer`, running
statistics, `.data`, `vmap`, numbers taken out of tensors), or notes what the program will hold as a constant
(`attribute_reads.py`, `variables.py`), so that a change of it is seen later.
"""
