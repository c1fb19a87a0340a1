"""PyTorch's own suites as ours: every op, module and optimizer that torch tests itself with, compiled and compared.

    cases.py          what is tried: torch's samples, each as a tiny module
    judge.py          one sample on one device: compiled and eager, forward and backward
    split.py          the same sample on 2 and on 3 ranks, wherever a rule allows a split
    optimizers.py     the optimizers of torch, under a compiled model
    expectations.py   what is refused, and why; what can only be compared in part
    sweep.py          many cases in several processes, and what came of them
    page.py           docs/ops.md, written from the expectations

`python -m tests.ops` runs all of it; `test_ops.py` a small selection.
"""
