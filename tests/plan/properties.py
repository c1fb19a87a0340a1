"""What holds of every search, checked on random models, clusters and tight memory.

python -m tests.plan.properties --cases 1000      draws so many cases, and prints those that fail with their seeds
python -m tests.plan.properties --seed 17         one of them, as it was drawn

    strings        no plan string that fits by simulation is faster than `auto`, and none is below its bound
    memory         more memory makes no step slower, and never leaves the search without a plan
    bandwidth      faster links make no step slower
    constraints    what keeps to more constraints is no faster

`auto` may be slower by `TOLERANCE`: the search leaves smaller gains to other meshes alone.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.capture import capture
from shardwright.cluster import Cluster, Link, find
from shardwright.cost import TrainingSetup
from shardwright.errors import ShardwrightError
from shardwright.plan import parse_plan_string
from shardwright.plan.constraints import Constraints, read_constraints
from shardwright.plan.request import PlanRequest
from shardwright.plan.search_options import SearchOptions
from shardwright.planning import make_plan, only_scalars
from shardwright.rules import Analysis, analyse

TOLERANCE = 0.011
"""The gain that another mesh must promise to be solved (`SearchOptions.slack`), and the gap of each (`aim`), twice."""

ROUNDING = 1e-3
"""Plan files have four digits."""

STRINGS = (
    "dp={n}", "zero1={n}", "zero2={n}", "zero3={n}", "tp={n}", "sp={n}", "dp={n},recompute", "zero1={n},recompute",
    "zero2={n},recompute", "zero3={n},recompute", "tp={n},recompute", "sp={n},recompute", "dp={a},tp={b}",
    "zero1={a},tp={b}", "zero2={a},sp={b}", "zero3={a},tp={b}", "zero3={a},sp={b},recompute",
)  # fmt: skip

CONSTRAINTS: tuple[dict[str, object], ...] = (
    {"zero": 0}, {"zero": 1}, {"module": "layers", "recompute": True}, {"module": "layers", "recompute": False},
    {"axis": "dp", "size": 2}, {"op": "linear", "replicated": True}, {"axis": "dp", "splits": "batch"},
)  # fmt: skip


class Mixer(nn.Module):
    """Attention with grouped keys and a wide net, each after a norm."""

    def __init__(self, width: int, heads: int, groups: int, inner: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, self.size * count) for count in (heads, groups, groups))
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        b, s, d = y.shape
        q, k, v = (linear(y).view(b, s, -1, self.size).transpose(1, 2) for linear in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.groups)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Tokens(nn.Module):
    """A small language model."""

    def __init__(self, width: int, layers: int, groups: int, vocab: int, inner: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Mixer(width, 8, groups, inner) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Funnel(nn.Module):
    """Linear layers of different widths, beside shortcuts."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = torch.tanh(layer(x))
            x = x + y if x.shape == y.shape else y
        return x.square().mean()


@dataclass(frozen=True)
class Case:
    """A model with its batch, and where it is planned for. `memory` is a fraction of what the roomy plan needs."""

    model: tuple[object, ...]
    batch: int
    cluster: str
    memory: float
    more: float  # times this in the comparison
    pipelines: bool
    constraint: dict[str, object]


def draw(seed: int) -> Case:
    pick = random.Random(seed)
    if pick.random() < 0.7:
        model: tuple[object, ...] = (
            "tokens", pick.choice((256, 512, 1024)), pick.choice((1, 2, 4)), pick.choice((2, 4, 8)),
            pick.choice((512, 8192, 32768)), pick.choice((512, 4096)),
        )  # fmt: skip
    else:
        widths = [pick.choice((128, 1024, 4096))]
        for _ in range(pick.randint(2, 5)):
            widths.append(pick.choice((widths[-1], 128, 512, 2048, 8192)))
        model = ("funnel", *widths)
    return Case(
        model=model,
        batch=pick.choice((8, 16, 64)),
        cluster=pick.choice(("4xL40S", "4xA100-80GB", "2x2xA100-80GB", "8xH100", "2xL40S")),
        memory=pick.choice((0.3, 0.45, 0.6, 0.8, 0.95, 1.1)),
        more=pick.choice((1.03, 1.1, 1.3, 2.0)),
        pipelines=pick.random() < 0.3,
        constraint=pick.choice(CONSTRAINTS),
    )


