"""Wrappers of other libraries, put around a compiled model or going in: taken off where that is right, else refused."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from shardwright.errors import InputError
from shardwright.parallelize import parallelize
from shardwright.parallelize import plan as make_plan
from shardwright.runtime.model.parallel_model import ParallelModel
from shardwright.verify import verify
from tests.runtime.ranks import run_ranks

X = torch.linspace(-1, 1, 16, dtype=torch.double).view(4, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.up(x).relu()).square().mean()


class Outer(nn.Module):
    """An ordinary module with a compiled part."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), inner

    def forward(self, x):
        return self.inner(self.first(x))


with torch.random.fork_rng():
    torch.manual_seed(0)
    FRESH = Net().double()


def net() -> Net:
    return copy.deepcopy(FRESH)


def compiled(folder, plan="single") -> ParallelModel:
    return parallelize(net(), plan=plan, example=(X,), compile={"directory": folder})


# -- around -------------------------------------------------------------------------------------


class Prepared:
    """What accelerate does to a model on several processes, as far as it can be seen from here."""

    def __init__(self, model: nn.Module) -> None:
        model.to("cpu")
        self.model = DistributedDataParallel(model)


AROUND = {
    "DistributedDataParallel": DistributedDataParallel,
    "FullyShardedDataParallel": lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu")),
    "fully_shard": fully_shard,
    "replicate": replicate,
    "DataParallel": DataParallel,
    "accelerate": Prepared,
}


def around(rank, folder, name, nested):
    """On processes: these wrappers look for devices and process groups when they are made."""
    model = compiled(folder, "tp=2")
    before = model.full_state_dict()
    try:
        AROUND[name](Outer(model) if nested else model)
    except InputError as error:
        after = model.full_state_dict() if not (nested and name == "fully_shard") else before
        return str(error), all(torch.equal(before[key], after[key]) for key in before)
    return "", False


@pytest.mark.parametrize(("name", "nested"), [(name, False) for name in AROUND] + [(n, True) for n in list(AROUND)[:3]])
def test_what_would_tear_shards_is_refused(pools, tmp_path, name, nested):
    """Before it has touched them."""
    for text, untouched in pools[2].run(around, str(tmp_path), name, nested):
        assert "can't be put around a compiled model" in text
        assert "accelerator.prepare" in text
        assert untouched


COMPILE = {
    "around": lambda model: torch.compile(model, backend="eager"),
    "around what it is in": lambda model: torch.compile(Outer(model), backend="eager"),
    "in place": lambda model: model.compile(),
}


@pytest.mark.parametrize("how", COMPILE)
def test_torch_compile_around_a_compiled_model_is_refused(tmp_path, how):
    with pytest.raises(InputError, match="can't be put around a compiled model"):
        COMPILE[how](compiled(tmp_path))


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace the builtin")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # which dynamo reads
def test_what_torch_compile_made_calls_a_compiled_model_only_outside_of_it(tmp_path):
    model = compiled(tmp_path)

    @torch.compile(backend="eager")
    def double(call, x):
        return call(x) * 2

    with pytest.raises(InputError, match=r"torch\.compiler\.disable a function that makes the call"):
        double(model, X)
    torch.testing.assert_close(double(torch.compiler.disable(lambda x: model(x)), X), net()(X) * 2)


def test_wrappers_of_other_models_are_left_alone(tmp_path):
    compiled(tmp_path)
    assert isinstance(torch.compile(net(), backend="eager"), nn.Module)
    assert isinstance(DataParallel(net()), nn.Module)


@pytest.mark.parametrize("copied", [copy.deepcopy, AveragedModel, lambda model: copy.deepcopy(Outer(model))])
def test_a_copy_is_refused_and_averaging_is_named(tmp_path, copied):
    with pytest.raises(InputError, match=r"can't be copied.*shardwright\.ema\.EMA.*model\.state_dict"):
        copied(compiled(tmp_path))


@pytest.mark.parametrize("pickled", [pickle.dumps, lambda model: torch.save(model, io.BytesIO())])
def test_a_pickle_is_refused_and_saving_is_named(tmp_path, pickled):
    with pytest.raises(InputError, match=r"can't be pickled.*sw\.save\(.*full_state_dict"):
        pickled(compiled(tmp_path))


@pytest.mark.parametrize("cast", [nn.Module.half, nn.Module.float, lambda model: model.to(torch.bfloat16)])
def test_a_cast_after_compilation_is_refused(tmp_path, cast):
    model = compiled(tmp_path)
    with pytest.raises(InputError, match=r"compiled for parameters in torch\.float64.*precision="):
        cast(model)


def test_a_cast_before_the_first_call_is_compiled(tmp_path):
    model = parallelize(net(), plan="single", compile={"directory": tmp_path}).float()
    torch.testing.assert_close(model(X.float()), net().float()(X.float()), rtol=0, atol=0)


def test_moving_to_where_it_is_changes_nothing(tmp_path):
    model = compiled(tmp_path)
    torch.testing.assert_close(model.to("cpu").double()(X), net()(X))
    with pytest.raises(InputError, match="can't be moved to meta"):
        model.to("meta")


