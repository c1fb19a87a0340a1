"""A selection of `python -m tests.fuzz`, and the attacks that are known by name."""

from __future__ import annotations

import json
import os

import pytest
import torch

from shardwright.checkpoint import CheckpointFolder
from shardwright.checkpoint.convert import open_source
from shardwright.checkpoint.folder import latest_in
from shardwright.cluster.file import load as load_cluster
from shardwright.errors import CheckpointError, ClusterError, InputError, LayoutError, PlanError
from shardwright.plan import parse_plan_string
from shardwright.plan.file import load as load_plan
from shardwright.plan.request import PlanFile
from shardwright.report.plans import read_plan
from tests.checkpoint.little import little
from tests.plan.graphs import graph_of

from .kinds import KINDS, Bag, seal
from .mutations import BOMB, LOOP, MERGE
from .trial import try_all


@pytest.mark.parametrize("kind", KINDS)
def test_mutated_files_end_in_errors_of_ours(kind):
    outcomes = try_all(kind, range(10_000, 10_040))
    assert [outcome for outcome in outcomes if outcome.fault] == []
    assert sum(outcome.refused for outcome in outcomes) > 10


@pytest.fixture
def plan(tmp_path):
    KINDS["plan"].make(tmp_path)
    return tmp_path / "plan.json"


def changed(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("size", [10**6, 10**8, 10**10, 10**40, -1, 0, "2", 2.0, True, None])
def test_a_mesh_of_any_size_is_refused_at_once(plan, size):
    changed(plan, mesh={"tp": size})
    for read in (lambda: read_plan(plan), lambda: load_plan(plan, graph_of("gpt")), lambda: PlanFile(path=plan).size):
        with pytest.raises(PlanError, match=r"mesh.tp should be a whole number from 1 to 131072"):
            read()


def test_axes_that_are_too_many_together_are_refused(plan):
    changed(plan, mesh={"tp": 10**5, "dp": 10**5})
    with pytest.raises(LayoutError, match="a mesh has at most 131072"):
        read_plan(plan)
    with pytest.raises(PlanError, match="there may be 131072"):
        parse_plan_string(f"tp={10**9}")


def test_all_faults_of_a_plan_are_named_with_their_places(plan):
    data = json.loads(plan.read_text())
    data["entries"]["train"][0]["choices"] = {"x": {"tp": 3}}
    data["predicted"]["train"]["memory"]["peak"] = "much"
    data["predicted"]["train"]["seconds"] = float("nan")
    data |= {"notes": [1], "microbatches": 0, "storage": {"w": {"dp": []}}}
    plan.write_text(json.dumps(data))
    with pytest.raises(PlanError) as error:
        load_plan(plan, graph_of("gpt"))
    for place in (
        "entries.train[0].choices.x.tp should be text", "predicted.train.memory.peak should be a finite number",
        "predicted.train.seconds should be a finite number", "notes[0] should be text", "storage.w.dp should be",
        "microbatches should be a whole number from 1",
    ):  # fmt: skip
        assert place in str(error.value)


def test_a_plan_with_quotes_in_its_name_is_refused(plan):
    changed(plan, policy='x"""\nimport os\n"""')
    with pytest.raises(PlanError, match="policy should be text without quotes"):
        load_plan(plan, graph_of("gpt"))


def test_a_key_that_stands_twice_is_refused(plan):
    plan.write_text(plan.read_text().replace('"model":', '"model": "other", "model":', 1))
    with pytest.raises(PlanError, match="the key 'model' is there twice"):
        read_plan(plan)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="it is not a file"):
        read_plan(tmp_path / "plan.json")


@pytest.mark.parametrize(
    "text", [BOMB, MERGE, LOOP, b"[" * 100_000, b"a: " + b"[" * 3000, b"x: 2026-99-99", b"#" * 10**6]
)
def test_yaml_that_explodes_is_refused(tmp_path, text):
    (tmp_path / "cluster.yaml").write_bytes(text)
    with pytest.raises(ClusterError):
        load_cluster(tmp_path / "cluster.yaml")


def test_an_alias_that_is_used_twice_is_fine(tmp_path):
    (tmp_path / "cluster.yaml").write_text(
        "version: 1\nlinks: {a: &a {bandwidth: 1 GB/s, latency: 1 us}, b: *a}\n"
        "groups: [{devices: 2, device: A100-80GB, inside: a, network: b}]\n"
    )
    assert load_cluster(tmp_path / "cluster.yaml").size == 2


# -- checkpoints that somebody has sealed again ------------------------------------------------------


