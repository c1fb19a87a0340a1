"""docs/ops.md, written from the expectations: `python -m tests.ops.page` writes it, a test holds it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.ops.expectations import REASONS, REFUSED, UNDEFINED

PAGE = Path(__file__).parents[2] / "docs" / "ops.md"
HEAD = """# Op coverage: PyTorch's own test suites

PyTorch tests itself with databases of samples: every op (`op_db`, 702 of them), every module of `torch.nn`
(`module_db`, 114) and every optimizer of `torch.optim` (`optim_db`, 15). `make ops` (`python -m tests.ops`) compiles
each sample with `sw.parallelize` and holds the generated file against eager, in float64, float32 and bfloat16.

| | on one device | sharded |
|---|---|---|
| ops | every sample: results, gradients of all inputs | the first samples of each, on 2 and on 3 ranks |
| modules | every sample, in training and evaluation: gradients of parameters and buffers too | the same |
| optimizers | every sample of settings, three steps: parameters | tensor parallel and ZeRO-2, on 2 ranks |

Where a sample is split, every [role](concepts.md#rules-labels-roles-atoms) of every op is checked on shards first.
Then a plan that splits each op on one of
its roles goes through lowering and emission, and the generated file runs on ranks that are threads.

Results must agree within 1e-10 of the largest element in float64, 1e-5 in float32, 2e-2 in bfloat16. In the two narrow
dtypes eager rounds as well: a result that is farther off is right only if it is no farther from eager in float64 than
eager in the narrow dtype is. Anything else is a fault: other numbers, shapes or dtypes, an error that is not one of
`shardwright.errors`, or a refusal that is not listed here.

```
python -m tests.ops --ops 'nn.functional.conv' --dtype float64 --samples 3 --processes 2
```

On 2026-11-18 all of it ran without a fault, in 109 minutes beside other work (half an hour on two quiet cores):

| samples | right | refused, as listed below | drawn, compared in shape and dtype | skipped: no eager result, or lazy |
|---|---|---|---|---|
| ops, one device: float64, float32, bfloat16 | 17,909, 17,764, 14,382 | 957, 928, 856 | 90, 90, 90 | 43, 53, 48 |
| ops, on 2 and on 3 ranks | 2,342 and 2,075 | | 47 and 41 | |
| modules, one device: float64, float32, bfloat16 | 2,048, 2,048, 867 | 1, 1, 0 | | 6, 6, 0 |
| modules, on 2 and on 3 ranks | 447 and 402 | | | |
| optimizers, one device, and on 2 ranks | 87, and 174 | | | 4, and 8 |

## Random numbers

Ops are known to be random by torch's own tag (`nondeterministic_seeded`), which a custom op may have too. A program
draws by keys of its own, see `docs/design.md`. An op that is drawn replicated is compared with eager under the same
seed; dropout, whose masks are drawn by position, in shape and dtype (`tests/parity/test_random.py` holds its numbers).
"""


def page() -> str:
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield HEAD
    yield f"Not defined, and so compared in shape and dtype only: {_listed(UNDEFINED)}."
    yield ""
    yield "## What is refused"
    yield ""
    yield "Each with an error that names your line. What can't be captured can stay as it is: `sw.opaque(submodule)`,"
    yield "see `docs/control_flow_and_opaque.md`. Of some of these only the calls described are refused."
    yield ""
    yield "| why | ops and modules |"
    yield "|---|---|"
    for word, reason in REASONS.items():
        subjects = [subject for subject, why in sorted(REFUSED.items()) if why == word]
        yield f"| {reason} | {_listed(subjects)} |"


def _listed(subjects: list[str] | tuple[str, ...]) -> str:
    return ", ".join(f"`{subject}`" for subject in subjects)


if __name__ == "__main__":
    PAGE.write_text(page())
