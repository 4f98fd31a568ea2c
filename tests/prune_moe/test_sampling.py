"""Permutation samplers against enumerated Plackett-Luce distributions."""

from __future__ import annotations

from itertools import permutations as all_orders
from math import factorial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xmac_cli.cli.errors import UsageError
from xmac_cli.prune_moe.sampling import (
    PermutationSampler,
    SamplerOptions,
    auto_temper,
    mixture_log_weights,
    plackett_luce_log_weights,
    plackett_luce_permutation,
    smoothed_frequency,
)

PRIOR = np.array([0.4, 0.3, 0.2, 0.1])


def probability(order: tuple[int, ...], prior: np.ndarray) -> float:
    """Q(pi), straight from the definition."""
    left, result = list(range(len(prior))), 1.0
    for player in order:
        result *= prior[player] / prior[left].sum()
        left.remove(player)
    return result


def test_gumbel_top_draws_orders_with_plackett_luce_probabilities():
    rng = np.random.default_rng(0)
    draws = 24_000
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(draws):
        order = tuple(plackett_luce_permutation(np.log(PRIOR), rng).tolist())
        counts[order] = counts.get(order, 0) + 1
    for order in all_orders(range(4)):
        q = probability(order, PRIOR)
        assert abs(counts.get(order, 0) / draws - q) < 4.5 * np.sqrt(q * (1 - q) / draws)


def test_the_last_prefix_weight_is_one_over_n_factorial_q():
    for order in all_orders(range(4)):
        log_w = plackett_luce_log_weights(np.array(order), np.log(PRIOR))
        assert log_w[-1] == pytest.approx(-np.log(factorial(4) * probability(order, PRIOR)), abs=1e-12)


@pytest.mark.parametrize("mix", [0.0, 0.3, 0.5])
def test_prefix_weights_average_to_one_under_the_mixture(mix: float):
    total = np.zeros(4)
    for order in all_orders(range(4)):
        density = mix / factorial(4) + (1 - mix) * probability(order, PRIOR)
        log_w = plackett_luce_log_weights(np.array(order), np.log(PRIOR))
        total += density * np.exp(mixture_log_weights(log_w, mix))
    np.testing.assert_allclose(total, 1.0, rtol=1e-12)


def test_prefix_weight_is_the_mean_of_the_full_weight_given_the_prefix():
    for length in (1, 2, 3):
        for prefix in all_orders(range(4), length):
            members = [o for o in all_orders(range(4)) if o[:length] == prefix]
            q = np.array([probability(o, PRIOR) for o in members])
            full = np.array([np.exp(plackett_luce_log_weights(np.array(o), np.log(PRIOR))[-1]) for o in members])
            got = np.exp(plackett_luce_log_weights(np.array(members[0]), np.log(PRIOR))[length - 1])
            assert got == pytest.approx((q * full).sum() / q.sum(), rel=1e-12)


@given(mix=st.floats(0.01, 1.0), log_w=st.floats(-800, 800))
def test_the_mixture_bounds_every_weight_by_one_over_its_share(mix: float, log_w: float):
    weight = np.exp(mixture_log_weights(np.array([log_w]), mix))[0]
    assert 0 <= weight <= 1 / mix * (1 + 1e-12)


def test_weights_stay_finite_for_thousands_of_experts():
    rng = np.random.default_rng(1)
    prior = np.exp(rng.normal(0, 1.2, 6144))
    order = plackett_luce_permutation(np.log(prior), rng)
    log_w = plackett_luce_log_weights(order, np.log(prior))
    assert np.isfinite(log_w).all()
    # independent sum in another order of operations
    ordered = prior[order]
    tail = np.cumsum(ordered[::-1])[::-1]
    reference = np.cumsum(np.log(tail) - np.log(ordered) - np.log(np.arange(6144, 0, -1)))
    np.testing.assert_allclose(log_w, reference, atol=1e-7)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 30), pairs=st.integers(1, 40), seed=st.integers(0, 2**31))
