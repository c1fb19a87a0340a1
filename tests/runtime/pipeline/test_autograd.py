"""The unmodified loop over pipelines, on gloo processes, against the same model on one device.

Processes take seconds to start, so that the cases of one number of ranks run in the same ones.
"""

import pytest
import torch
import torch.nn.functional as F

from shardwright.errors import InputError, RankError
from shardwright.schedule import forward_only, schedule_kind, spread, with_prologue
from tests.runtime.ranks import run_processes

from . import chain

SEATS = {  # for each number of seats, devices of each
    "2": ((0,), (1,)),
    "4": ((0,), (1,), (2,), (3,)),
    "1+2": ((0,), (1, 2)),
    "2x2": ((0, 1), (2, 3)),
    "1+3": ((0,), (1, 2, 3)),
    "3+1": ((0, 1, 2), (3,)),
    "1+2+1": ((0,), (1, 2), (3,)),
}
PARTS = {1: (4,), 2: (2, 2), 3: (1, 2, 1), 4: (1, 1, 1, 1)}


def schedules(kind, pp_ranks, microbatches):
    """The training schedule, the one for inference, and how many parts each stage has."""
    schedule = spread(schedule_kind(kind).make(len(pp_ranks), microbatches), pp_ranks)
    last = [schedule.stages - 1]
    forward = forward_only(schedule.holders, microbatches)
    return with_prologue(schedule, last), with_prologue(forward, last), PARTS[schedule.stages]


def ready(rank, kind, pp_ranks, microbatches, **options):
    training, inference, parts = schedules(kind, SEATS[pp_ranks], microbatches)
    return chain.build(rank, training, inference, parts, **options)


def gradients(parameters):
    return {key: None if p.grad is None else p.grad.as_subclass(torch.Tensor) for key, p in parameters.items()}


def merged(results):
    """What the ranks hold together; copies must be equal."""
    by_name = {}
    for result in results:
        for key, value in result.items():
            if key in by_name and value is not None:
                torch.testing.assert_close(value, by_name[key], rtol=0, atol=0)
            by_name[key] = value
    return by_name


def assert_near(actual, wanted, where=""):
    assert actual.keys() == wanted.keys()
    for key, value in wanted.items():
        if value is None:
            assert actual[key] is None, key
        else:
            text = f"{where} {key}: "
            torch.testing.assert_close(actual[key], value, rtol=0, atol=1e-12, msg=lambda why, text=text: text + why)


# -- a step under every kind of schedule ---------------------------------------------------

CASES = {
    2: [("gpipe", "2", 4), ("1f1b", "2", 4), ("1f1b", "2", 1), ("interleaved", "2", 4), ("interleaved", "2", 3),
        ("zb", "2", 4), ("zbv", "2", 4), ("zbv", "2", 1)],
    3: [("1f1b", "1+2", 2), ("interleaved", "1+2", 4)],
    4: [
        ("1f1b", "4", 6), ("gpipe", "4", 3), ("1f1b", "2x2", 3), ("gpipe", "1+3", 2), ("1f1b", "3+1", 4),
        ("1f1b", "1+2+1", 4), ("interleaved", "1+3", 2), ("zb", "4", 6), ("zbv", "2x2", 4), ("zb", "1+2+1", 3),
    ],
}  # fmt: skip


def steps(rank, cases):
    collected = []
    for number, (kind, pp_ranks, microbatches) in enumerate(cases):
        built = ready(rank, kind, pp_ranks, microbatches, recomputed=number % 2 == 1)
        outputs = built.running(chain.batch())
        outputs[0].backward()
        collected.append((gradients(built.parameters), [out.detach() for out in outputs]))
    return collected


@pytest.mark.parametrize("ranks", CASES)
def test_a_step_is_that_of_the_original(ranks):
    results = run_processes(ranks, steps, CASES[ranks])
    model = chain.Single()
    outputs = model(*chain.batch())
    outputs[0].backward()
    for case in zip(*results, strict=True):
        assert_near(merged([value for value, _ in case]), gradients(dict(model.named_parameters())))
        for _, tensor in case:
            for mine, wanted in zip(tensor, outputs, strict=True):
                torch.testing.assert_close(mine, wanted.detach(), rtol=0, atol=1e-12)


# -- what people do in a loop ----------------------------------------------------------------
#
# A use is a function of (model, parameters by name). What it returns and the gradients that it
# leaves must be the same for the pipeline and for the original.


def divided(model, parameters):
    (model(*chain.batch())[0] / 3).backward()


def two_calls_one_backward(model, parameters):
    first, second = model(*chain.batch())[0], model(*chain.batch(1))[0]
    (first + 2 * second).backward()


def twice_through_one_graph(model, parameters):
    loss = model(*chain.batch())[0]
    loss.backward(retain_graph=True)
    (loss * 3).backward()


def accumulated(model, parameters):
    for step in range(3):
        (model(*chain.batch(step))[0] / (step + 1)).backward()


