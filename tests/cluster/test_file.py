import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.cluster import (
    COLLECTIVES,
    KINDS,
    AttentionPrice,
    Cluster,
    Curve,
    Device,
    Efficiency,
    Link,
    MeasuredCollective,
    Node,
    NodeGroup,
    find,
    load,
    parse,
    save,
)  # fmt: skip
from shardwright.errors import ClusterError

EXAMPLE = Path(__file__).parents[2] / "examples" / "cluster.yaml"

numbers, parts = st.floats(1e-9, 1e16), st.floats(0.01, 1)
curves = st.lists(st.tuples(numbers, numbers), min_size=1, max_size=4, unique_by=lambda point: point[0]).map(
    lambda points: Curve(tuple(sorted(points)))
)


@st.composite
def devices(draw, name):
    efficiency = []
    for kind in KINDS:
        for dtype in draw(st.sampled_from([("",), ("float32", "bfloat16")])):
            efficiency.append(Efficiency(kind=kind, dtype=dtype, curve=draw(curves)))
    flops = (("float32", draw(numbers)), ("bfloat16", draw(numbers)))
    memory = draw(st.integers(1, 2**40))
    kernel = AttentionPrice(short=draw(numbers), causal=draw(parts), backward=draw(parts), masked=draw(numbers))
    return Device(
        name=name, flops=flops, memory=memory, bandwidth=draw(numbers), efficiency=tuple(efficiency),
        attention=draw(st.sampled_from([AttentionPrice(), kernel])), overlap=draw(parts),
    )  # fmt: skip


@st.composite
def clusters(draw):
    groups = []
    for place in range(draw(st.integers(1, 3))):
        own = [
            Link(name=f"{name}{place}", bandwidth=draw(numbers), latency=draw(numbers), efficiency=draw(parts))
            for name in ("inside", "network")
        ]
        node = Node(
            device=draw(devices(f"device {place}")), devices=draw(st.integers(1, 9)), inside=own[0], network=own[1]
        )
        groups.append(NodeGroup(node=node, nodes=draw(st.integers(1, 9))))
    kinds = draw(st.sets(st.sampled_from(COLLECTIVES)))
    measured = tuple(MeasuredCollective(kind=kind, ranks=(4, 2), seconds=draw(curves)) for kind in sorted(kinds))
    between = draw(st.none() | st.just(Link(name="joint", bandwidth=3e9, latency=0.0, pair=1e9)))
    text = st.text(max_size=20)
    return Cluster(
        name=draw(text), groups=tuple(groups), between=between, measured=measured, about=draw(text),
        overlap=draw(st.just(math.nan) | parts),
    )  # fmt: skip


@given(clusters())
def test_what_is_saved_is_loaded_again(tmp_path_factory, cluster):
    path = tmp_path_factory.mktemp("cluster") / "c.yaml"
    save(cluster, path)
    assert load(path) == cluster


@pytest.mark.parametrize("name", ["cpu:4", "8xA100-80GB", "4x8xH100@ethernet-100", "8xV100-16GB+4xMI300X@pcie-5"])
def test_named_clusters_make_short_files(tmp_path, name):
    save(parse(name), tmp_path / "c.yaml")
    assert load(tmp_path / "c.yaml") == parse(name)
    assert len((tmp_path / "c.yaml").read_text().splitlines()) < 8


def test_the_example_has_two_kinds_of_nodes():
    cluster = load(EXAMPLE)
    assert (cluster.name, cluster.size, cluster.nodes) == ("lab", 32, 6)
    assert cluster.device(15).name == "H100"
    slow = cluster.device(16)
    assert slow.bandwidth == 1.8e12
    assert slow.peak("bfloat16") == 312e12
    assert slow.fraction("matmul", 1e10, "bfloat16") == 0.6
    assert cluster.span([16, 20]).between.name == "old-switch"
    assert cluster.span([0, 16]).between.name == "ethernet-100"
    assert cluster.span([0, 16]).between.bandwidth == 100e9 / 8 / 8


def test_a_cluster_is_found_by_name_or_by_file(tmp_path):
    assert find("cpu:4") == parse("cpu:4")
    assert find(str(EXAMPLE)) == find(EXAMPLE) == load(EXAMPLE)


def test_a_file_without_a_name_has_that_of_the_file(tmp_path):
    (tmp_path / "mine.yaml").write_text("version: 1\ngroups: [{devices: 2, device: H100}]")
    assert load(tmp_path / "mine.yaml").name == "mine"


ONE_NODE = "groups: [{devices: 2, device: H100}]"


def of_device(analysis):
    return f"{ONE_NODE}\ndevices: {{d: {{{analysis}}}}}"


