"""The public names are few, and no change adds or drops one by accident."""

import subprocess
import sys
from importlib.metadata import version

import cloudpickle

import shardwright

PUBLIC = (
    "CompileOptions EMA PipelineOptions Trainer diff empty_model experts explain initialize launch load load_weights "
    "loader opaque parallelize plan register_op rehearse save save_weights verify"
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
