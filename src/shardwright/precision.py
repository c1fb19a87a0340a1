"""Which dtypes a model is trained in: what it computes with, what it holds, what goes over the network.

    name          parameters   compute    the optimizer updates   gradients are summed in
    -----------   ----------   --------   ---------------------   -----------------------
    fp32          float32      float32    parameters              float32
    bf16-mixed    float32      autocast   parameters              float32
    fp16-mixed    float32      autocast   parameters              float32
    bf16          bfloat16     bfloat16   fp32 masters             bfloat16
    fp16          float16      float16    fp32 masters             float16

A name is short for a `Precision`, which says it in full and can say more. Nothing here casts anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from .errors import InputError, raise_all

DTYPES = ("float64", "float32", "bfloat16", "float16")
SHORT = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
NARROW = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """How a model is trained. None leaves a thing as it is.

    compute     the dtype of autocast around the model
    parameters  what parameters are cast to
    master      whether the optimizer updates float32 copies of parameters that are narrower
    matmul      "float8": linear layers multiply in it, where their inputs have 16 bits. Priced by `sw.plan`, not run
    sync        the dtype in which gradients are summed over ranks; None: that of the parameter
    buffers     what buffers are cast to
    inputs      what the floating-point inputs of a call are cast to
    overrides   (pattern, dtype) pairs for names of parameters and buffers, such as ("*.norm.*", "float32"); the last
                that fits counts. A module that has such a parameter itself computes in that dtype, outside of
                autocast: its inputs are cast to it, and its outputs to what came in
    """

    compute: str | None = None
    parameters: str | None = None
    master: bool = False
    matmul: str | None = None
    sync: str | None = None
    buffers: str | None = None
    inputs: str | None = None
    overrides: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        faults = []
        for name in ("compute", "parameters", "sync", "buffers", "inputs"):
            faults += _dtype_faults(name, getattr(self, name))
        for pattern, dtype in self.overrides:
            faults += _dtype_faults(f"the override of {pattern!r}", dtype)
        if self.compute not in (None, *NARROW):
            faults.append(f"compute={self.compute!r}: autocast is for {' and '.join(NARROW)}; leave compute out")
        if self.matmul not in (None, "float8"):
            faults.append(f"matmul={self.matmul!r}: only 'float8' is known; leave it out")
        raise_all(InputError, "a precision makes no sense:", faults)

    def check_runs(self) -> None:
        """Refuse what can be planned and not run."""
        if self.matmul is not None:
            raise InputError(
                f"precision matmul={self.matmul!r} can be planned for (sw.plan), and not run: there are no kernels "
                "for it here; leave matmul out"
            )

    @property
    def casts(self) -> bool:
        """Whether it changes what a model computes with."""
        return any((self.compute, self.parameters, self.buffers, self.inputs, self.overrides))

    def override(self, key: str) -> str | None:
        """The dtype that the last fitting pattern gives to a parameter or buffer."""
        return next((dtype for pattern, dtype in reversed(self.overrides) if fnmatchcase(key, pattern)), None)

    def dtype_of(self, key: str, buffer: bool = False) -> str | None:
        """What a parameter or buffer that floats is cast to; None: nothing."""
        return self.override(key) or (self.buffers if buffer else self.parameters)

    def check_patterns(self, keys: Iterable[str]) -> None:
        """Refuse patterns that fit no parameter and no buffer."""
        known = list(keys)
        faults = []
        for pattern, _ in self.overrides:
            if not any(fnmatchcase(key, pattern) for key in known):
                faults.append(f"{pattern!r} fits no parameter and no buffer{_near(pattern, known)}")
        raise_all(InputError, "overrides of the precision:", faults)


PrecisionLike = Precision | str | Mapping[str, Any] | None


def read_precision(value: PrecisionLike) -> Precision:
    """A precision as people say it: a name, a mapping of fields (`base` may name one to start from), or itself."""
    if value is None:
        return Precision()
    if isinstance(value, Precision):
        return value
    if isinstance(value, str):
        if value not in NAMED:
            raise InputError(
                f"precision={value!r} is not known{_near(value, NAMED)}; there are {', '.join(NAMED)}, or say it in "
                "full: {'compute': 'bfloat16', 'sync': 'bfloat16', ...}"
            )
        return NAMED[value]
    if not isinstance(value, Mapping):
        raise InputError(f"precision is a {type(value).__name__}; pass a name such as 'bf16-mixed' or a mapping")
    return _read_mapping(value)


def _read_mapping(settings: Mapping[str, Any]) -> Precision:
    known = [field.name for field in fields(Precision)]
    faults = [
        f"{name!r} is no setting{_near(name, (*known, 'base'))}; there are base, {', '.join(known)}"
        for name in settings
        if name not in (*known, "base")
    ]
    raise_all(InputError, "the precision can't be read:", faults)
    base = read_precision(settings.get("base"))
    values: dict[str, Any] = {name: getattr(base, name) for name in known}
    for name, value in settings.items():
        if name == "overrides":
            pairs = value.items() if isinstance(value, Mapping) else value
            values[name] = (*base.overrides, *((str(pattern), read_dtype(dtype)) for pattern, dtype in pairs))
        elif name == "master":
            if not isinstance(value, bool):
                raise InputError(f"master={value!r}: say true or false")
            values[name] = value
        elif name != "base":
            values[name] = None if value is None else read_dtype(value)
    return Precision(**values)


def name_of(precision: Precision) -> str:
    """Its name, or what it computes with; "" if it changes nothing."""
    known = next((name for name, named in NAMED.items() if named == precision), None)
    text = known or precision.compute or precision.parameters or ""
    if known is None and precision.matmul is not None:
        rest = name_of(replace(precision, matmul=None))
        return f"{rest}, matmuls in {precision.matmul}" if rest else f"matmuls in {precision.matmul}"
    return text


def read_dtype(dtype: Any) -> str:
    """The name of a dtype, from "bf16", "bfloat16" or torch.bfloat16."""
    name = str(dtype).removeprefix("torch.")
    return SHORT.get(name, name)


def _dtype_faults(what: str, dtype: str | None) -> list[str]:
    if dtype is None or dtype in DTYPES:
        return []
    return [f"{what} is {dtype!r}, which is no dtype{_near(dtype, (*DTYPES, *SHORT))}; there are {', '.join(DTYPES)}"]


def _near(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


NAMED = {
    "fp32": Precision(parameters="float32", buffers="float32", inputs="float32"),
    "bf16-mixed": Precision(parameters="float32", compute="bfloat16"),
    "fp16-mixed": Precision(parameters="float32", compute="float16"),
    "bf16": Precision(parameters="bfloat16", buffers="bfloat16", inputs="bfloat16", master=True),
    "fp16": Precision(parameters="float16", buffers="float16", inputs="float16", master=True),
}
