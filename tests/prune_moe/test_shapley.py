"""Shapley values against closed forms, axioms, and every sampler against exact enumeration."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from itertools import permutations as all_orders

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xmac_cli.cli.errors import ResumeMismatchError, UsageError, VerificationError
from xmac_cli.prune_moe.shapley import (
    ShapleyState,
    coalition_table,
    estimate_shapley,
    exact_shapley,
    shapley_from_table,
)

Game = Callable[[np.ndarray], float]

WORTH = np.array([3.0, 1.0, 4.0, 1.0, 5.0, 9.0])


def additive(mask: np.ndarray) -> float:
    return float(WORTH[mask].sum())


def unanimity(mask: np.ndarray) -> float:
    return float(mask[[1, 3, 4]].all())


def glove(mask: np.ndarray) -> float:
    """Players 0 and 1 own a left glove, player 2 a right one; a pair is worth 1."""
    return float(mask[:2].any() and mask[2])


def majority(mask: np.ndarray) -> float:
    return float(mask.sum() >= 4)


CLOSED_FORMS = [
    (additive, 6, WORTH),
    (unanimity, 6, np.array([0, 1, 0, 1, 1, 0]) / 3),
    (glove, 3, np.array([1, 1, 4]) / 6),
    (majority, 7, np.full(7, 1 / 7)),
]


def random_table(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=2**n)


def lookup(table: np.ndarray) -> Game:
    n = table.shape[0].bit_length() - 1
    return lambda mask: float(table[int(mask @ (1 << np.arange(n)))])


def batched(game: Game) -> Callable[[np.ndarray], np.ndarray]:
    """The same game for many coalitions at once, every coalition evaluated once."""
    memory: dict[bytes, float] = {}

    def values(masks: np.ndarray) -> np.ndarray:
        for mask in masks:
            if mask.tobytes() not in memory:
                memory[mask.tobytes()] = game(mask)
        return np.array([memory[mask.tobytes()] for mask in masks])

    return values


def shapley_by_permutations(table: np.ndarray) -> np.ndarray:
    """The definition as a mean over all orders of arrival."""
    n = table.shape[0].bit_length() - 1
    phi = np.zeros(n)
    orders = list(all_orders(range(n)))
    for order in orders:
        present = 0
        for player in order:
            phi[player] += table[present | 1 << player] - table[present]
            present |= 1 << player
    return phi / len(orders)


@pytest.mark.parametrize(("game", "n", "phi"), CLOSED_FORMS)
def test_exact_enumeration_gives_the_closed_forms(game: Game, n: int, phi: np.ndarray):
    np.testing.assert_allclose(exact_shapley(game, n).phi, phi, atol=1e-12)


@pytest.mark.parametrize("sampler", ["uniform", "antithetic", "rgis"])
@pytest.mark.parametrize(("game", "n", "phi"), CLOSED_FORMS)
def test_sampling_agrees_with_the_closed_forms(game: Game, n: int, phi: np.ndarray, sampler: str):
    result = estimate_shapley(
        None,
        n,
        permutations=4000,
        truncate=0,
        sampler=sampler,
        prior=np.linspace(1, 2, n),
        seed=1,
        value_fn_batch=batched(game),
        batch=4000,
    )
    assert (np.abs(result.phi - phi) <= 4.5 * result.se + 1e-9).all()
    assert np.abs(result.phi - phi).max() < 0.04


@settings(max_examples=25, deadline=None)
@given(n=st.integers(2, 6), seed=st.integers(0, 10_000))
def test_enumeration_equals_the_mean_over_all_orders(n: int, seed: int):
    table = random_table(n, seed)
    np.testing.assert_allclose(shapley_from_table(table), shapley_by_permutations(table), atol=1e-10)


def test_duplicated_players_get_equal_values():
    def game(mask: np.ndarray) -> float:
        return float(np.sqrt(mask[0] + mask[1] + 2 * mask[2]) + mask[3] * mask[2])

    phi = exact_shapley(game, 4).phi
    assert phi[0] == pytest.approx(phi[1], abs=1e-12)


def test_a_null_player_gets_exactly_zero_from_every_sampler():
    for sampler in ("uniform", "antithetic", "rgis"):
        result = estimate_shapley(
            unanimity, 6, permutations=10, sampler=sampler, prior=np.arange(1.0, 7), truncate=0, seed=2
        )
        assert (result.phi[[0, 2, 5]] == 0).all()


def test_values_of_a_sum_of_games_are_sums_of_values():
    first, second = random_table(5, 1), random_table(5, 2)
    np.testing.assert_allclose(
        shapley_from_table(first + 2 * second), shapley_from_table(first) + 2 * shapley_from_table(second), atol=1e-12
    )


@settings(max_examples=20, deadline=None)
@given(
    n=st.integers(1, 7),
    seed=st.integers(0, 10_000),
    truncate=st.sampled_from([0.0, 0.5, 0.9]),
    sampler=st.sampled_from(["uniform", "antithetic", "rgis"]),
)
def test_unweighted_values_telescope_to_what_the_walks_lost(n: int, seed: int, truncate: float, sampler: str):
    table = np.exp(random_table(n, seed))
    result = estimate_shapley(
        lookup(table), n, permutations=6, truncate=truncate, sampler=sampler, prior=np.ones(n), mix=1.0, seed=seed
    )
    assert result.phi.sum() == pytest.approx(result.v_full - result.v_stop, abs=1e-9)
    if truncate == 0:
        assert result.v_stop == pytest.approx(table[0])
        assert result.v_empty == table[0]


def test_an_additive_game_is_estimated_without_error_by_any_permutation():
    result = estimate_shapley(additive, 6, permutations=2, truncate=0, sampler="uniform")
    np.testing.assert_allclose(result.phi, WORTH, atol=1e-12)
    np.testing.assert_allclose(result.se, 0, atol=1e-12)


def test_truncation_costs_fewer_passes_and_only_removes_marginals():
    table = np.sort(np.exp(random_table(8, 3)))  # monotone in the binary index
    size = np.array([bin(i).count("1") for i in range(256)])
    table = table[np.argsort(np.argsort(size, kind="stable"))]
    results = [
        estimate_shapley(lookup(table), 8, permutations=10, truncate=tau, sampler="uniform", seed=0)
        for tau in (0.0, 0.2, 0.5, 0.8)
    ]
    passes = [r.passes for r in results]
    assert passes == sorted(passes, reverse=True)
    assert passes[0] == 1 + 10 * 7 + 1  # V(all), seven coalitions a walk, V(empty) once
    for looser, tighter in pairwise(results):
        assert (tighter.evals <= looser.evals).all()
        known = tighter.state.evaluated
        np.testing.assert_array_equal(tighter.state.marginals[known], looser.state.marginals[known])
        assert (tighter.state.marginals[~known] == 0).all()


def test_a_log_value_is_cut_where_its_exponential_would_be():
    table = np.exp(random_table(7, 4))
    plain = estimate_shapley(lookup(table), 7, permutations=8, truncate=0.5, sampler="uniform", seed=4)
    logs = estimate_shapley(
        lookup(np.log(table)), 7, permutations=8, truncate=0.5, sampler="uniform", seed=4, log_values=True
    )
    np.testing.assert_array_equal(plain.state.evaluated, logs.state.evaluated)


def test_a_floor_shifts_the_level_at_which_walks_stop():
    table = np.exp(random_table(7, 4))
    plain = estimate_shapley(lookup(table), 7, permutations=8, truncate=0.5, sampler="uniform", seed=4)
    lifted = estimate_shapley(
        lookup(table - 10), 7, permutations=8, truncate=0.5, sampler="uniform", seed=4, value_floor=-10.0
    )
    np.testing.assert_array_equal(plain.state.evaluated, lifted.state.evaluated)


def test_lock_step_walks_give_the_same_result_as_one_by_one():
    table = np.exp(random_table(8, 5))
    weights = 1 << np.arange(8)
    prior = np.linspace(1, 3, 8)
    single = estimate_shapley(lookup(table), 8, permutations=11, prior=prior, seed=7)
    seen = []

    def batch(masks: np.ndarray) -> np.ndarray:
        seen.append(masks.shape[0])
        return table[masks @ weights]

    together = estimate_shapley(None, 8, permutations=11, prior=prior, seed=7, value_fn_batch=batch, batch=4)
    np.testing.assert_array_equal(single.phi, together.phi)
    assert single.passes == together.passes
    assert max(seen) == 4


@pytest.mark.parametrize("truncate", [0.0, 0.5])
@pytest.mark.parametrize("capacity", [1, 5, 12, 100])
def test_guessed_next_steps_change_no_value_and_only_fill_free_places(truncate: float, capacity: int):
    table = np.exp(random_table(8, 11))
    weights = 1 << np.arange(8)
    sizes: list[int] = []

    def batch(masks: np.ndarray) -> np.ndarray:
        sizes.append(masks.shape[0])
        return table[masks @ weights]

    plain = estimate_shapley(lookup(table), 8, permutations=6, truncate=truncate, sampler="uniform", seed=2)
    guessed = estimate_shapley(
        None, 8, permutations=6, truncate=truncate, sampler="uniform", seed=2,
        value_fn_batch=batch, batch=3, capacity=capacity,
    )  # fmt: skip
    np.testing.assert_array_equal(plain.phi, guessed.phi)
    np.testing.assert_array_equal(plain.evals, guessed.evals)
    assert plain.v_stop == guessed.v_stop and max(sizes) <= max(3, capacity)
    if capacity >= 12 and truncate == 0:  # four steps of three walks fit at once
        without: list[int] = []
        estimate_shapley(
            None, 8, permutations=6, truncate=truncate, sampler="uniform", seed=2, batch=3,
            value_fn_batch=lambda masks: (without.append(1), table[masks @ weights])[1],
        )  # fmt: skip
        assert len(sizes) < len(without)


@pytest.mark.parametrize("capacity", [0, 8])
def test_guesses_and_inactive_players_go_together(capacity: int):
    base = np.exp(random_table(5, 6))
    weights = 1 << np.arange(5)

    def batch(masks: np.ndarray) -> np.ndarray:  # players 5 and 6 matter only while player 0 is present
        extra = np.where(masks[:, 0], 0.3 * (masks[:, 5] + 2 * masks[:, 6]), 0.0)
        return base[masks[:, :5] @ weights] + extra

    def inactive(mask: np.ndarray) -> np.ndarray:
        return np.array([False] * 5 + [not mask[0]] * 2)

    options = {"permutations": 20, "truncate": 0, "sampler": "uniform", "seed": 8, "value_fn_batch": batch}
    plain = estimate_shapley(None, 7, batch=1, **options)
    short = estimate_shapley(None, 7, batch=2, capacity=capacity, inactive=inactive, **options)
    np.testing.assert_allclose(plain.phi, short.phi, atol=1e-12)
    np.testing.assert_array_equal(plain.evals, short.evals)


def test_inactive_players_are_removed_for_free_and_change_nothing():
    base = np.exp(random_table(5, 6))

    def game(mask: np.ndarray) -> float:  # players 5 and 6 matter only while player 0 is present
        extra = 0.3 * (mask[5] + 2 * mask[6]) if mask[0] else 0.0
        return float(base[int(mask[:5] @ (1 << np.arange(5)))] + extra)

    def inactive(mask: np.ndarray) -> np.ndarray:
        idle = np.zeros(7, dtype=bool)
        idle[5:] = not mask[0]
        return idle

    plain = estimate_shapley(game, 7, permutations=30, truncate=0, sampler="uniform", seed=8)
    short = estimate_shapley(game, 7, permutations=30, truncate=0, sampler="uniform", seed=8, inactive=inactive)
    np.testing.assert_allclose(plain.phi, short.phi, atol=1e-12)
    np.testing.assert_array_equal(plain.evals, short.evals)
    assert short.passes < plain.passes


@pytest.mark.parametrize("cut", [1, 4, 9])
def test_a_resumed_estimate_equals_an_uninterrupted_one(cut: int):
    table = np.exp(random_table(8, 9))
    states: list[ShapleyState] = []
    arguments = {"permutations": 10, "prior": np.linspace(1, 4, 8), "seed": 3}
    whole = estimate_shapley(lookup(table), 8, on_state=states.append, **arguments)
    saved = ShapleyState.from_arrays({k: np.array(v) for k, v in states[cut - 1].to_arrays().items()})
    assert saved.permutations == cut
    resumed = estimate_shapley(lookup(table), 8, state=saved, **arguments)
    for name in ("phi", "se", "evals", "passes", "split_half", "ess", "v_stop"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(resumed, name))


def test_a_state_of_another_game_is_refused():
    states: list[ShapleyState] = []
    estimate_shapley(additive, 6, permutations=2, sampler="uniform", on_state=states.append)
    with pytest.raises(ResumeMismatchError):
        estimate_shapley(glove, 3, permutations=4, sampler="uniform", state=states[0])


OPTIONS = [
    {"sampler": "uniform"},
    {"sampler": "antithetic"},
    {"weights": "full", "mix": 0.0},
    {"weights": "prefix", "mix": 0.0},
    {"weights": "prefix", "mix": 0.5},
    {"weights": "full", "mix": 0.3},
    {"weights": "prefix", "mix": 0.0, "temper": 0.5},
    {"weights": "prefix", "mix": 0.3, "temper": "auto"},
]


def errors_on_a_random_game(**options) -> tuple[np.ndarray, np.ndarray]:
    """|estimate - exact| and standard errors, float64 [5], of 4,000 full permutations with an uneven prior."""
    table = random_table(5, 11)
    game = {"value_fn_batch": batched(lookup(table)), "prior": np.array([5.0, 3, 2, 1, 1])}
    result = estimate_shapley(None, 5, batch=4000, permutations=4000, truncate=0, **game, **options)
    return np.abs(result.phi - shapley_from_table(table)), result.se


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_every_weighted_option_is_unbiased_on_a_random_game(options: dict):
    errors, se = errors_on_a_random_game(self_normalize=False, seed=12, **options)
    assert (errors <= 4 * se).all()


def test_unweighted_router_guided_sampling_is_biased_and_the_test_can_see_it():
    errors, se = errors_on_a_random_game(weights="none", mix=0)
    assert (errors > 4 * se).any()


def test_standard_errors_describe_the_spread_over_seeds():
    table = random_table(6, 13)
    for options in ({"sampler": "uniform"}, {"weights": "prefix", "mix": 0.3}):
        game = batched(lookup(table))
        runs = [
            estimate_shapley(
                None,
                6,
                value_fn_batch=game,
                batch=40,
                permutations=40,
                truncate=0,
                prior=np.linspace(1, 3, 6),
                seed=s,
                **options,
            )
            for s in range(150)
        ]
        spread = np.std([r.phi for r in runs], axis=0, ddof=1)
        claimed = np.sqrt(np.mean([r.se**2 for r in runs], axis=0))
        np.testing.assert_allclose(claimed, spread, rtol=0.25)


def test_effective_sample_size_is_m_without_weights_and_less_with():
    table = np.exp(random_table(8, 14))
    prior = np.exp(np.random.default_rng(0).normal(0, 1.2, 8))
    uniform = estimate_shapley(lookup(table), 8, permutations=20, sampler="uniform", seed=1)
    weighted = estimate_shapley(lookup(table), 8, permutations=20, prior=prior, weights="full", mix=0, seed=1)
    assert uniform.ess == pytest.approx(20)
    assert 1 <= weighted.ess < 12


def test_split_half_correlation_is_high_for_a_strong_signal_and_undefined_for_one_permutation():
    worth = np.arange(10.0)
    noise = random_table(10, 15) * 0.01

    def game(mask: np.ndarray) -> float:
        return float(worth[mask].sum() + noise[int(mask @ (1 << np.arange(10)))])

    assert estimate_shapley(game, 10, permutations=8, truncate=0, sampler="uniform").split_half > 0.95
    assert np.isnan(estimate_shapley(game, 10, permutations=1, truncate=0, sampler="uniform").split_half)


def test_a_value_that_is_not_finite_is_reported():
    with pytest.raises(VerificationError, match="finite"):
        estimate_shapley(lambda mask: float("nan"), 3, permutations=2, sampler="uniform")


def test_exact_enumeration_has_a_limit():
    with pytest.raises(UsageError, match="17 players needs 2\\^17"):
        exact_shapley(lambda mask: 0.0, 17)


def test_the_table_is_indexed_by_the_bits_of_the_coalition():
    table = coalition_table(lambda mask: float(mask @ np.array([1, 10, 100])), 3)
    np.testing.assert_array_equal(table, [0, 1, 10, 11, 100, 101, 110, 111])