def cleared(model, parameters):
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    losses = []
    for step, to_none in enumerate((True, False, True, False)):
        loss = model(*chain.batch(step))[0]
        optimizer.zero_grad(set_to_none=to_none)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def hooked(model, parameters):
    seen = []
    used = [key for key in parameters if key not in ("idle", "ws")]
    for key in used:
        parameter = parameters[key]
        parameter.register_hook(lambda gradient: gradient * 2)
        parameter.register_post_accumulate_grad_hook(lambda p, key=key: seen.append(key))
    model(*chain.batch())[0].backward()
    assert sorted(seen) == sorted(used)


def scaled(model, parameters):
    for step, scale in enumerate((1.0, 1024.0, 1024.0, 512.0)):
        for parameter in parameters.values():
            parameter.grad = None
        (model(*chain.batch(step))[0] * scale).backward()


def of_inputs(model, parameters):
    x, target = chain.batch()
    x.requires_grad_()
    model(x, target)[0].backward()
    return x.grad


def asked_for(model, parameters):
    gradients = torch.autograd.grad(model(*chain.batch())[0], list(parameters.values()), allow_unused=True)
    return dict(zip(parameters, gradients, strict=True))


def frozen(model, parameters):
    for key in {"w0", "b0", "w2"} & parameters.keys():
        parameters[key].requires_grad_(False)
    model(*chain.batch())[0].backward()
    for parameter in parameters.values():
        parameter.requires_grad_()
    model(*chain.batch(1))[0].backward()


def other_memory(model, parameters):
    model(*chain.batch())[0].backward()
    for parameter in parameters.values():
        parameter.grad = None
        parameter.data = parameter.data * 2
    model(*chain.batch())[0].backward()


def without_gradients(model, parameters):
    with torch.no_grad():
        outputs = model(*chain.batch())
    assert not any(out.requires_grad for out in outputs)
    return list(outputs)


def inference_first(model, parameters):
    with torch.inference_mode():
        model(*chain.batch())
    model(*chain.batch(1))[0].backward()


def several_outputs(model, parameters):
    loss, logits, _, decay, aside = model(*chain.batch())
    (loss + 0.1 * decay + logits.square().mean() + aside.sum()).backward()


def loss_outside(model, parameters):
    x, target = chain.batch()
    logits = model(x, target)[1]
    loss = F.cross_entropy(logits, target, label_smoothing=0.1)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss.detach()


USES = [
    divided, two_calls_one_backward, twice_through_one_graph, accumulated, cleared, hooked, scaled, of_inputs,
    asked_for, frozen, other_memory, without_gradients, inference_first,
]  # fmt: skip
OUTSIDE = [*USES, several_outputs, loss_outside]


def merged_uses(results):
    return [
        (merged([tensor for tensor, _ in case]), [tensor for _, tensor in case]) for case in zip(*results, strict=True)
    ]


def uses(rank, kind, pp_ranks, backward, names):
    collected = []
    for name in names:
        built = ready(rank, kind, pp_ranks, 4, backward=backward)
        inputs = globals()[name](lambda *tensors, built=built: built.running(tensors), built.parameters)
        collected.append((gradients(built.parameters), inputs))
    return collected


@pytest.mark.parametrize(
    ("kind", "pp_ranks", "backward"),
    [("zb", "2", "inside"), ("1f1b", "1+2", "inside"), ("interleaved", "2", "outside"), ("zbv", "1+2", "outside")],
)
def test_what_people_do(kind, pp_ranks, backward):
    names = [use.__name__ for use in (USES if backward == "inside" else OUTSIDE)]
    if pp_ranks == "1+2":
        names.remove("asked_for")  # gradients that are not accumulated are not summed over ranks either
    results = run_processes(sum(map(len, SEATS[pp_ranks])), uses, kind, pp_ranks, backward, names, timeout=120)
    for name, (result, value) in zip(names, merged_uses(results), strict=True):
        model = chain.Single()
        parameters = dict(model.named_parameters())
        wanted = globals()[name](model, parameters)
        assert_near(result, gradients(parameters), name)
        for item in value:
            if name == "asked_for":
                assert_near(item, {key: wanted[key] for key in item})
            elif wanted is not None:
                torch.testing.assert_close(item, wanted, rtol=0, atol=1e-12)


# -- what is refused -------------------------------------------------------------------------


def refusals(rank):
    built = ready(rank, "1f1b", "2", 4)
    collected = []

    def note(use):
        try:
            use()
            collected.append(None)
        except InputError as error:
            collected.append(str(error))

    loss, logits, _, decay, _ = built.running(chain.batch())
    note(lambda: logits.sum().backward())
    note(lambda: (loss + decay).backward())
    note(lambda: loss.backward(create_graph=True))
    note(loss.backward)
    note(loss.backward)
    return collected


