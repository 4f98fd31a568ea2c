"""Does a Shapley score choose better experts? Inequalities on the enumerated 12-expert game, never exact numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.estimator_table import (
    ESTIMATORS,
    UNBIASED,
    Estimator,
    best_possible,
    bias_rows,
    criteria_scores,
    estimator_rows,
    keep_global,
    keep_uniform,
    many_estimates,
    random_mean,
)
from support.shapley_fixture import PLAYERS, Fixture
from torch.nn import functional as F

from xmac_cli.prune_moe.routing import masked_routing, moe_modules
from xmac_cli.prune_moe.shapley import shapley_from_table

REMOVED = {4: "33 %", 6: "50 %", 8: "67 %"}


def test_the_enumeration_agrees_with_masked_forward_passes(enumerated_game: Fixture):
    model, tokens = enumerated_game.model, enumerated_game.calibration
    first, second = moe_modules(model)
    for mask in np.random.default_rng(0).random((12, PLAYERS)) < 0.6:
        with torch.no_grad(), masked_routing(model, {first.name: mask[:6], second.name: mask[6:]}):
            out = model(input_ids=tokens, use_cache=False).logits
        loss = F.cross_entropy(out[:, 1:-1].flatten(0, 1), tokens[:, 2:].flatten(), reduction="none").double().mean()
        assert enumerated_game.perplexity(mask) == pytest.approx(float(loss.exp()), rel=1e-5)


def test_the_model_has_learned_and_needs_its_experts(enumerated_game: Fixture):
    full, empty = 1 / enumerated_game.table[-1], 1 / enumerated_game.table[0]
    assert full < 5 < 2 * full < empty


def test_exact_values_satisfy_efficiency(enumerated_game: Fixture):
    table = enumerated_game.table
    assert shapley_from_table(table).sum() == pytest.approx(table[-1] - table[0], rel=1e-9)


@pytest.fixture(scope="module")
def scores(enumerated_game: Fixture) -> dict[str, np.ndarray]:
    return criteria_scores(enumerated_game)


@pytest.mark.parametrize("removed", REMOVED, ids=REMOVED.get)
def test_with_a_global_ranking_shapley_beats_frequency_and_chance(
    enumerated_game: Fixture, scores: dict[str, np.ndarray], removed: int
):
    ours = enumerated_game.perplexity(keep_global(scores["Shapley, global game, exact"], removed))
    assert ours < enumerated_game.perplexity(keep_global(scores["frequency"], removed))
    assert ours < random_mean(enumerated_game, removed, uniform=False)
    assert ours >= best_possible(enumerated_game, removed, uniform=False)


@pytest.mark.parametrize("removed", REMOVED, ids=REMOVED.get)
def test_with_equal_counts_shapley_beats_chance_and_at_least_ties_with_frequency(
    enumerated_game: Fixture, scores: dict[str, np.ndarray], removed: int
):
    ours = enumerated_game.perplexity(keep_uniform(scores["Shapley, global game, exact"], removed))
    frequency = enumerated_game.perplexity(keep_uniform(scores["frequency"], removed))
    assert ours < random_mean(enumerated_game, removed, uniform=True)
    assert ours < frequency if removed == 8 else ours <= 1.05 * frequency


def test_twenty_permutations_with_truncation_already_choose_well(enumerated_game: Fixture):
    default = Estimator("default", mix=0.3, truncate=0.5, self_normalize=True)
    results = many_estimates(enumerated_game, default, permutations=20, seeds=range(50))
    chosen = [enumerated_game.perplexity(keep_global(result.phi, 6)) for result in results]
    assert np.mean(chosen) < enumerated_game.perplexity(keep_global(enumerated_game.frequency, 6))
    assert np.mean(chosen) < random_mean(enumerated_game, 6, uniform=False)
    exact = len(enumerated_game.table) - 1
    assert np.mean([result.passes for result in results]) < 0.6 * 20 * PLAYERS < exact


def test_the_estimators_rank_as_theory_says(enumerated_game: Fixture):
    rows = {row[0]: row[1:] for row in estimator_rows(enumerated_game, 100)}
    assert set(rows) == {estimator.name for estimator in ESTIMATORS}
    passes, rmse = ({name: row[column] for name, row in rows.items()} for column in (0, 1))
    assert rmse["antithetic pairs"] < rmse["uniform"] < rmse["PL, full weight (paper, tau=0)"]
    assert rmse["PL, prefix, mix=.5, self-norm."] < rmse["PL, full weight (paper, tau=0)"]
    assert rmse["PL, prefix weight, self-norm."] < rmse["PL, full weight (paper, tau=0)"]
    assert passes["uniform, tau=.5"] < 0.6 * passes["uniform"]


@pytest.mark.slow
def test_every_unbiased_option_is_unbiased_over_two_thousand_seeds(enumerated_game: Fixture):
    rows = bias_rows(enumerated_game, 2000)
    assert [name for name, _ in rows] == [estimator.name for estimator in UNBIASED]
    for name, deviation in rows:
        assert deviation < 4, name


def test_the_bias_test_sees_a_biased_option(enumerated_game: Fixture):
    exact = shapley_from_table(enumerated_game.table)
    unweighted = Estimator("no weights", weights="none")
    phi = np.array([r.phi for r in many_estimates(enumerated_game, unweighted, permutations=2, seeds=range(600))])
    z = (phi.mean(axis=0) - exact) / (phi.std(axis=0, ddof=1) / np.sqrt(600))
    assert np.abs(z).max() > 4
