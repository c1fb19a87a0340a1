"""The facts of the catalogue, as far as they can be checked against each other."""

import pytest

from shardwright.cluster import parse
from shardwright.cluster.catalogue import ASSUMED, DEVICES, LINKS, USUAL, device, network
from shardwright.errors import ClusterError

PROMISED = {
    "V100-16GB",
    "V100-32GB",
    "A100-40GB",
    "A100-80GB",
    "H100",
    "H200",
    "B200",
    "GB200",
    "GB300",
    "MI250",
    "MI300X",
    "MI355X",
    "TPU-v5e",
    "TPU-v5p",
    "TPU-v6e",
    "L40S",
    "cpu",
}


def test_everything_that_was_promised_is_there():
    assert set(DEVICES) == set(USUAL) == PROMISED


LATER = [
    ("V100-32GB", "A100-40GB"), ("A100-80GB", "H100"), ("H100", "H200"), ("H200", "B200"), ("B200", "GB200"),
    ("GB200", "GB300"), ("MI300X", "MI355X"),
]  # fmt: skip


def test_later_generations_are_not_slower():
    for fact in (lambda d: d.peak("float16"), lambda d: d.memory, lambda d: d.bandwidth):
        for first, then in (
            ("V100-32GB", "A100-40GB"),
            ("A100-80GB", "H100"),
            ("H100", "H200"),
            ("H200", "B200"),
            ("B200", "GB200"),
            ("GB200", "GB300"),
            ("MI300X", "MI355X"),
        ):
            assert fact(DEVICES[first]) <= fact(DEVICES[then]), (first, then)
    links = [LINKS[f"nvlink-{generation}"].bandwidth for generation in (2, 3, 4, 5)]
    assert links == sorted(links) == [150e9, 300e9, 450e9, 900e9]


@pytest.mark.parametrize("name", DEVICES)
def test_fewer_bits_are_not_slower_and_the_link_is_slower_than_the_memory(name):
    device = DEVICES[name]
    if name != "cpu":  # which has no units for 16 bits
        order = ["float64", "float32", "tfloat32", "float16", "float8"]
        peaks = [dict(device.flops)[dtype] for dtype in order if dtype in dict(device.flops)]
        assert peaks == sorted(peaks)
    usual = parse(f"2x2x{name}").groups[0].node
    assert usual.network.bandwidth < usual.inside.bandwidth < device.bandwidth


@pytest.mark.parametrize("name", ASSUMED)
def test_what_is_assumed_is_a_fraction(name):
    assumed = ASSUMED[name]
    assert 0 < assumed.attention <= assumed.matmul < 1
    assert 0 < assumed.memory < 1
    assert 1e-6 <= assumed.start <= 1e-4
    assert 0 < assumed.edge <= 512


def test_large_products_reach_what_is_assumed():
    device = DEVICES["A100-80GB"]
    assert 2 * 16384**3 / device.matmul_time(16384, 16384, 16384, "bfloat16") == pytest.approx(
        ASSUMED["A100"].matmul * 312e12, rel=0.02
    )


def test_usual_networks_are_those_of_the_usual_servers():
    per_node = {name: parse(f"2x8x{name}").groups[0].node.network.bandwidth * 8 * 8 / 1e9 for name in DEVICES}
    assert per_node["V100-16GB"] == 4 * 100
    assert per_node["A100-80GB"] == 8 * 200
    assert per_node["H100"] == per_node["MI300X"] == 8 * 400
    assert per_node["L40S"] == 2 * 200


@pytest.mark.parametrize("name", ["A100-80GB", "a100-80gb", "A100-80", "a100-80"])
def test_devices_are_found_whatever_the_case(name):
    assert device(name).name == "A100-80GB"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("A100", "A100-40GB or A100-80GB"),
        ("H10", "did you mean H100[?] known are V100-16GB, .*, cpu"),
        ("TPU", "TPU-v5e or TPU-v5p or TPU-v6e"),
        ("Gaudi", "known are V100-16GB"),
    ],
)
def test_an_unknown_device_lists_the_known(name, words):
    with pytest.raises(ClusterError, match=words):
        device(name)


def test_adapters_are_shared_by_the_devices_of_a_node():
    assert network("ethernet-100", 8).bandwidth == 100e9 / 8 / 8
    assert network("8xinfiniband-200", 8).bandwidth == 200e9 / 8
    assert network("8xInfiniBand-200", 8).name == "8xinfiniband-200"


@pytest.mark.parametrize("name", ["ethernet", "ethernot-100", "0xethernet-100", "ethernet-0", "nvlink-4", ""])
def test_what_is_no_network_is_refused(name):
    with pytest.raises(ClusterError, match="network"):
        network(name, 8)


def test_a_rack_of_72_is_one_node():
    rack, racks = parse("72xGB200"), parse("144xGB300")
    assert (rack.nodes, racks.nodes) == (1, 2)
    assert [link.name for link in rack.span(range(72)).links] == ["nvlink-5"]
    assert [link.name for link in racks.span(range(144)).links] == ["nvlink-5", "72xinfiniband-800"]
    assert racks.groups[0].node.network.bandwidth == 100e9  # of a device: an adapter of 800 Gb/s each


def test_tpus_of_a_slice_are_joined_by_their_own_links():
    slice_of_v6e = parse("16xTPU-v6e")
    assert slice_of_v6e.nodes == 1
    assert slice_of_v6e.device(0).peak("bfloat16") == 918e12
    assert slice_of_v6e.span(range(2)).ring == 90e9  # one of the four links to a neighbour
    assert slice_of_v6e.span(range(16)).ring == 360e9
