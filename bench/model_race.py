"""The race of real models: ours against every peer that can train the model, on 2 and on 4 ranks.

`bench.run --models` is its command. A pair of a model and a peer that can't run is left out, with the reason.
"""

import os
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

from .models import ModelWorkload
from .race import Ratio, ratio_of
from .ranks import Finish, Heat, is_ours, run_measured

PEERS = {
    "eager": "eager",
    "ddp": "DDP",
    "ddp-fused": "DDP, fused",
    "fsdp2": "FSDP2",
    "dtensor": "DTensor TP",
    "dtensor-sp": "DTensor SP",
    "pipelining": "pipelining",
}
TIED = "the head shares its weight with the embedding, and stages do not sum the gradients of a weight that two have"
DECODERS = "its tutorial has a plan for decoders with norms before attention and MLP only"
LEFT_OUT: dict[tuple[str, str], str] = {
    ("gpt2", "dtensor"): "c_attn is a Conv1D of q, k and v in one, and ColwiseParallel takes Linear and Embedding",
    ("t5", "dtensor"): "the bias of positions has all heads, and no ParallelStyle splits it",
    ("resnet", "dtensor"): "no ParallelStyle for convolutions",
    ("mixtral", "dtensor"): "the experts are one parameter of 3 dims, and no ParallelStyle splits it",
    **{(kind, "dtensor-sp"): DECODERS for kind in ("bert", "vit", "t5", "resnet", "gpt2", "mixtral")},
    **{(kind, "pipelining"): TIED for kind in ("gpt2", "bert", "t5", "gpt")},
    ("resnet", "pipelining"): "batch norm would have the statistics of a microbatch",
}
"""Why a kind of model does not run with a peer."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The race of one model on a number of ranks."""

    model: str
    ranks: int
    finishes: dict[str, Finish]
    left_out: dict[str, str]

    def ratio(self, above: str, below: str) -> Ratio:
        return ratio_of({name: finish.wall for name, finish in self.finishes.items()}, above, below)

    @property
    def fastest_peer(self) -> str:
        peers = [name for name in self.finishes if not is_ours(name)]
        return min(peers, key=lambda name: self.ratio(name, peers[0]).value)

    def time(self, name: str) -> float:
        return median(self.finishes[name].wall)


def left_out(work: ModelWorkload) -> dict[str, str]:
    """The peers that don't run a model, and why."""
    reasons = {peer: LEFT_OUT[work.kind, peer] for peer in PEERS if (work.kind, peer) in LEFT_OUT}
    if work.sizes.get("tied") is False:
        reasons.pop("pipelining", None)
    return reasons


def contenders_of(work: ModelWorkload, ranks: int) -> tuple[str, ...]:
    """All that can run; on more than 2 ranks ours have no twin of each peer, since building them takes the time."""
    out = left_out(work)
    plans = ["auto", f"dp={ranks}", f"zero3={ranks}"]
    twins = {"dtensor": f"tp={ranks}", "dtensor-sp": f"sp={ranks}", "pipelining": f"pp={ranks},1f1b"}
    plans += [plan for peer, plan in twins.items() if peer not in out and ranks == 2]
    return *(peer for peer in PEERS if peer not in out), *plans


def run_model(work: ModelWorkload, ranks: int, rounds: int, steps: int, contenders: Sequence[str] = ()) -> Standing:
    """One race; of `contenders` those that can run, or all that can. Memory is measured on 2 ranks."""
    able = contenders_of(work, ranks)
    chosen = tuple(name for name in able if not contenders or name in contenders)
    heat = Heat(work=work, contenders=chosen, rounds=rounds, steps=steps, world=ranks, memory=ranks == 2)
    return Standing(model=work.name, ranks=ranks, finishes=run_measured(heat), left_out=left_out(work))


# -- results


def machine() -> dict[str, Any]:
    """Where and when it ran, and how busy the machine was: a race beside other work says little."""
    import transformers

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "machine": f"{platform.machine()} {model}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load": os.getloadavg()[0],
    }


def results_of(standings: Sequence[Standing], before: dict[str, Any], rounds: int) -> dict[str, Any]:
    return {
        **before,
        "load after": os.getloadavg()[0],
        "rounds": rounds,
        "races": [asdict(standing) for standing in standings],
    }


