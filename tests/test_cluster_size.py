"""The cluster that `sw.plan` is asked for, by name or by file."""

from pathlib import Path

import pytest

from shardwright.errors import ClusterError
from shardwright.parallelize import cluster_size
from shardwright.plan.request import read_source

EXAMPLE = Path(__file__).parents[1] / "examples" / "cluster.yaml"


@pytest.mark.parametrize(
    ("cluster", "plan", "size"),
    [
        ("8xA100-80GB", "auto", 8),
        ("4x8xH100", "auto", 32),
        ("8xMI300X", "tp=8", 8),
        ("cpu", "dp=2,tp=2", 4),
        ("cpu", "auto", 1),
        ("cpu:4", "auto", 4),
        (str(EXAMPLE), "auto", 32),
    ],
)
def test_a_cluster_says_how_many_devices_there_are(cluster, plan, size):
    assert cluster_size(cluster, read_source(plan)) == size


def test_an_unknown_cluster_is_refused():
    with pytest.raises(ClusterError, match="did you mean H100"):
        cluster_size("8xH1000", read_source("auto"))
