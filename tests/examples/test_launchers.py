"""The manifests and scripts for schedulers: what can be checked of them without a cluster."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from shardwright.formats.schema import anything, integer, listing, literal, mapping, record, text

EXAMPLES = Path(__file__).parents[2] / "examples"
NAME = text(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", longest=63, described="a name of Kubernetes")


CONTAINER = record(
    {"name": literal("pytorch"), "image": text(), "command": listing(text())},
    {
        "args": listing(text()),
        "env": listing(record({"name": text(r"\w+"), "value": text()})),
        "resources": record({}, {"limits": mapping(anything()), "requests": mapping(anything())}),
        "volumeMounts": listing(record({"name": NAME, "mountPath": text("/.*")})),
    },
)
POD = record(
    {"containers": listing(CONTAINER)},
    {
        "volumes": listing(
            record({"name": NAME}, {"persistentVolumeClaim": record({"claimName": NAME}), "emptyDir": anything()})
        )
    },
)
REPLICAS = record(
    {"template": record({"spec": POD}, {"metadata": anything()})},
    {"replicas": integer(1, 100_000), "restartPolicy": literal("Always", "OnFailure", "Never", "ExitCode")},
)
# The part of kubeflow.org/v1 that the example uses. Numbers of processes are text there, of replicas integers.
JOB = record(
    {
        "apiVersion": literal("kubeflow.org/v1"),
        "kind": literal("PyTorchJob"),
        "metadata": record({"name": NAME}, {"namespace": NAME}),
        "spec": record(
            {"pytorchReplicaSpecs": record({"Worker": REPLICAS}, {"Master": REPLICAS})},
            {
                "nprocPerNode": text(r"\d+|auto|gpu|cpu"),
                "elasticPolicy": record(
                    {},
                    {
                        "rdzvBackend": literal("c10d", "etcd", "etcd-v2"),
                        "minReplicas": integer(1),
                        "maxReplicas": integer(1),
                        "maxRestarts": integer(0),
                    },
                ),
                "runPolicy": record(
                    {}, {"cleanPodPolicy": literal("All", "Running", "None"), "backoffLimit": integer(0)}
                ),
            },
        ),
    }
)


def job():
    return yaml.safe_load((EXAMPLES / "pytorchjob.yaml").read_text())


def test_the_manifest_of_kubernetes_is_what_its_schema_asks_for():
    data = job()
    assert list(JOB(data)) == []
    spec, pod = data["spec"], data["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    elastic = spec["elasticPolicy"]
    assert elastic["minReplicas"] <= spec["pytorchReplicaSpecs"]["Worker"]["replicas"] <= elastic["maxReplicas"]
    container = pod["containers"][0]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == spec["nprocPerNode"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "nprocPerNode"), 8),
        (("spec", "pytorchReplicaSpecs", "Worker", "restartPolicy"), "Sometimes"),
        (("spec", "elasticPolicy", "minReplica"), 2),
        (("metadata", "name"), "Shard_wright"),
    ],
)
def test_a_wrong_manifest_is_noticed(path, value):
    data = job()
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert len(JOB(data)) == 1


def test_torchrun_reads_what_the_operator_sets(monkeypatch):
    variables = {"PET_NNODES": "2:4", "PET_NPROC_PER_NODE": "8", "PET_RDZV_BACKEND": "c10d", "PET_MAX_RESTARTS": "10"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    container = job()["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    read = get_args_parser().parse_args([*container["command"][1:], *container["args"]])
    assert (read.nnodes, read.nproc_per_node, read.rdzv_backend, read.max_restarts) == ("2:4", "8", "c10d", 10)
    assert [read.training_script, *read.training_script_args][:2] == ["shardwright", "train"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_the_script_for_slurm_calls_torchrun_once_a_node(tmp_path):
    for name, text_of in {"srun": 'echo "$@"', "scontrol": "printf 'gpu03\\ngpu04\\n'"}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text_of}\n")
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "gpu[03-04]", "SLURM_NNODES": "2"}
    command = ["bash", str(EXAMPLES / "slurm.sh"), "config.yaml", "--directory", "runs"]
    done = subprocess.run(command, env=variables | {"SLURM_JOB_ID": "7"}, capture_output=True, text=True, check=True)
    words = done.stdout.split()
    assert words[0] == "torchrun"
    read = get_args_parser().parse_args(words[1:])
    assert (read.nnodes, read.nproc_per_node, read.rdzv_endpoint, read.max_restarts) == ("2", "8", "gpu03:29500", 3)
    assert [read.training_script, *read.training_script_args] == [
        "shardwright", "train", "config.yaml", "--directory", "runs", "--resume", "last",
    ]  # fmt: skip