BAD = [
    ("groups: []", r"groups: \[\] is not a list"),
    ("groups: [3]", r"groups\[0\]: 3 is not a mapping"),
    ("name: x", "the file: groups missing"),
    (f"{ONE_NODE}\nbetwen: ethernet-100", "there is no key 'betwen'; did you mean between"),
    (f"{ONE_NODE}\nname: 3", "name: 3 is not text"),
    (f"{ONE_NODE}\n{ONE_NODE}", "'groups' is there twice"),
    ("groups: [", "is not YAML"),
    ("groups: !!python/object/apply:os.getcwd []", "is not YAML"),
    ("groups: [{device: H100}]", r"groups\[0\]: devices missing"),
    ("groups: [{device: H10, devices: 8}]", r"groups\[0\]\.device: there is no device 'H10'; did you mean H100"),
    ("groups: [{device: H100, devices: 0}]", r"groups\[0\]\.devices: 0 is not a number from 1 to 131072"),
    ("groups: [{device: H100, devices: 8, nodes: two}]", r"groups\[0\]\.nodes: 'two'"),
    ("groups: [{device: H100, devices: 8, inside: fast}]", r"groups\[0\]\.inside: there is no link 'fast'"),
    ("groups: [{device: H100, devices: 8, network: fast}]", r"groups\[0\]\.network: there is no network 'fast'"),
    ("devices: {d: {like: H100}}\ngroups: [{device: d, devices: 8}]", r"groups\[0\]: inside and network missing"),
    (f"{ONE_NODE}\nlinks: 3", "links: 3 is not a mapping"),
    (f"{ONE_NODE}\nlinks: {{l: {{bandwidth: 3}}}}", r"links\.l: latency missing"),
    (f"{ONE_NODE}\nlinks: {{l: {{bandwidth: fast, latency: 1}}}}", r"links\.l\.bandwidth: 'fast' is not a number"),
    (f"{ONE_NODE}\nlinks: {{l: {{bandwidth: 1, latency: 1, efficiency: 2}}}}", r"links\.l: .*efficiency is 2"),
    (of_device("memory: 1 GiB"), r"devices\.d: flops, bandwidth, efficiency missing"),
    (of_device("like: H10"), r"devices\.d\.like: there is no device 'H10'"),
    (of_device("like: H100, memory: 80 GB/s"), r"devices\.d\.memory: '80 GB/s'"),
    (of_device("like: H100, flops: 3"), r"devices\.d\.flops: 3 is not a mapping"),
    (of_device("like: H100, efficiency: {conv: 1}"), r"devices\.d\.efficiency: there is no key 'conv'"),
    (of_device("like: H100, efficiency: {copy: {8: -1}}"), r"devices\.d\.efficiency\.copy: .*positive"),
    (
        f"{ONE_NODE}\nmeasured: [{{kind: all_reduced, ranks: [2], seconds: 1}}]",
        r"measured\[0\]\.kind: .*mean all_reduce",
    ),
    (f"{ONE_NODE}\nmeasured: [{{kind: send, ranks: [0], seconds: 1}}]", r"measured\[0\]\.ranks: 0"),
    (
        f"{ONE_NODE}\nmeasured: [{{kind: send, ranks: [2], seconds: {{1: soon}}}}]",
        r"measured\[0\]\.seconds, size 1: 'soon'",
    ),
]


@pytest.mark.parametrize(("text", "words"), BAD)
def test_a_bad_file_is_refused_with_the_key(tmp_path, text, words):
    (tmp_path / "bad.yaml").write_text(f"version: 1\n{text}")
    with pytest.raises(ClusterError, match=words) as caught:
        load(tmp_path / "bad.yaml")
    assert "bad.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"), [("", "None is not a map"), ("[1]", "not a map"), (f"version: 2\n{ONE_NODE}", "2 is not known")]
)
def test_what_is_no_cluster_of_this_version_is_refused(tmp_path, text, words):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ClusterError, match=words):
        load(tmp_path / "bad.yaml")


def test_all_faults_are_reported_at_once(tmp_path):
    (tmp_path / "bad.yaml").write_text("version: 3\nbetween: x\ngroups: [{devices: 0, device: H10}]")
    with pytest.raises(ClusterError) as caught:
        load(tmp_path / "bad.yaml")
    assert len(str(caught.value).splitlines()) == 1 + 4


def test_a_file_that_is_not_there_is_an_error_of_ours(tmp_path):
    with pytest.raises(ClusterError, match="can't be read: No such file"):
        load(tmp_path / "none.yaml")


def test_names_that_stand_for_two_things_are_not_saved(tmp_path):
    cluster = parse("8xH100+8xA100-80GB")
    slow = Link(name="nvlink-4", bandwidth=1.0, latency=0.0)
    other = replace(cluster.groups[1], node=replace(cluster.groups[1].node, inside=slow))
    with pytest.raises(ClusterError, match="two different links have the name nvlink-4"):
        save(replace(cluster, groups=(cluster.groups[0], other)), tmp_path / "c.yaml")
