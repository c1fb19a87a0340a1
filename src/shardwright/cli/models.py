"""Load the model named on the command line: a function in a file or module, or a Hugging Face config."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..batch_dim import find_batch_dim
from ..errors import InputError, ShardwrightError
from ..formats import Faults, anything, either, listing, nothing, raise_faults, read_json, record, show
from ..formats import text as text_schema
from ..ir import Graph
from ..parallelize import captured_graph, cluster_size
from ..plan import Plan
from ..plan.request import AutoPlan, is_policy, read_source
from ..precision import NAMED
from ..python_files import find_function
from ..verify.parity import arguments_of, ranks_of
from .arguments import MODEL

Example = tuple[tuple[Any, ...], dict[str, Any]]


def load_model(text: str, batch: int | None, seq: int, *, meta: bool = False) -> tuple[nn.Module, Example]:
    """The module named on the command line, and example arguments."""
    if batch is not None and batch < 1:
        raise InputError(f"--batch {batch} must be at least 1")
    if text.startswith("hf:"):
        return _hugging_face(Path(text.removeprefix("hf:")), batch or 8, seq, meta)
    make = find_function(text, f"a model; write {MODEL}")
    result = make()
    model, example = _parts(result, text)
    return model, example if batch is None else resize_batch(example, batch)


def graph_for(options: Namespace, plan: Plan) -> Graph:
    """The graph of the model that is named, in the precision that a plan was made for."""
    module, example = load_model(options.model, options.batch, options.seq, meta=True)
    names = (predicted["for"].get("precision") for predicted in plan.predicted.values())
    return captured_graph(module, example, precision=next((name for name in names if name in NAMED), None)).graph


def _parts(result: Any, text: str) -> tuple[nn.Module, Example]:
    """(module, args, kwargs) from the result of the user's function."""
    if isinstance(result, nn.Module):
        raise InputError(f"{text} returns a module alone; return (module, example), with example a tuple of arguments")
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not isinstance(result[0], nn.Module):
        raise InputError(
            f"{text} returns a {type(result).__name__}; return (module, example) or (module, args, kwargs)"
        )
    return result[0], arguments_of(result[1] if len(result) == 2 else (tuple(result[1]), dict(result[2])))


def resize_batch(example: Example, batch: int) -> Example:
    """The example with another batch size, its samples repeated."""
    leaves, spec = pytree.tree_flatten(example)
    batch_dims = find_batch_dim([("", tuple(leaf.shape) if isinstance(leaf, Tensor) else ()) for leaf in leaves])
    rows = batch_dims.size
    if rows is None:
        raise InputError(f"--batch {batch}: the example's tensors have no common first dim; leave --batch out")
    repeated = [
        leaf.index_select(0, torch.arange(batch, device=leaf.device) % rows) if batched else leaf
        for leaf, batched in zip(leaves, batch_dims.batched, strict=True)
    ]
    resized: Example = pytree.tree_unflatten(repeated, spec)
    return resized


def _hugging_face(path: Path, batch: int, seq: int, meta: bool) -> tuple[nn.Module, Example]:
    """A language model from its config, with random weights and random token ids."""
    try:
        import transformers
    except ImportError as error:
        raise InputError("hf: needs the package transformers; install it with pip install transformers") from error
    data = read_json(path, InputError)
    faults = [*_CONFIG(data), *(_ANY(data) or _count_faults(data))]
    raise_faults(InputError, f"{path} is not a Hugging Face config:", faults)
    try:
        config = transformers.AutoConfig.for_model(**data)
        named = getattr(transformers, (data.get("architectures") or ["?"])[0], None)
        is_model = isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)
        make: Any = named if is_model else transformers.AutoModelForCausalLM.from_config
        with torch.device("meta"):  # costs nothing, and tells how large it is
            module: nn.Module = make(config)
        if not meta:
            check_memory(module, str(path))
            module = make(config)
        longest = getattr(config, "max_position_embeddings", None)
        ids = torch.randint(config.vocab_size, (batch, min(seq, longest or seq)))
    except ShardwrightError:
        raise
    except Exception as error:  # of any kind: a config can be wrong in the terms of every model
        raise InputError(
            f"{path}: transformers {transformers.__version__} makes no model of this {data['model_type']!r} config: "
            f"{type(error).__name__}: {str(error)[:2000]}"
        ) from error
    return module.train(), ((ids,), {"labels": ids.clone(), "use_cache": False})


_CONFIG = record(
    {"model_type": text_schema(r"[\w-]+", longest=100, described="a name such as llama")},
    {"architectures": either(listing(text_schema(r"\w+", longest=200, described="a class"), most=16), nothing())},
    others=True,
)
_ANY = anything()
_COUNTED = re.compile(r"layer|block|depth|stage|expert")
MOST_MODULES = 1024


def _count_faults(value: Any, key: str = "") -> Faults:
    """Numbers that are too large to be meant: a model has as many modules as some of them say."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [
            ((at, *route), message)
            for at, item in items
            for route, message in _count_faults(item, at if isinstance(at, str) else key)
        ]
    most = MOST_MODULES if _COUNTED.search(key) else 2**40
    is_large = isinstance(value, int) and abs(value) > most
    return [((), f"should be at most {most}, is {show(value)}")] if is_large else ()


def check_memory(module: nn.Module, name: str) -> None:
    """Refuse a model on meta that this machine has no memory for."""
    size = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > room:
        raise InputError(
            f"{name} has {size / 2**30:.1f} GiB of parameters, and this machine has {room / 2**30:.1f} GiB of memory; "
            "plan and explain need none"
        )


def count_devices(options: Namespace) -> int:
    """The number of ranks: the plan's, that of --ranks, or all of the cluster."""
    source = read_source(options.plan)
    if not isinstance(source, AutoPlan) and not is_policy(source):
        ranks = ranks_of(source)
        if options.ranks is not None and options.ranks != ranks:
            raise InputError(f"--ranks {options.ranks} does not fit --plan {options.plan}, which is for {ranks}")
        return ranks
    named = getattr(options, "cluster", None)
    return options.ranks or (cluster_size(named, source) if named is not None else 1)