def test_the_state_dict_functions_of_torch_take_a_compiled_model(tmp_path):
    def run(rank):
        values = get_model_state_dict(compiled(tmp_path, "tp=2"))
        return {key: getattr(value, "full_tensor", lambda value=value: value)() for key, value in values.items()}

    for values in run_ranks(2, run):
        assert values.keys() == FRESH.state_dict().keys()
        assert all(torch.equal(value, FRESH.state_dict()[key]) for key, value in values.items())


# -- going in -----------------------------------------------------------------------------------


def test_a_model_of_torch_compile_is_taken_off_and_said(tmp_path):
    original = net()
    wrapped = torch.compile(original, backend="eager")
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="torch.compile, which is dropped"):
        model, _ = parallelize(wrapped, optimizer, plan="single", example=(X,), compile={"directory": tmp_path})
    torch.testing.assert_close(model(X), net()(X))
    assert list(model.state_dict()) == list(net().state_dict())


def test_a_model_compiled_in_place_needs_no_word(tmp_path):
    original = net()
    original.compile(backend="eager")
    torch.testing.assert_close(
        parallelize(original, plan="single", example=(X,), compile={"directory": tmp_path})(X), net()(X)
    )


class Quantized(torch.nn.Module):
    """Named as torch names those that it converts."""


Quantized.__module__ = "torch.ao.nn.quantized.modules.linear"


def prepared(module: nn.Module) -> nn.Module:
    module._is_accelerate_prepared = True  # type: ignore[assignment]
    return module


def placed(module: nn.Module) -> nn.Module:
    module.up._hf_hook = object()  # type: ignore[assignment]
    return module


def with_buffer(tensor: torch.Tensor) -> nn.Module:
    module = net()
    module.register_buffer("graph", tensor)
    return module


class Odd(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


def odd() -> nn.Module:
    module = net()
    module.up.weight = nn.Parameter(torch.zeros(8, 4).as_subclass(Odd))
    return module


IN = {
    "already compiled": (lambda folder: compiled(folder), "compiled already; pass the original"),
    "a part compiled": (lambda folder: Outer(compiled(folder)), "inner is compiled already"),
    "DataParallel": (lambda folder: DataParallel(net()), "is a DataParallel.*pass the module inside"),
    "scripted": (lambda folder: torch.jit.script(net()), "it comes from torch.jit"),
    "a part of torch.compile": (
        lambda folder: Outer(torch.compile(net(), backend="eager")),
        r"inner is a Opti.*\.compile\(\)",
    ),
    "accelerate": (lambda folder: prepared(net()), "leave it out of accelerator.prepare"),
    "device_map": (lambda folder: placed(net()), "up is a Linear that accelerate has prepared or placed"),
    "lazy": (lambda folder: nn.Sequential(nn.LazyLinear(4)), r"0\.weight has no shape yet.*call the model once"),
    "sparse": (lambda folder: with_buffer(torch.eye(4).to_sparse()), "graph is sparse.*keep it dense"),
    "quantized": (lambda folder: nn.Sequential(Quantized()), "is quantized"),
    "a tensor of its own": (lambda folder: odd(), r"up\.weight is a Odd, which has ops of its own"),
    "no module": (lambda folder: net().forward, "pass an nn.Module"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*is deprecated")
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.filterwarnings("ignore:.*Sparse.*invariant")
@pytest.mark.parametrize("what", IN)
@pytest.mark.parametrize("take", [parallelize, make_plan, verify])
def test_what_can_t_go_in_is_refused_with_the_way_out(tmp_path, what, take):
    make, message = IN[what]
    options = {} if take is make_plan else {"compile": {"directory": tmp_path}}
    with pytest.raises(InputError, match=message):
        take(make(tmp_path), plan="single", example=(X,), **options)


def wrapped_before(rank, folder, kind):
    model = net()
    if kind == "DistributedDataParallel":
        model = DistributedDataParallel(model)
    elif kind == "fully_shard":
        fully_shard(model)
    else:
        mesh = DeviceMesh("cpu", [0, 1])
        model.up.weight = nn.Parameter(distribute_tensor(model.up.weight.detach(), mesh, [Replicate()]))
    try:
        parallelize(model, plan="dp=2", example=(X,), compile={"directory": folder})
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "message"),
    [("DistributedDataParallel", 'plan="dp=N"'), ("fully_shard", 'plan="zero3=N"'), ("DTensor", "up.weight is a DT")],
)
def test_what_is_distributed_already_is_refused(pools, tmp_path, kind, message):
    for text in pools[2].run(wrapped_before, str(tmp_path), kind):
        assert message in text


def test_scripts_that_unwrap_ddp_need_no_change(tmp_path):
    model = compiled(tmp_path)
    assert model.module is model


def test_a_part_that_is_called_module_stays_that_part(tmp_path):
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(4, 4)

        def forward(self, x):
            return self.module(x)

    assert isinstance(parallelize(Around(), plan="single", compile={"directory": tmp_path}).module, nn.Linear)


@pytest.mark.filterwarnings("ignore:.*Sparse.*invariant")
@pytest.mark.parametrize("call", ["first", "later"])
def test_a_sparse_input_has_a_program_of_its_own(tmp_path, call):
    model = compiled(tmp_path)
    if call == "later":
        model(X)
    torch.testing.assert_close(model(X.to_sparse()), net()(X))
