"""Ray Train for real: two workers, one of them killed. Not part of the suite: `make ray`, which installs ray.

A worker ends itself by SIGKILL between two checkpoints. Ray starts both again, and the run ends with the parameters
of one that nobody has disturbed.
"""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_post_hook

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled")
EXAMPLES = Path(__file__).parents[1] / "examples"
PATHS = os.pathsep.join([str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])])  # of workers
sys.path.insert(0, str(EXAMPLES))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    import ray

    folder = tmp_path_factory.mktemp("r")
    environment = {"env_vars": {"PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env=environment, log_to_driver=False)
    yield folder
    ray.shutdown()


def killed_once(config):
    """The loop of the example, on a worker that is killed after its third step, the first time."""
    from ray_train import train_loop

    marker, steps = Path(config["folder"]) / "killed", []

    def count(*_):
        steps.append(1)
        if len(steps) == 3 and torch.distributed.get_rank() == 1 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_post_hook(count)
    return train_loop(config)


def run(folder, loop=None):
    from ray_train import train_loop, trainer

    folder.mkdir()
    config = {"plan": "zero3=2", "steps": 5, "layers": 1, "save_every": 2, "folder": str(folder)}
    return trainer(config, 2, loop or train_loop).fit()


def test_a_killed_worker_is_started_again_and_ends_with_the_undisturbed_parameters(cluster):
    undisturbed = run(cluster / "undisturbed")
    disturbed = run(cluster / "disturbed", killed_once)
    assert (cluster / "disturbed" / "killed").exists()
    assert undisturbed.return_value == {"resumed after": 0, "steps": 5, "loss": undisturbed.return_value["loss"]}
    assert disturbed.return_value == {"resumed after": 2, "steps": 3, "loss": undisturbed.return_value["loss"]}
    expected, values = (load_file(cluster / name / "model.safetensors") for name in ("undisturbed", "disturbed"))
    assert values.keys() == expected.keys()
    assert all(torch.equal(values[key], value) for key, value in expected.items())
