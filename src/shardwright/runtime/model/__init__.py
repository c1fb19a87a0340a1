"""The compiled model as the user sees it.

`parallel_model.py` is what `sw.parallelize` returns: it finds the specialization of a call (`specialization.py`), which
runs a `Program` (`program.py`, the base class of generated code). `inputs.py` knows what each rank passes, `guards.py`
detects changes of a program's constants, `view.py` and `methods.py` expose the user's own class.
"""