def read_results(results: dict[str, Any]) -> list[Standing]:
    def read(race: dict[str, Any]) -> Standing:
        return Standing(**{**race, "finishes": {name: Finish(**each) for name, each in race["finishes"].items()}})

    return [read(race) for race in results["races"]]


# -- tables


def markdown(results: dict[str, Any]) -> str:
    """The tables of docs/benchmarks.md."""
    standings = read_results(results)
    lines = [
        f"{results['machine']}, Python {results['python']}, torch {results['torch']}, transformers "
        f"{results['transformers']}, one thread a rank, {results['rounds']} rounds, {results['date'][:10]}; load of "
        f"the machine {results['load']:.1f} before and {results['load after']:.1f} after.",
    ]
    for size in sorted({standing.ranks for standing in standings}):
        mine = [standing for standing in standings if standing.ranks == size]
        times = "milliseconds a step, the median of the rounds; ratios are medians of the rounds' ratios ± their spread"
        lines += ["", f"**{size} ranks**: {times}.", "", *_times(mine)]
        memory = "MiB that torch has allocated on the worst rank at the worst moment of a step"
        if any(finish.memory for standing in mine for finish in standing.finishes.values()):
            lines += ["", f"**{size} ranks**: {memory}.", "", *_memory(mine)]
    reasons = {(standing.model, peer): why for standing in standings for peer, why in standing.left_out.items()}
    by_reason: dict[tuple[str, str], list[str]] = {}
    for (model, peer), why in reasons.items():
        by_reason.setdefault((peer, why), []).append(model)
    if results.get("failed"):
        lines += ["", f"**Failed**, and not in the tables: {', '.join(results['failed'])}."]
    lines += ["", "Left out:", ""]
    lines += [f"- {PEERS[peer]} of {', '.join(models)}: {why}" for (peer, why), models in by_reason.items()]
    return "\n".join(lines) + "\n"


OURS = ("auto", "dp", "zero3", "tp", "sp", "pp")


def _named(standing: Standing, kind: str) -> str | None:
    """The contender of ours of a kind of plan."""
    return next((name for name in standing.finishes if is_ours(name) and re.split("=", name)[0] == kind), None)


def _columns(standing: Standing, cell: Callable[[str], str]) -> Iterator[str]:
    for name in (*PEERS, *(_named(standing, kind) for kind in OURS)):
        yield cell(name) if name in standing.finishes else "-"


def _header(*extra: str) -> list[str]:
    heads = ["model", *PEERS.values(), *(f"`{kind}`" for kind in OURS), *extra]
    return [f"| {' | '.join(heads)} |", "|" + "|".join(["---", *["--:"] * (len(heads) - 1)]) + "|"]


def _times(standings: Sequence[Standing]) -> Iterator[str]:
    yield from _header("fastest peer / `auto`", "FSDP2 / `zero3`", "`auto` took")
    for standing in standings:
        auto = standing.ratio(standing.fastest_peer, "auto")
        zero3 = standing.ratio("fsdp2", _named(standing, "zero3") or "auto")
        ratios = (f"{ratio.value:.2f} ± {ratio.spread:.2f}" for ratio in (auto, zero3))
        cells = _columns(standing, lambda name, standing=standing: f"{1e3 * standing.time(name):.0f}")
        yield f"| {' | '.join([standing.model, *cells, *ratios, standing.finishes['auto'].plan])} |"


def _memory(standings: Sequence[Standing]) -> Iterator[str]:
    yield from _header()
    for standing in standings:
        cells = _columns(standing, lambda name, standing=standing: _mib(standing.finishes[name].memory))
        yield f"| {' | '.join([standing.model, *cells])} |"


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.0f}"


PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
MARKS = ("<!-- made by bench.run --models: race -->", "<!-- end of race -->")


def write_page(results: dict[str, Any]) -> None:
    """Put the tables into docs/benchmarks.md."""
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    PAGE.write_text(f"{before}{MARKS[0]}\n{markdown(results)}{MARKS[1]}{rest.partition(MARKS[1])[2]}")
