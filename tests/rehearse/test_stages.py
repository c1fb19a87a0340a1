"""Fewer pipeline ranks and shorter axes, by the plan alone."""

from shardwright.layout import Axis, Mesh
from shardwright.plan import Plan, PlanStage
from shardwright.rehearse.stages import shrink_cluster
from shardwright.schedule import Schedule, fewer, schedule_kind, spread


def plan_of(shapes, order, schedule, microbatches, steps=None):
    """A plan of stages on pipeline ranks of these shapes, in the order in which they come."""
    meshes, at = [], 0
    for shape in shapes:
        mesh = Mesh(axes=tuple(Axis(name=name, size=size) for name, size in shape.items()))
        meshes.append(Mesh(axes=mesh.axes, devices=tuple(range(at, at + mesh.size))))
        at += mesh.size
    stages = tuple(PlanStage(mesh=meshes[rank], choices={}) for rank in order)
    return Plan(
        model="", policy="", cluster="", fingerprints={}, entries={"train": stages}, microbatches=microbatches,
        schedule=schedule, steps=steps,
    )  # fmt: skip


def shrunk(*args, **options):
    plan = plan_of(*args, **options)
    return shrink_cluster(plan, plan.stages)


def test_of_sixteen_equal_ranks_three_stay_and_the_second_takes_the_others_over():
    cluster = shrunk([{"dp": 8, "tp": 8}] * 16, range(16), "1f1b", 96)

    assert cluster.like == (0, 1, 15)
    assert cluster.stage == (0, *([1] * 14), 2)
    assert cluster.microbatches == 6
    meshes = cluster.meshes_of({"dp": 2, "tp": 2})
    assert [mesh.devices for mesh in meshes] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]


def test_ranks_of_each_kind_stay():
    cluster = shrunk([{"dp": 2}] * 4 + [{"dp": 4}] * 4, range(8), "1f1b", 8)

    assert cluster.like == (0, 1, 3, 4, 5, 7)
    assert cluster.microbatches == 6
    assert [mesh.size for mesh in cluster.meshes_of({"dp": 2})] == [2] * 6


def test_an_interleaved_rank_keeps_all_its_stages():
    cluster = shrunk([{"dp": 2}] * 4, [*range(4), *range(4)], "interleaved", 4)

    assert cluster.like == (0, 1, 3, 4, 5, 7)
    assert cluster.stage == (0, 1, 1, 2, 3, 4, 4, 5)
    assert cluster.microbatches == 3


def test_stages_stay_in_their_order_on_many_ranks():
    cluster = shrunk([{"dp": 2}] * 16, [*range(16), *range(16)], "interleaved", 64)

    assert cluster.like == (0, 1, 15, 16, 17, 31)
    assert cluster.stage == (0, *[1] * 14, 2, 3, *[4] * 14, 5)


def test_down_and_up_again_stages_are_taken_over_by_their_neighbours():
    cluster = shrunk([{}] * 4, [0, 1, 2, 3, 3, 2, 1, 0], "zbv", 2)

    assert cluster.like == (0, 1, 3, 4, 6, 7)
    assert cluster.stage == (0, 1, 1, 2, 3, 4, 4, 5)
    assert cluster.microbatches == 2


def test_a_schedule_that_is_spelled_out_keeps_its_ranks():
    pp_ranks = ((0, 1), (2, 3), (4, 5), (6, 7))
    steps = spread(schedule_kind("zb").make(4, 12), pp_ranks).to_json()
    cluster = shrunk([{"dp": 2}] * 4, range(4), "own", 12, steps=steps)

    assert cluster.like == (0, 1, 2, 3)
    assert cluster.microbatches == 8
    schedule = Schedule.from_json(cluster.steps(cluster.meshes_of({"dp": 1})))
    assert schedule.devices == fewer(schedule_kind("zb").make(4, 12), 8).devices
