"""A little model over shards, written by hand as the compiler would write it, and its single-device twin.

    y = (gelu(x W1ᵀ) * scale) W2ᵀ + bias;  used = (y E) per class;  loss = Σ -log p / B  +  decay Σ bias²

dp splits the rows of the batch, tp the hidden units. `scale` has a gradient that is a sum
over both axes, `bias` over dp only, `embed` is used twice (tied), `idle` never, `frozen` is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from shardwright.layout import REPLICATE, Axis, Block, Mesh, contiguous_shard, make_layout, make_shard
from shardwright.runtime.collectives import comm
from shardwright.runtime.parameters.full_tensors import coordinates, gather_tensor, shard_tensor
from shardwright.runtime.parameters.sharded import Untouched, keeps_share, make_parameter
from shardwright.runtime.world import Groups
from shardwright.storage import ParameterSpec, Replicated, parse_storage, stored_layout, wanted_groups

BATCH, WIDTH, HIDDEN, CLASSES = 12, 4, 8, 5
DECAY = 0.1


def mesh_of(dp: int, tp: int = 1) -> Mesh:
    return Mesh(axes=(Axis(name="dp", size=dp), Axis(name="tp", size=tp)))


def helds_of(mesh: Mesh, level: int = 0) -> list[ParameterSpec]:
    """In the order of use."""
    tp, storage = mesh.axis("tp"), parse_storage({"dp": level} if level else {})

    def spec(key, shape, cuts, sums=("dp",), trainable=True):
        layout = make_layout(cuts, dict.fromkeys(sums, REPLICATE))
        keys = (key, "head") if key == "embed" else (key,)
        return ParameterSpec(
            keys=keys,
            shape=shape,
            dtype="float64",
            layout=layout,
            storage=storage if trainable or level == 3 else Replicated(),
            trainable=trainable,
        )

    return [
        spec("embed", (CLASSES, WIDTH), [[], []]),
        spec("w1", (HIDDEN, WIDTH), [[make_shard(tp, [Block(2, HIDDEN // 2, 1)])], []]),
        spec("scale", (), [], sums=("dp", "tp")),
        spec("gain", (3,), [[]], sums=("dp", "tp")),
        spec("w2", (WIDTH, HIDDEN), [[], [make_shard(tp, [Block(2, HIDDEN // 2, 1)])]]),
        spec("bias", (WIDTH,), [[]]),
        spec("idle", (3, 2), [[], [contiguous_shard(tp, 2)]]),
        spec("frozen", (WIDTH,), [[]], sums=(), trainable=False),
    ]


def whole_values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    mesh = mesh_of(1)
    return {it.name: torch.randn(it.shape, generator=generator, dtype=torch.float64) for it in helds_of(mesh)}


def batch(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randint(CLASSES, (BATCH,), generator=generator)
    return x, torch.randint(CLASSES, (BATCH,), generator=generator)


class Single(torch.nn.Module):
    """The original."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in whole_values().items():
            setattr(self, name, torch.nn.Parameter(value.clone(), requires_grad=name != "frozen"))

    def forward(self, x, target):
        h = F.gelu(self.embed[x] @ self.w1.t()) * self.scale * (self.gain.sum() + 1)
        y = h @ self.w2.t() + self.bias * self.frozen
        loss = F.cross_entropy(y @ self.embed.t(), target, reduction="sum") / BATCH
        return loss + DECAY * self.bias.square().sum()


class Shards:
    """The compiled program, on one rank of a mesh."""

    def __init__(self, mesh: Mesh, level: int = 0) -> None:
        self.specs = helds_of(mesh, level)
        self.groups = Groups(mesh, wanted_groups(self.specs, mesh))
        at = coordinates(self.groups)
        full = whole_values()
        self.p = {
            it.name: make_parameter(shard_tensor(full[it.name], it, mesh.sizes, at), it, self.groups)
            for it in self.specs
        }
        self.pairs = [(it, self.p[it.name]) for it in self.specs]
        self.count = torch.tensor(3)  # a buffer

    def parameters(self):
        return list(self.p.values())

    def loss(self, x, target, values=None):
        """This rank's share of the loss: the gradient of the sum of all shares is what we want."""
        dp, tp = self.groups["dp"], self.groups["tp"]
        rows = slice(dp.index * BATCH // dp.size, (dp.index + 1) * BATCH // dp.size)
        x, target = x[rows], target[rows]
        with Untouched():
            p = {**self.p, **(values or {})}
            h = comm.replicate(p["embed"][x], tp)
            h = F.gelu(h @ p["w1"].t()) * p["scale"] * (p["gain"].sum() + 1)
            y = comm.all_reduce(h @ p["w2"].t(), tp) + p["bias"] * p["frozen"]
            loss = F.cross_entropy(y @ p["embed"].t(), target, reduction="sum") / BATCH
            # the decay is whole on dp, and its gradient must enter the sum over dp once
            return loss + DECAY * comm.invariant(p["bias"], dp).square().sum()

    def whole(self, parameter) -> torch.Tensor:
        return gather_tensor(parameter.data, parameter.spec, self.groups)

    def whole_gradients(self) -> dict[str, torch.Tensor | None]:
        """Every gradient, put together: ZeRO-2 keeps shares."""
        by_name = {}
        for name, parameter in self.p.items():
            owned = parameter.shard if keeps_share(parameter) else parameter
            layout = owned.spread if owned is not parameter else stored_layout(parameter.spec, self.groups.mesh.sizes)
            gradient = parameter.grad
            by_name[name] = None if gradient is None else gather_tensor(gradient, parameter.spec, self.groups, layout)
        return by_name


def assert_same(got: dict, want: dict, atol: float = 1e-12) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        if value is None:
            assert got[name] is None, name
        else:
            assert got[name] is not None, name
            torch.testing.assert_close(
                got[name], value, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
            )


def single_gradients(model: Single) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
