"""The stand-in is a device of its own: it would notice a CPU tensor where the device's is due."""

import pytest
import torch
import torch.distributed as dist

from .stand_in import BACKEND, KIND


def mix(rank):
    here = torch.ones(2, 2, device=KIND)
    assert here.device == torch.device(KIND, rank)
    assert str(torch.accelerator.current_accelerator()) == KIND
    assert torch.equal((here + 1).cpu(), torch.full((2, 2), 2.0))
    for mixed in (
        lambda: here + torch.ones(2, 2),
        lambda: here @ torch.ones(2, 2),
        lambda: torch.cat([here, torch.ones(2, 2)]),
        lambda: torch.stack([here.sum(), torch.ones(())]),
        lambda: here + torch.ones(2, 2, device=f"{KIND}:{1 - rank}"),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            mixed()
    with pytest.raises(TypeError, match="copy the tensor to host memory first"):
        here.numpy()
    assert torch.equal((here + torch.tensor(1.0)).cpu(), torch.full((2, 2), 2.0))  # as on CUDA


def send(rank):
    assert f"{KIND}:{BACKEND}" in str(dist.get_backend_config())
    total = torch.full((3,), rank + 1.0, device=KIND)
    dist.all_reduce(total)
    assert total.tolist() == [3.0, 3.0, 3.0]
    backend = dist.group.WORLD._get_backend(torch.device(KIND))
    with pytest.raises(RuntimeError, match="got a tensor on cpu"):
        backend.allreduce([torch.ones(3)], dist.AllreduceOptions())


def draw(rank):
    torch.manual_seed(3)
    host, state = torch.get_rng_state(), torch.standin.get_rng_state()
    first = torch.rand(4, device=KIND)
    assert torch.equal(torch.get_rng_state(), host)
    torch.standin.set_rng_state(state)
    assert torch.equal(torch.rand(4, device=KIND).cpu(), first.cpu())


@pytest.mark.parametrize("job", [mix, send, draw])
def test_the_stand_in_is_a_device_of_its_own(job, ranks):
    ranks.run(job, timeout=120)
