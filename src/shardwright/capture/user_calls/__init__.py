"""Calls of the user's own Python that stay one op: registered functions, autograd functions, opaque submodules.

`kept.py` and `callee.py` put a marker into the trace for a function, `opaque.py` and `opaque_call.py` for a
submodule. `real_run.py` runs a model once where only a real call shows what it returns, `find_opaque.py` finds
the smallest submodule that can't be captured, `experts.py` knows mixtures of experts.
"""