def test_what_is_refused_says_what_to_do():
    for result in run_processes(2, refusals):
        assert "output logits of a pipeline" in result[0] and 'backward="outside"' in result[0]
        assert "output decay of a pipeline" in result[1] and 'backward="outside"' in result[1]
        assert "leave create_graph out" in result[2]
        assert result[3] is None
        assert "retain_graph=True" in result[4]


def broken(rank):
    """All ranks raise alike, and the script goes on."""
    built = ready(rank, "1f1b", "2", 4)
    for placed in built.pipeline.placed:
        if placed.stage is not None:
            placed.stage.random = None
    collected = []
    for _ in range(2):
        try:
            built.running(chain.batch())
        except (RankError, AttributeError) as error:
            collected.append(str(error))
    return collected


def test_a_pipeline_that_broke_off_does_not_go_on():
    for first, second in run_processes(2, broken):
        assert "'NoneType' object has no attribute 'microbatch'" in first
        assert "an earlier step of this pipeline was interrupted" in second


def evaluations(rank):
    """In eval nothing is computed for a backward that does not come, and one that comes works."""
    built = ready(rank, "1f1b", "2", 4)
    loss, logits, *_ = built.running(chain.batch(), training=False)
    calls = sum(placed.stage.calls for placed in built.pipeline.placed if placed.stage is not None)
    (loss + logits.sum()).backward()
    return gradients(built.parameters), calls


def test_eval_runs_forwards_and_waits_for_a_backward():
    results = run_processes(2, evaluations)
    model = chain.Single()
    loss, logits, *_ = model(*chain.batch())
    (loss + logits.sum()).backward()
    assert_near(merged([result for result, _ in results]), gradients(dict(model.named_parameters())))
    assert [calls for _, calls in results] == [4, 4]


def put_off(rank):
    built = ready(rank, "1f1b", "1+2", 2)
    with built.sync.no_sync():
        for step in range(2):
            built.running(chain.batch(step))[0].backward()
    built.running(chain.batch(2))[0].backward()
    return gradients(built.parameters)


def test_no_sync_puts_the_sums_off():
    model = chain.Single()
    for step in range(3):
        model(*chain.batch(step))[0].backward()
    assert_near(merged(run_processes(3, put_off)), gradients(dict(model.named_parameters())))


# -- loss scaling ----------------------------------------------------------------------------


def overflowing(rank, backward, pp_ranks):
    """A gradient of the last stage overflows in the second of four steps."""
    built = ready(rank, "1f1b", pp_ranks, 4, backward=backward)
    optimizer = torch.optim.SGD(built.parameters.values(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    collected = []
    for step in range(4):
        optimizer.zero_grad()
        if step == 1 and "w3" in built.parameters:
            handle = built.parameters["w3"].register_hook(lambda gradient: gradient * float("inf"))
        scaler.scale(built.running(chain.batch(step))[0]).backward()
        if step == 1 and "w3" in built.parameters:
            handle.remove()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        values = {key: p.detach().as_subclass(torch.Tensor).clone() for key, p in built.parameters.items()}
        collected.append((values, scaler.get_scale()))
    return collected


@pytest.mark.parametrize(("backward", "pp_ranks"), [("inside", "2"), ("outside", "1+2")])
def test_an_overflow_on_one_stage_is_seen_by_all(backward, pp_ranks):
    model = chain.Single()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wanted = []
    for step in range(4):
        if step != 1:
            optimizer.zero_grad()
            model(*chain.batch(step))[0].backward()
            optimizer.step()
        wanted.append({key: p.detach().clone() for key, p in model.named_parameters()})
    results = run_processes(sum(map(len, SEATS[pp_ranks])), overflowing, backward, pp_ranks)
    for step, case in enumerate(zip(*results, strict=True)):
        assert_near(merged([values for values, _ in case]), wanted[step], f"step {step}")
        assert [scale for _, scale in case] == [(1024.0, 512.0, 512.0, 1024.0)[step]] * len(case)


SCALE = 2.0**12


def tiny_batch():
    x, target = chain.batch(dtype=torch.float16)
    return x * 1e-5, target


def underflowing(rank):
    """The gradient of the first weight is too small for float16 unless the loss is scaled."""
    built = ready(rank, "1f1b", "2", 2, dtype=torch.float16)
    collected = []
    for _ in range(2):
        for parameter in built.parameters.values():
            parameter.grad = None
        (built.running(tiny_batch())[0] * SCALE).backward()
        collected.append({key: g.double() / SCALE for key, g in gradients(built.parameters).items() if g is not None})
    return collected


def test_the_schedule_is_seeded_with_the_last_scale():
    model = chain.Single()
    x, target = tiny_batch()
    model(x.double(), target)[0].backward()
    first, second = zip(*run_processes(2, underflowing), strict=True)

    def error(actual):
        return ((actual["w0"] - model.w0.grad).norm() / model.w0.grad.norm()).item()

    assert error(merged(second)) < 0.3 * error(merged(first))