@pytest.fixture
def step(tmp_path):
    KINDS["checkpoint"].make(tmp_path)
    return tmp_path / "run" / "step-000007"


def loaded(step):
    net, optimizer = little(1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    CheckpointFolder(step.parent).load(net, optimizer, schedulers=schedule, extra={"bag": Bag({})})


def rewrite(step, name, change):
    data = json.loads((step / name).read_text())
    change(data)
    (step / name).write_text(json.dumps(data))
    seal(step)


def test_the_untouched_one_loads(step):
    loaded(step)


def test_tensors_that_share_bytes_are_refused(step):
    """Four megabytes in a file could be a thousand tensors of four megabytes."""

    def change(data):
        first = data["tensors"]["model/up.weight"]
        data["tensors"] |= {f"model/more{number}": first for number in range(1000)}

    rewrite(step, "index.json", change)
    with pytest.raises(CheckpointError, match="have the same bytes"):
        loaded(step)


def test_chunks_that_overlap_are_refused(step):
    def change(data):
        entry = data["tensors"]["model/up.weight"]
        ((offsets, sizes, file, start),) = entry["chunks"]
        half = [sizes[0] // 2, sizes[1]]
        entry["chunks"] = [[offsets, half, file, start], [offsets, half, file, start + 96]]

    rewrite(step, "index.json", change)
    with pytest.raises(CheckpointError, match="overlapping chunks"):
        loaded(step)


def test_chunks_whose_grid_has_no_end_are_refused(step):
    def change(data):
        file = data["tensors"]["model/up.weight"]["chunks"][0][2]
        count = 400
        chunks = [[[at, at, at, at], [1, 1, 1, 1], file, 0] for at in range(count)]
        data["tensors"]["x"] = {"dtype": "U8", "shape": [count, 1, 1, 1], "chunks": chunks}
        data["tensors"]["y"] = {"dtype": "U8", "shape": [count] * 4, "chunks": [
            *chunks, [[0, 0, 0, 0], [count**4 - count, 1, 1, 1], file, 0]]}  # fmt: skip

    rewrite(step, "index.json", change)
    with pytest.raises(CheckpointError, match="is not a valid index"):
        loaded(step)


def test_a_scalar_that_allocates_is_refused(step):
    rewrite(step, "state.json", lambda data: data.update(data={"$": "scalar", "dtype": "V", "value": 2_600_000_000}))
    with pytest.raises(CheckpointError, match="scalar that can't be read"):
        loaded(step)


def test_a_file_outside_of_the_manifest_is_refused(step):
    manifest = json.loads((step / "manifest.json").read_text())
    (step / "other.safetensors").write_bytes((step / "rank-00000.safetensors").read_bytes())
    for name in manifest["files"]:
        assert name != "other.safetensors"
    text = (step / "index.json").read_text().replace("rank-00000.safetensors", "other.safetensors")
    (step / "index.json").write_text(text)
    seal(step)
    with pytest.raises(CheckpointError, match=r"other.safetensors is not in its manifest"):
        open_source(step)


@pytest.mark.parametrize("name", ["../..", "..", ".", "/", "../run/step-000007", ""])
def test_the_pointer_stays_in_its_folder(step, name):
    (step.parent.parent / "manifest.json").write_text("{}")
    (step.parent / "manifest.json").write_text("{}")
    (step.parent / "latest").write_text(name)
    assert latest_in(step.parent) == step


def test_a_learning_rate_that_is_text_is_refused(step):
    rewrite(step, "state.json", lambda data: data["optimizers"][0]["groups"][0].update(lr="fast"))
    with pytest.raises(CheckpointError, match=r"lr is 0.05 here, and was saved as 'fast'"):
        loaded(step)


def test_a_config_that_makes_modules_without_end_is_refused(tmp_path):
    KINDS["hf"].make(tmp_path)
    changed(tmp_path / "config.json", num_hidden_layers=10**7)
    with pytest.raises(InputError, match="num_hidden_layers should be at most 1024"):
        KINDS["hf"].use(tmp_path)


def test_a_config_names_no_function_to_call(tmp_path):
    KINDS["hf"].make(tmp_path)
    changed(tmp_path / "config.json", architectures=["set_seed"])
    module, _ = KINDS["hf"].use(tmp_path)
    assert type(module).__name__ == "LlamaForCausalLM"


def test_a_model_larger_than_the_machine_is_refused_before_it_is_made(tmp_path):
    KINDS["hf"].make(tmp_path)
    changed(tmp_path / "config.json", vocab_size=10**9, hidden_size=4096)
    with pytest.raises(InputError, match="GiB of parameters, and this machine has"):
        KINDS["hf"].use(tmp_path)
