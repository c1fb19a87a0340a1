"""The public names are few, and no change adds, drops or alters one by accident.

After a change that you want: SHARDWRIGHT_UPDATE=1 pytest tests/house/test_public.py, and read the diff of
signatures.txt.
"""

import inspect
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import cloudpickle
import torch

import shardwright

PUBLIC = (
    "CompileOptions EMA PipelineOptions Trainer diff empty_model experts explain initialize launch load load_weights "
    "loader opaque parallelize plan register_op rehearse report save save_weights verify"
).split()


def test_the_public_names_are_these():
    assert sorted(shardwright.__all__) == PUBLIC
    assert set(PUBLIC) <= set(dir(shardwright))


def test_every_public_name_is_there_and_says_what_it_does():
    for name in PUBLIC:
        assert getattr(shardwright, name).__doc__, f"sw.{name} has no docstring"


def test_nothing_is_imported_before_it_is_used():
    """So that `import shardwright` is quick, and a name that a package has too is the function in any order."""
    program = (
        "import sys, shardwright as sw; assert 'torch' not in sys.modules; "
        "import shardwright.plan, shardwright.verify, shardwright.data.loader; from shardwright import rehearse; "
        "assert all(callable(value) for value in (sw.plan, sw.verify, sw.loader, rehearse)); "
        "assert sw.errors.PlanError; assert not hasattr(sw, 'trainer')"
    )
    assert cloudpickle.loads(cloudpickle.dumps(lambda: shardwright))() is shardwright  # as sw.launch sends it
    subprocess.run([sys.executable, "-W", "error::ImportWarning", "-c", program], check=True)
    assert shardwright.__version__ == version("shardwright")


ADDRESS = "'| at 0x[0-9a-f]+"  # what differs between two runs, and quotes around types
SIGNATURES = Path(__file__).parent / "signatures.txt"


def test_the_signatures_are_these():
    lines = []
    for name in PUBLIC:
        for parameter in inspect.signature(getattr(shardwright, name)).parameters.values():
            lines.append(f"{name}  {re.sub(ADDRESS, '', str(parameter))}")
    text = "\n".join(lines) + "\n"
    if os.environ.get("SHARDWRIGHT_UPDATE"):
        SIGNATURES.write_text(text)
    assert SIGNATURES.read_text() == text


AGREE = "plan precision pipeline compile cluster memory constraints accumulate inputs seed ranks".split()


def test_what_is_called_alike_has_the_same_default():
    """One name means one thing, and does the same if it is left out; what differs has a reason."""
    differs = {
        ("plan", "cluster"): "nothing runs: CPU processes, if no cluster is named",
        ("verify", "plan"): "one plan of each kind",
        ("rehearse", "plan"): "an existing plan",
    }
    usual = {}
    for name in ("parallelize", "plan", "Trainer", "verify", "rehearse"):
        for parameter in inspect.signature(getattr(shardwright, name)).parameters.values():
            if parameter.name in AGREE and (name, parameter.name) not in differs:
                assert usual.setdefault(parameter.name, parameter.default) == parameter.default, (name, parameter.name)


def test_what_a_prompt_shows_is_for_people():
    module, x = torch.nn.Sequential(torch.nn.Linear(8, 8)), torch.randn(4, 8)
    plan = shardwright.plan(module, example=x, plan="tp=2")
    assert repr(plan).startswith("Plan(tp=2 for Sequential, 2 devices, mesh tp=2, predicted ")
    assert repr(shardwright.explain(plan)) == str(shardwright.explain(plan))
    assert repr(shardwright.EMA(module)) == "EMA(decay=0.999, 2 parameters, 0 updates)"
    assert repr(shardwright.loader([1, 2], 2)) == "Loader(DataLoader, epoch 0, after 0 samples)"
    trainer = shardwright.Trainer(model=module, train_data=[1], batch_size=1, max_steps=9, plan="tp=2")
    assert repr(trainer) == "Trainer(plan tp=2, step 0 of 9, in run)"