@lru_cache(maxsize=64)
def analysis_of(model: tuple[object, ...], batch: int) -> Analysis:
    kind, *sizes = model
    with torch.device("meta"):
        if kind == "tokens":
            module: nn.Module = Tokens(*sizes)  # type: ignore[arg-type]
            ids = torch.zeros(batch, 256, dtype=torch.int64)
            example: tuple[Tensor, ...] = (ids, ids.clone())
        else:
            module, example = Funnel(tuple(sizes)), (torch.zeros(batch * 64, int(str(sizes[0]))),)  # type: ignore[arg-type]
    return analyse(only_scalars(capture(module, example, {}).graph))


class Search:
    """Searches of one case, each done once."""

    def __init__(self, case: Case) -> None:
        self.case, self.analysis, self.cluster = case, analysis_of(case.model, case.batch), find(case.cluster)
        self.training = TrainingSetup(compute="bfloat16")

    def seconds(self, plan: str = "auto", **changes: object) -> tuple[float, float, float]:
        """Seconds of a step, the bound, and the peak; infinity where nothing is found or a policy can't be applied."""
        cluster = changes.pop("cluster", self.cluster)
        assert isinstance(cluster, Cluster)
        options = replace(SearchOptions(pipelines=self.case.pipelines), **changes)  # type: ignore[arg-type]
        request = PlanRequest(cluster=cluster, training=self.training, options=options)
        if plan != "auto":
            request = replace(request, source=parse_plan_string(plan))
        try:
            prediction = make_plan(self.analysis.graph, self.analysis, request, cluster.size).predicted["train"]
        except ShardwrightError:
            return math.inf, math.inf, math.inf
        return prediction["seconds"], prediction.get("bound", 0.0), prediction["memory"]["peak"]

    @property
    def limit(self) -> float:
        return self.case.memory * self.seconds()[2]


def faults(seed: int, quick: bool = False) -> Iterator[str]:
    """What does not hold of a case, in words."""
    case = draw(seed)
    search = Search(case)
    limit = search.limit
    seconds, bound, _ = search.seconds(memory=limit)

    def slower(than: float) -> bool:
        return seconds > than * (1 + TOLERANCE)

    for text in _strings(search.cluster.size, random.Random(seed), 4 if quick else len(STRINGS)):
        other, _, peak = search.seconds(text)
        if peak <= limit and slower(other):
            yield f"auto takes {seconds:.6g}, {text} takes {other:.6g} and fits"
        if peak <= limit and other < bound * (1 - ROUNDING):
            yield f"the bound is {bound:.6g}, {text} takes {other:.6g} and fits"
    larger, _, _ = search.seconds(memory=limit * case.more)
    if larger > seconds * (1 + TOLERANCE):
        yield f"auto takes {seconds:.6g}, and {larger:.6g} with {case.more} times the memory"
    constrained, _, _ = search.seconds(memory=limit, constraints=_constraints(case.constraint))
    if slower(constrained):
        yield f"auto takes {seconds:.6g}, and {constrained:.6g} under {case.constraint}"
    faster, _, _ = search.seconds(memory=limit, cluster=faster_links(search.cluster, case.more))
    if faster > seconds * (1 + TOLERANCE):
        yield f"auto takes {seconds:.6g}, and {faster:.6g} with links {case.more} times as fast"


def _strings(devices: int, pick: random.Random, count: int) -> list[str]:
    outer = 2
    texts = [
        text.format(n=devices, a=outer, b=devices // outer) for text in STRINGS if devices > 2 or "{a}" not in text
    ]
    return texts if count >= len(texts) else pick.sample(texts, count)


def _constraints(entry: dict[str, object]) -> Constraints:
    return read_constraints([entry])


def faster_links(cluster: Cluster, times: float) -> Cluster:
    """The same cluster with all links so many times as fast."""

    def faster(link: Link) -> Link:
        return replace(link, bandwidth=link.bandwidth * times)

    nodes = [replace(g.node, inside=faster(g.node.inside), network=faster(g.node.network)) for g in cluster.groups]
    groups = [replace(group, node=node) for group, node in zip(cluster.groups, nodes, strict=True)]
    return replace(cluster, groups=tuple(groups))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="one case")
    parser.add_argument("--quick", action="store_true", help="a few plan strings of each case, as in the suite")
    args = parser.parse_args()
    seeds = [args.seed] if args.seed is not None else range(args.first, args.first + args.cases)
    failed, began = 0, time.process_time()
    for seed in seeds:
        lines = list(faults(seed, args.quick))
        failed += bool(lines)
        for line in lines:
            print(f"{seed}: {line}  ({draw(seed)})", flush=True)
    print(f"{failed} of {len(seeds)} cases fail, {time.process_time() - began:.0f} s of processor time")


if __name__ == "__main__":
    main()
