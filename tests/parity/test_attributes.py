"""What a forward reads of its modules may change later: the program follows, or the change is refused."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from shardwright.errors import InputError
from shardwright.parallelize import parallelize
from tests.runtime.ranks import run_ranks

from .looped import gradients
from .threaded import world_of

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.gain, self.flag = nn.Linear(8, 8), 1.0, False
        self.register_buffer("shift", torch.zeros(8))
        self.levels = np.ones(3)

    def forward(self, x):
        x = self.gain * self.layer(x) + self.shift * self.levels[1] + float(self.levels[1])
        return torch.relu(x) if self.flag else x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.drop, self.norm = Inner(), nn.Dropout(0.0), nn.LayerNorm(8)
        self.scale, self.sizes, self.history = 2, [1.0, 2.0], []
        self.config = SimpleNamespace(power=2, unused=1)

    def forward(self, x):
        x = self.norm(self.drop(self.inner(x))) * self.scale + self.sizes[1]
        return (x**self.config.power).mean()


def make():
    torch.manual_seed(0)
    return Net().double()


def follows(change, plan="dp=2", folder=None, early=False, programs=2):
    """Train a step, change the model, train another: equal to the original, with so many programs."""

    def steps(model):
        seen = []
        for turn in range(3):
            if turn == (0 if early else 1):
                change(model)
            model.zero_grad()
            loss = model(X)
            loss.backward()
            seen += [loss.detach(), *gradients(model)]
        return seen

    wanted = steps(make())
    models = [make() for _ in range(world_of(plan))]

    def run(rank):
        model = parallelize(models[rank], plan=plan, compile={"directory": folder})
        return steps(model), len(set(map(id, model._entries.values())))

    for seen, count in run_ranks(world_of(plan), run):
        for mine, other in zip(seen, wanted, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)
        assert count == programs


def set_scale(model):
    model.scale = 3


def set_gain(model):
    model.inner.gain = 0.5


def set_flag(model):
    model.inner.flag = True


def set_eps(model):
    model.norm.eps = 0.1


def set_in_list(model):
    model.sizes[1] = -1.0


def set_in_config(model):
    model.config.power = 3


def set_config(model):
    model.config = SimpleNamespace(power=3, unused=1)


def set_in_array(model):
    model.inner.levels[1] = 5.0


def set_type(model):
    model.scale = 2.0


CHANGES = [set_scale, set_gain, set_flag, set_eps, set_in_list, set_in_config, set_config, set_in_array, set_type]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("early", [False, True], ids=["later", "before the first call"])
def test_a_changed_attribute_compiles_anew(change, early, tmp_path):
    follows(change, folder=tmp_path, early=early, programs=1 if early else 2)


@pytest.mark.parametrize("plan", ["tp=2", "zero3=2", "pp=2"])
def test_under_every_plan(plan, tmp_path):
    follows(set_gain, plan, tmp_path)


def test_the_p_of_a_dropout_changes_what_is_dropped(tmp_path):
    model = parallelize(make(), plan="single", compile={"directory": tmp_path})
    before = model(X)
    model.drop.p = 0.9
    assert model(X) != before
    assert model.drop.p == 0.9


def test_going_back_finds_the_old_program(tmp_path):
    model = parallelize(make(), plan="single", compile={"directory": tmp_path})
    before = model(X)
    model.scale = 3
    model(X)
    model.scale = 2
    assert torch.equal(model(X), before)
    assert len(set(map(id, model._entries.values()))) == 2


def test_what_the_forward_does_not_read_compiles_nothing(tmp_path):
    def change(model):
        model.history.append(1)
        model.epoch, model.config_of_the_run = 3, {"a": 1}

    follows(change, folder=tmp_path, programs=1)


def test_an_attribute_that_appears_is_seen(tmp_path):
    class Optional(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return (self.layer(x) * getattr(self, "factor", 1.0)).mean()

    model = parallelize(Optional().double(), plan="single", compile={"directory": tmp_path})
    before = model(X)
    model.factor = 2.0
    assert torch.equal(model(X), 2 * before)
    del model.factor
    assert torch.equal(model(X), before)


def test_a_buffer_that_is_assigned_is_taken_over(tmp_path):
    def change(model):
        model.inner.shift = torch.ones(8, dtype=torch.float64)

    follows(change, folder=tmp_path, programs=1)


def test_a_plain_tensor_that_is_changed_in_place(tmp_path):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.mask = nn.Linear(8, 8), torch.ones(8)

        def forward(self, x):
            return (self.layer(x) * self.mask).mean()

    model = parallelize(Masked(), plan="single", compile={"directory": tmp_path})
    model(X.float())
    model.mask.zero_()
    assert model(X.float()) == 0


def swap(model):
    model.inner.layer = nn.Linear(8, 8)


def swap_top(model):
    model.drop = nn.Identity()


def add(model):
    model.extra = nn.Linear(8, 8)


def remove(model):
    del model.norm


def add_parameter(model):
    model.inner.register_parameter("extra", nn.Parameter(torch.ones(8)))


def add_top_parameter(model):
    model.extra = nn.Parameter(torch.ones(8))


def replace_parameter(model):
    model.inner.layer.weight = nn.Parameter(torch.ones(8, 8))


def add_buffer(model):
    model.inner.register_buffer("extra", torch.ones(8))


def reshape_buffer(model):
    model.inner.shift = torch.ones(1, dtype=torch.float64)


def hook(model):
    model.inner.register_forward_hook(lambda *_: None)


def pre_hook(model):
    model.inner.layer.register_forward_pre_hook(lambda *_: None)


def backward_hook(model):
    model.inner.register_full_backward_hook(lambda *_: None)


REFUSED = [
    swap, swap_top, add, remove, add_parameter, add_top_parameter, replace_parameter, add_buffer, reshape_buffer,
]  # fmt: skip


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_a_change_of_structure_is_refused_where_it_is_made(change, tmp_path):
    model = parallelize(make(), plan="single", compile={"directory": tmp_path})
    model(X)
    with pytest.raises(InputError, match=r"before sw\.parallelize"):
        change(model)


@pytest.mark.parametrize("change", [hook, pre_hook, backward_hook], ids=lambda change: change.__name__)
def test_a_hook_that_would_not_run_is_refused_at_the_next_call(change, tmp_path):
    model = parallelize(make(), plan="single", compile={"directory": tmp_path})
    model(X)
    change(model)
    with pytest.raises(InputError, match=r"before sw\.parallelize"):
        model(X)


def test_a_hook_of_all_modules_would_not_run_for_submodules_and_is_refused(tmp_path):
    model = parallelize(make(), plan="single", compile={"directory": tmp_path})
    before = model(X)
    handle = register_module_forward_hook(lambda *_: None)
    with pytest.raises(InputError, match=r"forward hook of all modules.*handle\.remove\(\)"):
        model(X)
    handle.remove()
    assert torch.equal(model(X), before)


def test_a_setting_of_the_class_is_followed(tmp_path):
    kind = type("Scaled", (Net,), {"scaling": 1.0, "forward": lambda self, x: Net.forward(self, x) * self.scaling})
    model = parallelize(kind().double(), plan="single", compile={"directory": tmp_path})
    before = model(X)
    kind.scaling = 3.0
    torch.testing.assert_close(model(X), 3 * before)


def test_a_hook_that_is_removed_again_does_no_harm(tmp_path):
    model = parallelize(make(), plan="single", compile={"directory": tmp_path})
    before = model(X)
    model.inner.register_forward_hook(lambda *_: None).remove()
    assert torch.equal(model(X), before)


@pytest.mark.parametrize("change", [swap, swap_top], ids=lambda change: change.__name__)
def test_before_the_first_call_structure_may_change(change, tmp_path):
    def late(model):
        torch.manual_seed(1)
        change(model)
        model.double()

    follows(late, folder=tmp_path, early=True, programs=1)


def test_a_parameter_added_before_the_first_call_is_in_the_full_state_dict(tmp_path):
    model = parallelize(make(), plan="single", compile={"directory": tmp_path})
    add_parameter(model)
    model(X)
    assert "inner.extra" in model.full_state_dict()


def test_a_forward_that_is_replaced_later_is_refused(tmp_path):
    model = parallelize(make(), plan="single", compile={"directory": tmp_path})
    model(X)
    model.inner.forward = lambda x: x
    with pytest.raises(InputError, match="forward of inner was replaced"):
        model(X)


def test_a_backward_hook_that_was_there_before_is_refused(tmp_path):
    module = make()
    backward_hook(module)
    with pytest.raises(InputError, match="inner \\(Inner\\) has a backward hook"):
        parallelize(module, plan="single", compile={"directory": tmp_path})


def test_a_forward_hook_that_is_added_before_the_first_call_is_refused(tmp_path):
    model = parallelize(make(), plan="single", compile={"directory": tmp_path})
    hook(model)
    with pytest.raises(InputError, match="inner \\(Inner\\) has a forward hook"):
        model(X)


def test_hooks_of_the_whole_model_run_around_its_call(tmp_path):
    model = parallelize(make(), plan="single", compile={"directory": tmp_path})
    model(X)
    model.register_forward_hook(lambda module, args, result: 2 * result)
    seen = []
    model.register_full_backward_hook(lambda *_: seen.append(1))
    assert torch.equal(model(X), 2 * make()(X))
    model(X.requires_grad_()).backward()
    X.requires_grad_(False)
    assert seen == [1]


def test_a_model_in_eval_with_an_optimizer_is_warned_about(tmp_path):
    module = make().eval()
    model, _ = parallelize(
        module, torch.optim.SGD(module.parameters(), 0.1), plan="single", compile={"directory": tmp_path}
    )
    with pytest.warns(UserWarning, match=r"call model\.train\(\)"):
        model(X)


def test_a_model_that_is_evaluated_first_is_not(tmp_path):
    module = make().eval()
    model, _ = parallelize(
        module, torch.optim.SGD(module.parameters(), 0.1), plan="single", compile={"directory": tmp_path}
    )
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        model(X)


def test_an_attribute_that_is_none_can_be_read(tmp_path):
    module = make()
    module.nothing = None
    model = parallelize(module, plan="single", compile={"directory": tmp_path})
    model(X)
    assert model.nothing is None


def test_an_attribute_that_only_a_later_program_reads(tmp_path):
    class Evaluated(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.sharpness = nn.Linear(8, 8), 1.0

        def forward(self, x):
            return (self.layer(x) if self.training else self.layer(x) * self.sharpness).mean()

    model = parallelize(Evaluated().double(), plan="single", compile={"directory": tmp_path})
    before = model(X)
    model.sharpness = 2.0
    model.eval()
    assert torch.equal(model(X), 2 * before)


def test_many_programs_for_one_number_are_warned_about(tmp_path):
    model = parallelize(make(), plan="single", compile={"directory": tmp_path})
    for scale in range(8):
        model.scale = scale
        model(X)
    model.scale = 9
    with pytest.warns(UserWarning, match=r"values of scale, which the forward reads.*make it a buffer"):
        model(X)


def test_many_programs_for_one_argument_are_warned_about(tmp_path):
    class Powers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x, times):
            for _ in range(times):
                x = self.layer(x)
            return x.mean()

    model = parallelize(Powers().double(), plan="single", compile={"directory": tmp_path})
    for times in range(1, 9):
        model(X, times)
    with pytest.warns(UserWarning, match=r"argument 1.*torch\.tensor"):
        model(X, 9)