def test_antithetic_pairs_are_reverses_of_one_another(n: int, pairs: int, seed: int):
    sampler = PermutationSampler(n, 2 * pairs, SamplerOptions("antithetic", seed=seed))
    for pair in range(pairs):
        forward, backward = sampler.draw(2 * pair), sampler.draw(2 * pair + 1)
        assert sorted(forward) == list(range(n))
        np.testing.assert_array_equal(forward[::-1], backward)


def test_antithetic_rotations_show_every_player_at_every_position_once():
    n = 12
    sampler = PermutationSampler(n, 2 * n, SamplerOptions("antithetic", seed=3))
    firsts = [sampler.draw(2 * pair)[0] for pair in range(n)]
    assert sorted(firsts) == list(range(n))


def test_permutations_depend_on_seed_and_number_only():
    first = PermutationSampler(9, 20, SamplerOptions(seed=5), prior=np.arange(1.0, 10))
    second = PermutationSampler(9, 4, SamplerOptions(seed=5), prior=np.arange(1.0, 10))
    other = PermutationSampler(9, 20, SamplerOptions(seed=6), prior=np.arange(1.0, 10))
    assert all((first.draw(m) == second.draw(m)).all() for m in (3, 0, 1, 2))
    assert any((first.draw(m) != other.draw(m)).any() for m in range(4))


def test_busy_experts_are_removed_early_by_router_guided_sampling():
    prior = np.array([8.0, 1, 1, 1, 1, 1, 1, 1])
    sampler = PermutationSampler(8, 400, SamplerOptions(mix=0.0, seed=0), prior=prior)
    positions = [int(np.flatnonzero(sampler.draw(m) == 0)[0]) for m in range(400)]
    assert np.mean(np.array(positions) == 0) == pytest.approx(8 / 15, abs=0.1)


def test_no_weights_means_unit_weights():
    sampler = PermutationSampler(4, 5, SamplerOptions(weights="none", mix=0.0), prior=PRIOR)
    np.testing.assert_array_equal(sampler.log_weights(sampler.draw(0)), 0.0)


def test_full_weight_is_the_same_at_every_position():
    sampler = PermutationSampler(4, 5, SamplerOptions(weights="full", mix=0.0), prior=PRIOR)
    order = sampler.draw(1)
    log_w = sampler.log_weights(order)
    assert np.ptp(log_w) == 0
    assert log_w[0] == pytest.approx(-np.log(factorial(4) * probability(tuple(order), PRIOR)))


def test_automatic_tempering_meets_its_target_and_leaves_mild_priors_alone():
    rng = np.random.default_rng(2)
    wild = np.exp(rng.normal(0, 1.2, 256))
    exponent = auto_temper(wild, depth=103, seed=0)
    assert 0 < exponent < 1
    fresh = np.random.default_rng(99)
    log_w = []
    for _ in range(600):
        order = plackett_luce_permutation(exponent * np.log(wild), fresh)
        log_w.append(plackett_luce_log_weights(order, exponent * np.log(wild))[102])
    assert np.std(log_w) == pytest.approx(0.7, abs=0.15)
    assert auto_temper(np.ones(256) + rng.uniform(0, 1e-3, 256), depth=103, seed=0) == 1.0


def test_an_expert_that_was_never_chosen_still_has_a_positive_frequency():
    p = smoothed_frequency(np.array([0, 10, 30]), tokens=20, top_k=2)
    np.testing.assert_allclose(p, np.array([0.5, 10.5, 30.5]) / (40 + 1.5))
    assert p.sum() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("options", "prior", "permutations"),
    [
        (SamplerOptions("rgis"), None, 4),
        (SamplerOptions("rgis"), np.array([1.0, 0.0, 2.0]), 4),
        (SamplerOptions("antithetic"), None, 5),
        (SamplerOptions("uniform", mix=1.5), None, 4),
        (SamplerOptions("uniform"), None, 0),
    ],
)
def test_contradictory_options_are_refused(options: SamplerOptions, prior: np.ndarray | None, permutations: int):
    with pytest.raises(UsageError):
        PermutationSampler(3, permutations, options, prior=prior)
