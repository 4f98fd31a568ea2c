"""Selection under constraints: exact counts, exact order, and brute force for the global ranking."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xmac_cli.cli.errors import ConstraintError
from xmac_cli.prune_moe.allocation import (
    Constraints,
    best_first,
    check_count,
    drop_lowest,
    fill_slots,
    keep_best,
    place_in_slots,
    round_half_up,
    slots_needed,
)


def scores(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


@pytest.mark.parametrize(
    ("value", "rounded"), [(0.5, 1), (1.5, 2), (2.5, 3), (2.4999, 2), (0.35 * 10, 4), (0.145 * 100, 15), (0.0, 0)]
)
def test_halves_round_up(value: float, rounded: int) -> None:
    assert round_half_up(value) == rounded


def test_ties_drop_the_higher_index_first() -> None:
    assert best_first(scores(1, 1, 1, 2)) == [3, 0, 1, 2]
    assert keep_best(scores(1, 1, 1, 2), 2, Constraints(4, 2)) == (0, 3)


def test_protected_experts_come_first() -> None:
    assert keep_best(scores(9, 8, 7, 0), 2, Constraints(4, 2), protected={3}) == (0, 3)
    with pytest.raises(ConstraintError, match="3 experts are protected where 2 may stay"):
        keep_best(scores(9, 8, 7, 0), 2, Constraints(4, 2), protected={1, 2, 3})


def test_every_group_keeps_the_same_number() -> None:
    phi = scores(9, 8, 7, 6, 1, 2, 3, 4)  # the first group is better throughout
    assert keep_best(phi, 4, Constraints(8, 2, n_group=2, topk_group=1, group_floor=2)) == (0, 1, 6, 7)


@pytest.mark.parametrize(
    ("count", "limits", "message"),
    [
        (8, Constraints(8, 2), "removes nothing"),
        (1, Constraints(8, 1), "too few"),
        (2, Constraints(8, 3), "a token uses 3"),
        (5, Constraints(8, 2, n_group=2, topk_group=1, group_floor=2), "n_group = 2"),
        (2, Constraints(8, 2, n_group=2, topk_group=1, group_floor=2), "groups of at least 2"),
        (4, Constraints(8, 3, n_group=2, topk_group=1, group_floor=2), "groups of at least 3"),
        (6, Constraints(16, 2, align=4), "not a multiple of --align 4"),
    ],
)
def test_counts_that_a_router_cannot_work_with(count: int, limits: Constraints, message: str) -> None:
    with pytest.raises(ConstraintError, match=message) as caught:
        check_count(count, limits)
    assert caught.value.exit_code == 4


def test_the_global_floor_is_an_eighth() -> None:
    assert Constraints(64, 2).global_floor == 8
    assert Constraints(8, 2).global_floor == 2
    assert Constraints(128, 20).global_floor == 20


@given(
    st.integers(2, 3),
    st.integers(0, 8),
    st.integers(2, 4),
    st.randoms(use_true_random=False),
)
def test_the_global_ranking_removes_the_lowest_that_floors_allow(layers: int, count: int, floor: int, random) -> None:
    """Against brute force: among all allowed removals, the total score of what is removed is the least."""
    size = 4
    phis = [scores(*(random.random() for _ in range(size))) for _ in range(layers)]
    limits = Constraints(size, 2)
    allowed = [
        combination
        for combination in itertools.combinations(range(layers * size), count)
        if all(sum(e // size == layer for e in combination) <= size - floor for layer in range(layers))
    ]
    if not allowed:
        with pytest.raises(ConstraintError, match="can be removed"):
            drop_lowest(phis, count, limits, floor=floor)
        return
    least = min(sum(phis[e // size][e % size] for e in combination) for combination in allowed)
    kept = drop_lowest(phis, count, limits, floor=floor)
    removed = sum(phi.sum() - phi[list(ids)].sum() for phi, ids in zip(phis, kept))
    assert sum(map(len, kept)) == layers * size - count
    assert removed == pytest.approx(least)


def test_ties_of_a_global_ranking_drop_the_last_expert_of_the_last_layer_first() -> None:
    phis = [scores(1, 1, 1, 1), scores(1, 1, 1, 1)]
    assert drop_lowest(phis, 1, Constraints(4, 2), floor=2) == [(0, 1, 2, 3), (0, 1, 2)]
    assert drop_lowest(phis, 3, Constraints(4, 2), floor=2) == [(0, 1, 2), (0, 1)]


def test_group_floors_hold_in_a_global_ranking() -> None:
    phi = scores(1, 2, 3, 4, 5, 6, 7, 8)
    limits = Constraints(8, 2, n_group=2, topk_group=1, group_floor=2)
    assert drop_lowest([phi], 3, limits, floor=2) == [(2, 3, 5, 6, 7)]


def test_protected_experts_survive_a_global_ranking() -> None:
    phis = [scores(0, 1, 2, 3), scores(4, 5, 6, 7)]
    kept = drop_lowest(phis, 2, Constraints(4, 2), floor=2, protected=[{0}, ()])
    assert kept == [(0, 3), (0, 1, 2, 3)]


def test_bounded_export_refills_with_the_best_of_the_dropped() -> None:
    phis = [scores(0, 1, 2, 3), scores(4, 5, 6, 7)]
    kept = drop_lowest(phis, 3, Constraints(4, 2), floor=2)
    assert kept == [(2, 3), (1, 2, 3)]
    assert fill_slots(phis, kept, slots_needed(kept, Constraints(4, 2)), Constraints(4, 2)) == [(1, 2, 3), (1, 2, 3)]


def test_slots_are_as_many_as_the_fullest_group_needs_and_aligned() -> None:
    grouped = Constraints(8, 2, n_group=2, topk_group=1)
    assert slots_needed([(0, 1, 2, 4)], grouped) == 6
    assert slots_needed([(0, 1, 4)], Constraints(8, 2, align=4)) == 4
    assert slots_needed([(0, 1, 2, 4)], Constraints(8, 2, n_group=2, topk_group=1, align=4)) == 8


def test_slots_keep_order_and_group() -> None:
    assert place_in_slots((0, 3, 5, 6, 7), 8, 8, 1) == (0, 3, 5, 6, 7, None, None, None)
    assert place_in_slots((0, 3, 5, 6, 7), 6, 8, 2) == (0, 3, None, 5, 6, 7)
