import pytest

from shardwright.cluster import Link
from shardwright.cluster.link import slowest
from shardwright.errors import ClusterError


def test_without_a_switch_few_devices_use_few_wires():
    link = Link(name="mesh", bandwidth=448.0, pair=64.0, latency=0.0, efficiency=0.5)
    assert [link.among(count) for count in (2, 4, 8, 16)] == [32, 96, 224, 224]


def test_with_a_switch_two_devices_have_all_of_it():
    assert Link(name="switch", bandwidth=300.0, latency=0.0).among(2) == 300


def test_the_slowest_of_several_links_is_slowest_in_everything():
    near = Link(name="near", bandwidth=100.0, latency=1.0)
    far = Link(name="far", bandwidth=1000.0, latency=9.0, efficiency=0.5)
    both = slowest((near, far))
    assert (both.among(2), both.latency) == (100, 9)
    assert slowest((near, Link(name="fast", bandwidth=200.0, latency=0.5))) is near


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"name": ""}, "name"),
        ({"bandwidth": 0.0}, "bandwidth"),
        ({"latency": -1.0}, "latency"),
        ({"efficiency": 1.5}, "efficiency"),
        ({"efficiency": 0.0}, "efficiency"),
        ({"pair": 20.0}, "pair"),
    ],
)
def test_a_link_that_makes_no_sense_is_refused(changed, words):
    with pytest.raises(ClusterError, match=words):
        Link(**({"name": "l", "bandwidth": 10.0, "latency": 0.0} | changed))
