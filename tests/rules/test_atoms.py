"""Atoms against index maps: cutting an atom of the input and of the output takes the same elements."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.layout import Axis, Block
from shardwright.ops.views import regroup
from shardwright.rules import Atoms
from tests.layout.drawn import few, kept_indices

sizes = st.lists(st.sampled_from([2, 3, 4, 6]), min_size=1, max_size=3)


def dim_of(atoms: Atoms, factors: list[int]) -> tuple[int, ...]:
    return tuple(atom for size in factors for atom in atoms.fresh(size))


def value(place: int, dim_sizes: list[int], which: int) -> int:
    """The digit number `which` of a place, in mixed base."""
    return place // math.prod(dim_sizes[which + 1 :]) % dim_sizes[which]


# Products.


@few
@given(sizes, st.data())
def test_a_block_takes_the_elements_whose_digit_is_in_the_share(factors, data):
    atoms = Atoms()
    dim = dim_of(atoms, factors)
    which = data.draw(st.integers(0, len(factors) - 1))
    parts = data.draw(st.sampled_from([2, 3]))

    cut = atoms.shard(dim, dim[which], Axis(name="tp", size=parts))

    chunk = -(-factors[which] // parts)
    for index in range(parts):
        share = [p for p in range(math.prod(factors)) if value(p, factors, which) // chunk == index]
        assert kept_indices(cut, parts, index) == share


@few
@given(sizes, st.data())
def test_dividing_keeps_the_product_and_its_places(factors, data):
    """(24) as (4, 6): the groups multiply to the dim, outermost first."""
    atoms = Atoms()
    total = math.prod(factors)
    (dim,) = (atoms.fresh(total),)

    groups = atoms.divide(dim, factors)

    assert [atoms.product(group) for group in groups] == factors
    assert [atom for group in groups for atom in atoms.expand(group)] == list(atoms.expand(dim))


def test_a_dim_that_does_not_divide_so_is_left_alone():
    atoms = Atoms()
    dim = dim_of(atoms, [4, 3])

    assert atoms.divide(dim, [3, 4]) is None
    assert atoms.divide(dim, [4]) is None
    assert atoms.product(dim) == 12


@few
@given(sizes, sizes)
def test_what_is_unified_stands_at_the_same_place_in_both(a, b):
    """Where two dims have an atom in common, cutting it takes the same elements of both."""
    atoms = Atoms()
    total = math.lcm(math.prod(a), math.prod(b))
    a, b = [total // math.prod(a), *a], [total // math.prod(b), *b]
    dim, two = dim_of(atoms, a), dim_of(atoms, b)

    atoms.unify(dim, two)

    common = [atom for atom in atoms.expand(dim) if atom in atoms.expand(two)]
    for atom in common:
        assert atoms.blocks(dim, atom) == atoms.blocks(two, atom)
    assert atoms.product(dim) == atoms.product(two) == total


def test_unification_refines_the_larger_and_stops_where_sizes_clash():
    atoms = Atoms()
    dim, two = dim_of(atoms, [6, 4]), dim_of(atoms, [3, 2, 4])
    left, right = dim_of(atoms, [2, 9]), dim_of(atoms, [2, 6, 3])

    assert atoms.unify(dim, two)
    assert atoms.expand(dim) == atoms.expand(two)
    assert not atoms.unify(left, right), "9 and 6 do not divide"
    assert atoms.expand(left)[0] == atoms.expand(right)[0], "what came before the clash is shared"


def test_a_dim_unified_with_itself_turned_round_does_not_chase_its_tail():
    """(a b) with (b a), equal sizes: the first link makes both the same; a second one would close a circle."""
    atoms = Atoms()
    (a,), (b,) = atoms.fresh(2), atoms.fresh(2)

    atoms.unify((a, b), (b, a))

    assert atoms.expand((a, b)) == atoms.expand((b, a))


# Sections.


def row_of(atoms: Atoms, heads: list[int], width: int) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """(q | k | v), each heads by width, with a common number of groups outside."""
    group = atoms.fresh(2)
    sections = [group + atoms.fresh(count) + atoms.fresh(width) for count in heads]
    return atoms.row(sections), sections


def test_an_atom_that_every_section_has_is_split_in_every_section():
    atoms = Atoms()
    dim, sections = row_of(atoms, [4, 2, 2], width=3)
    group = sections[0][0]

    cut = atoms.shard(dim, group, Axis(name="tp", size=2))

    assert group in atoms.splittable(dim)
    assert cut.blocks == (Block(1, 2, 12), Block(1, 2, 6), Block(1, 2, 6))
    assert kept_indices(cut, 2, 1) == [*range(12, 24), *range(30, 36), *range(42, 48)]


def test_an_atom_that_one_section_lacks_is_not_splittable_there():
    atoms = Atoms()
    dim, sections = row_of(atoms, [4, 2, 2], width=3)
    own = sections[0][1]

    assert own not in set(atoms.splittable(dim))
    assert atoms.blocks(dim, own) is None


def test_a_dim_of_size_one_has_no_atoms():
    atoms = Atoms()

    assert atoms.fresh(1) == ()
    assert atoms.divide(dim_of(atoms, [6]), [1, 6, 1])[::2] == [(), ()]


def test_a_product_or_nothing_is_not_divided_into_sections():
    atoms = Atoms()
    dim = dim_of(atoms, [2, 5])

    assert atoms.divide_row(dim, [6, 4]) is None
    assert atoms.divide_row((), [1, 1]) is None
    assert atoms.expand(dim) == dim


def test_a_chain_of_links_is_short_after_one_lookup():
    atoms = Atoms()
    chain = [atoms.fresh(6)[0] for _ in range(50)]
    for value, other in pairwise(chain):
        atoms.parts[value] = ((other,),)

    assert atoms.expand((chain[0],)) == (chain[-1],)
    assert all(atoms.parts[item] == ((chain[-1],),) for item in chain[:-1])


def test_answers_are_kept_once_the_table_no_longer_changes():
    atoms = Atoms()
    dim = dim_of(atoms, [2, 5])
    assert atoms.blocks(dim, dim[0]) is not atoms.blocks(dim, dim[0])

    atoms.freeze()

    assert atoms.blocks(dim, dim[0]) is atoms.blocks(dim, dim[0])


def test_rows_of_which_one_section_clashes_are_not_one():
    atoms = Atoms()
    alike, first, other = (dim_of(atoms, value) for value in ([2, 3], [2, 9], [3, 6]))
    copy = dim_of(atoms, [2, 3])

    assert not atoms.unify(atoms.row([first, alike]), atoms.row([other, copy]))
    assert atoms.expand(alike) == atoms.expand(copy), "the other section is shared"
    assert atoms.unify(atoms.row([alike, alike]), atoms.row([copy, copy]))


def test_a_row_is_divided_into_sections_once_and_again_only_in_the_same_way():
    atoms = Atoms()
    dim = atoms.fresh(10)

    first = atoms.divide_row(dim, [6, 2, 2])

    assert [atoms.product(section) for section in first] == [6, 2, 2]
    assert atoms.divide_row(dim, [6, 2, 2]) == first
    assert atoms.divide_row(dim, [5, 5]) is None


def test_rows_unify_section_by_section():
    atoms = Atoms()
    first, parts = row_of(atoms, [4, 2], width=3)
    two, others = row_of(atoms, [4, 2], width=3)

    assert atoms.unify(first, two)
    assert all(atoms.expand(a) == atoms.expand(b) for a, b in zip(parts, others, strict=True))


# Several axes on one dim.


@few
@given(sizes, st.data())
def test_two_axes_on_one_dim_take_what_splitting_one_after_the_other_takes(factors, data):
    atoms = Atoms()
    dim = dim_of(atoms, [2 * size for size in factors])
    full = [2 * size for size in factors]
    first, second = (data.draw(st.integers(0, len(factors) - 1)) for _ in range(2))
    left = atoms.shard(dim, dim[first], Axis(name="dp", size=2))

    two = atoms.shard(dim, dim[second], Axis(name="tp", size=2), [(dim[first], 2)])

    if first == second and full[first] // 2 % 2:
        return
    for d in range(2):
        outer = kept_indices(left, 2, d)
        for t in range(2):
            kept = [outer[place] for place in kept_indices(two, 2, t)]
            digits = [(value(p, full, first), value(p, full, second)) for p in kept]
            half = full[first] // 2
            assert all(a // half == d for a, _ in digits)
            if first != second:
                assert all(b // (full[second] // 2) == t for _, b in digits)
            assert len(kept) == math.prod(full) // 4


# Reshapes.


@few
@given(sizes, sizes)
def test_a_reshape_keeps_every_label_at_the_same_elements(source, target):
    """Cut a label on the input, reshape the shard, and it is the shard of the output."""
    total = math.lcm(math.prod(source), math.prod(target))
    source, target = [*source, total // math.prod(source)], [total // math.prod(target), *target]
    rule = regroup(source, target)
    array = np.arange(total).reshape(source)

    for label, size in rule.sizes.items():
        if label in rule.blocked or size % 2:
            continue
        inside, outside = (_take(value, label, rule) for value in (source_of(rule, source), target_of(rule, target)))
        shard = np.take(array, inside[1], axis=inside[0])
        expected = np.take(array.reshape(target), outside[1], axis=outside[0])
        assert np.array_equal(shard.reshape(expected.shape), expected)


def source_of(rule, shape):
    return rule.inputs[0].dims, shape


def target_of(rule, shape):
    return rule.outputs[0].dims, shape


def _take(side, label, rule) -> tuple[int, list[int]]:
    """(dim, the first half of the label's indices there)."""
    dims, shape = side
    for at, dim in enumerate(dims):
        if label in dim[0]:
            factors = [rule.sizes[name] for name in dim[0]]
            which = dim[0].index(label)
            return at, [p for p in range(shape[at]) if value(p, factors, which) < factors[which] // 2]
    pytest.fail(f"{label} is on one side only")
