"""The interval: equal to plain resampling, and covering what it should."""

from __future__ import annotations

import numpy as np
import pytest

from xmac_cli.eval_ppl.bootstrap import bootstrap_interval


def test_it_is_the_percentile_interval_of_resampled_documents() -> None:
    """Reference: documents drawn one by one with replacement, another generator, many replicates."""
    draw = np.random.default_rng(1)
    nll, tokens = draw.gamma(5, 20, 40), draw.integers(5, 80, 40).astype(float)
    low, high = bootstrap_interval([(nll, tokens)], samples=20_000, seed=0)
    means = []
    for _ in range(20_000):
        rows = draw.integers(0, 40, 40)
        means.append(nll[rows].sum() / tokens[rows].sum())
    expected = np.quantile(means, [0.025, 0.975])
    assert [low, high] == pytest.approx(expected, rel=0.01)


def test_domains_are_resampled_separately() -> None:
    """Two domains of identical documents each: resampling within a domain changes nothing, so the width is zero."""
    first, second = (np.full(10, 2.0), np.ones(10)), (np.full(5, 9.0), np.ones(5))
    low, high = bootstrap_interval([first, second], samples=100, seed=0)
    assert low == pytest.approx(high) == pytest.approx((20 + 45) / 15)


def test_about_95_of_100_intervals_cover_the_truth() -> None:
    draw = np.random.default_rng(2)
    covered = 0
    for trial in range(300):
        tokens = draw.integers(20, 60, 60).astype(float)
        nll = tokens * draw.normal(3.0, 0.5, 60)
        low, high = bootstrap_interval([(nll, tokens)], samples=400, seed=trial)
        covered += low <= 3.0 <= high
    assert 270 <= covered <= 296


def test_one_document_or_no_replicates_have_no_interval() -> None:
    one = (np.array([3.0]), np.array([2.0]))
    assert bootstrap_interval([one], samples=100, seed=0) is None
    assert bootstrap_interval([one, one], samples=100, seed=0) is None
    assert bootstrap_interval([(np.ones(5), np.ones(5))], samples=0, seed=0) is None


def test_the_seed_decides() -> None:
    data = [(np.arange(1.0, 20.0), np.full(19, 3.0))]
    intervals = [bootstrap_interval(data, samples=200, seed=seed) for seed in (5, 5, 6)]
    assert intervals[0] == intervals[1] != intervals[2]
