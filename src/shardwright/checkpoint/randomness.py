"""RNG state outside of the model: torch's, numpy's and Python's generators, as bytes in a tensor.

Random ops of a compiled model depend on a key and a step, not on a generator
(`runtime/algorithms/random.py`); the step is saved with the model. On another number of ranks, rank r
takes the state of rank r % n.
"""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import numpy
import torch
from torch import Tensor

from ..errors import CheckpointError
from ..formats import parse_json
from ..runtime import accelerator


def generators() -> Tensor:
    """The state of this rank's generators."""
    kind, keys, position, has_gauss, cached = numpy.random.get_state()
    version, inner, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": _text(torch.get_rng_state()),
        "numpy": [str(kind), numpy.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "python": [version, list(inner), gauss],
    }
    on_accelerator = accelerator.generator_state()
    if on_accelerator is not None:
        states[accelerator.kind()] = _text(on_accelerator)
    return torch.frombuffer(bytearray(json.dumps(states).encode()), dtype=torch.uint8)


def set_generators(saved: Tensor) -> None:
    """Restore the generators."""
    values = parse_json(saved.cpu().numpy().tobytes(), "the RNG state", CheckpointError)
    try:
        kind, keys, position, has_gauss, cached = values["numpy"]
        version, inner, gauss = values["python"]
        torch.set_rng_state(_bytes(values["torch"]))
        on_accelerator = values.get(accelerator.kind())  # none in a state of another kind of device
        if on_accelerator is not None:
            accelerator.set_generator_state(_bytes(on_accelerator))
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
        random.setstate((version, tuple(inner), gauss))
    except (ValueError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"the RNG state can't be read: {error!r}") from error


def _text(state: Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
