import pytest

from shardwright.cluster import parse
from shardwright.errors import ClusterError


@pytest.mark.parametrize(
    ("name", "nodes", "size", "device"),
    [
        ("H100", 1, 1, "H100"),
        ("8xA100-80GB", 1, 8, "A100-80GB"),
        ("4xH200", 1, 4, "H200"),
        ("16xH100", 2, 16, "H100"),
        ("4x8xH100", 4, 32, "H100"),
        ("3x5xMI300X", 3, 15, "MI300X"),
        ("8xl40s", 1, 8, "L40S"),
        ("cpu", 1, 1, "cpu"),
        ("cpu:4", 1, 4, "cpu"),
        ("64xcpu", 1, 64, "cpu"),
        ("2x4xcpu", 2, 8, "cpu"),
        (" 8xH100 ", 1, 8, "H100"),
    ],
)
def test_a_name_says_nodes_and_devices(name, nodes, size, device):
    cluster = parse(name)
    assert (cluster.nodes, cluster.size, cluster.device(size - 1).name) == (nodes, size, device)
    assert str(cluster) == name.strip()


def test_links_can_be_others_than_usual():
    node = parse("2x8xA100-40GB@ethernet-100").groups[0].node
    assert (node.inside.name, node.network.name, node.network.bandwidth) == ("nvlink-3", "ethernet-100", 100e9 / 64)
    node = parse("2x8xA100-40GB@pcie-4@8xinfiniband-100").groups[0].node
    assert (node.inside.name, node.network.name) == ("pcie-4", "8xinfiniband-100")


def test_groups_of_different_nodes_are_added():
    cluster = parse("2x8xH100 + 4xA100-80GB@ethernet-25")
    assert cluster.size == 20
    assert [cluster.device(rank).name for rank in (0, 15, 16, 19)] == ["H100", "H100", "A100-80GB", "A100-80GB"]
    assert cluster.groups[0].node.network.name == "8xinfiniband-400"
    assert cluster.groups[1].node.network.name == "ethernet-25"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "such as 8xA100-80GB"),
        ("8x", "nodes x devices x device"),
        ("0xH100", "nodes x devices x device"),
        ("2x2x2xH100", "nodes x devices x device"),
        ("12xH100", "12 devices do not fill nodes of 8"),
        ("8xH1000", "did you mean H100[?]"),
        ("8", "known are"),
        ("-8xH100", "known are"),
        ("cpu:", "known are"),
        ("cpu:four", "known are"),
        ("8xH100+", "nodes x devices x device"),
        ("8xH100@nvlink-9", "there is no link 'nvlink-9'; did you mean nvlink-.[?] known are nvlink-2, .*ethernet-100"),
        ("8xH100@", "there is no link ''"),
    ],
)
def test_what_is_no_name_is_refused_with_what_there_is(name, words):
    with pytest.raises(ClusterError, match=words):
        parse(name)
