"""Functions have few parameters: options that belong together are one object (`options.py`)."""

import ast
from pathlib import Path

from .source import SRC, files, nodes

MOST = 8

# What has more, how many, and why. Keep it short.
ALLOWED = {
    "runtime/algorithms/norms.py:batch_norm": (9, "called by generated code, with the arguments of torch"),
    "train/trainer.py:__init__": (28, "a run's settings, of which the common ones are flat"),
    "verify/parity.py:verify": (15, "public: what a comparison can be told"),
    "parallelize.py:plan": (15, "public: what a plan depends on"),
    "parallelize.py:parallelize": (14, "public: the common options are flat"),
    "data/loader.py:loader": (13, "public: the arguments of a DataLoader"),
    "runtime/algorithms/chunked_losses.py:linear_cross_entropy": (
        18,
        "called by generated code, with the arguments of two functions of torch",
    ),
    "runtime/algorithms/losses.py:cross_entropy": (12, "called by generated code, with the arguments of torch"),
    "runtime/algorithms/context_attention.py:context_attention": (14, "called by generated code, by keywords"),
    "runtime/algorithms/attention.py:attention": (9, "called by generated code, by keywords"),
    "runtime/algorithms/attention.py:_attention_op": (10, "the signature of an op of torch"),
    "runtime/algorithms/context_attention.py:forward": (9, "an autograd function, all of whose tensors are arguments"),
    "runtime/algorithms/random.py:attention": (10, "called by generated code, with the arguments of torch"),
    "runtime/algorithms/attention_blocks.py:attend_backward": (10, "the kernel's arguments, and where they are"),
    "register.py:register_op": (9, "public: what a custom op can be told"),
    "rehearse/rehearsal.py:rehearse": (9, "public: what a rehearsal can be told"),
    "verify/debug.py:trace": (9, "public: what a comparison can be told"),
    "checkpoint/saving.py:save": (9, "public: all that a training state may have"),
    "runtime/algorithms/weight_gradients.py:convolution": (9, "called by generated code, with the arguments of torch"),
}


def many(root: Path) -> dict[str, int]:
    """The functions below root with more than MOST parameters, and how many they have."""
    counts = {}
    for path in files(root):
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = node.args
                names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
                count = len([name for name in names if name not in ("self", "cls")])
                if count > MOST:
                    counts[f"{path.relative_to(root)}:{node.name}"] = count
    return counts


def test_functions_have_few_parameters():
    most = {name: count for name, (count, _) in ALLOWED.items()}
    assert {name: count for name, count in many(SRC).items() if count > most.get(name, MOST)} == {}


def test_the_allowed_still_have_many():
    assert set(ALLOWED) <= set(many(SRC))


def test_a_function_with_many_parameters_is_found(tmp_path):
    names = ", ".join(f"a{number}" for number in range(MOST + 1))
    (tmp_path / "file.py").write_text(f"def f({names}): ...\nclass C:\n    def g(self, {names[4:]}): ...\n")
    assert many(tmp_path) == {"file.py:f": MOST + 1}
