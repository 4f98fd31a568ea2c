"""Importance of experts by every criterion that is not a Shapley value, from one calibration pass.

x ranges over real calibration tokens, T(x) = top-k set, g = gate that really multiplies the output, f = expert output;
an expert is kept if its score is large:
    random       seeded uniform numbers
    frequency    #{x: j in T(x)}                                 SEER-MoE, Muzio et al. 2024
    gate         mean over all x of the router's score of j      (softmax, or sigmoid for sigmoid routers)
    expert-trim  mean over all x of g_j, 0 where j not in T(x)   He et al. 2024
    ean          sum over x with j in T(x) of ||f_j||            expert activation norm
    reap         mean over x with j in T(x) of g_j ||f_j||       Lasby et al. 2025
    man, msan    mean over x with j in T(x) of ||f_j||, ||f_j||^2   arXiv 2606.15716
    loo          V(all) - V(all without j)                       leave one out
    naee         member of the best subset of the wanted size    Lu et al. 2024, exhaustive search per layer
    greedy       the step at which iterative removal of the least missed expert reaches j
Sigmoid routers need no special case: g is what the router put out, never a second softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, islice, product
from math import comb

import numpy as np
from numpy.typing import NDArray

from xmac_cli.cli.errors import ConstraintError
from xmac_cli.prune_moe.calibration_pass import LayerStatistics
from xmac_cli.prune_moe.recon import ReconLayer
from xmac_cli.prune_moe.values import ExpertGame

FloatArray = NDArray[np.float64]

NAEE_LIMIT = 100_000
_CHUNK = 4096


def _per_use(sums: FloatArray, statistics: LayerStatistics) -> FloatArray:
    """Mean over the tokens that use the expert; 0 for an expert that none uses."""
    return sums / np.maximum(statistics.count, 1.0)


_FORMULAS: dict[str, Callable[[LayerStatistics], FloatArray]] = {
    "frequency": lambda s: s.count.copy(),
    "gate": lambda s: s.probability / max(s.tokens, 1),
    "expert-trim": lambda s: s.gate / max(s.tokens, 1),
    "ean": lambda s: s.norm.copy(),
    "reap": lambda s: _per_use(s.gated_norm, s),
    "man": lambda s: _per_use(s.norm, s),
    "msan": lambda s: _per_use(s.squared_norm, s),
}


def statistic_scores(criterion: str, statistics: LayerStatistics) -> FloatArray:
    """Scores of one layer by a criterion of `options.STATISTIC_CRITERIA`, float64 [n]."""
    return _FORMULAS[criterion](statistics)


def random_scores(sizes: list[int], seed: int) -> list[FloatArray]:
    """Uniform numbers in [0, 1), one array per layer."""
    rng = np.random.default_rng(seed)
    return [rng.random(n) for n in sizes]


def leave_one_out_scores(game: ExpertGame) -> FloatArray:
    """V(all) - V(all without j), float64 [N]."""
    masks = np.ones((game.num_players + 1, game.num_players), dtype=bool)
    masks[np.arange(1, game.num_players + 1), np.arange(game.num_players)] = False
    values = np.concatenate([game.values(masks[i : i + _CHUNK]) for i in range(0, masks.shape[0], _CHUNK)])
    return values[0] - values[1:]


def naee_scores(layer: ReconLayer, keep: int) -> FloatArray:
    """1 for members of the subset of `keep` experts with the smallest error of the layer's output, else 0.

    All subsets are tried; with a group-limited router, those with the same number of experts in each group. The error
    is the Frobenius norm over all calibration tokens, accumulated in float64.

    Raises:
        ConstraintError: more than 100,000 subsets, or a size that the groups do not divide.
    """
    n, groups = layer.entry.num_experts, layer.entry.num_groups
    if not 0 < keep <= n or keep % groups:
        raise ConstraintError(f"{keep} of {n} experts in {groups} groups is no subset that can be kept")
    count = comb(n // groups, keep // groups) ** groups
    if count > NAEE_LIMIT:
        raise ConstraintError(
            f"NAEE would try {count:,} subsets of {keep} from {n} experts in every layer",
            hint=f"it is offered up to {NAEE_LIMIT:,}; use another criterion",
        )
    size = n // groups
    choices = [list(combinations(range(g * size, (g + 1) * size), keep // groups)) for g in range(groups)]
    best, error = np.zeros(n, dtype=bool), np.inf
    subsets = product(*choices)
    while batch := list(islice(subsets, _CHUNK)):
        masks = np.zeros((len(batch), n), dtype=bool)
        for row, subset in zip(masks, batch):
            row[[expert for part in subset for expert in part]] = True
        residuals = layer.residuals(masks)
        if residuals.min() < error:
            best, error = masks[residuals.argmin()], float(residuals.min())
    return best.astype(np.float64)


def greedy_scores(layer: ReconLayer) -> FloatArray:
    """Step, 0 to n-1, at which each expert is removed when every step removes the one whose loss hurts least."""
    n = layer.entry.num_experts
    mask, phi = np.ones(n, dtype=bool), np.zeros(n)
    for step in range(n - 1):
        survivors = np.flatnonzero(mask)
        trials = np.repeat(mask[None], survivors.size, axis=0)
        trials[np.arange(survivors.size), survivors] = False
        # Ties drop the higher index first.
        residuals = layer.residuals(trials)
        loser = survivors[np.flatnonzero(residuals == residuals.min())[-1]]
        mask[loser], phi[loser] = False, step
    phi[mask] = n - 1
    return phi
