"""Permutation samplers for Monte-Carlo Shapley values, with importance weights in log space.

A permutation orders all N players; walked from the full set, its first player is removed first. Samplers: `uniform`;
`antithetic` (a permutation and its reverse, the base order rotated between pairs); `rgis`, router-guided importance
sampling of Huang et al., NeurIPS 2025, section 3: Plackett-Luce over activation frequencies p, so that busy experts are
removed early. Its weight uniform/Plackett-Luce is a product of N ratios, which no float holds for real N, so only
logarithms are formed. Permutation m depends on (seed, m) alone, which makes an interrupted run resumable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from xmac_cli.cli.errors import UsageError

Sampler = Literal["rgis", "uniform", "antithetic"]
Weights = Literal["prefix", "full", "none"]
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

AUTO_TEMPER_SPREAD = 0.7
_AUTO_TEMPER_DRAWS = 64


@dataclass(frozen=True)
class SamplerOptions:
    """How permutations are drawn and weighted.

    Args:
        sampler: `rgis`, `uniform` or `antithetic`.
        weights: what corrects `rgis` for its unequal probabilities. `prefix`: the weight of the players removed so far,
            the conditional mean of the full weight, hence never of larger variance; `full`: the weight of the whole
            permutation, as published; `none`: no correction, a biased estimate.
        mix: share of uniform permutations mixed into `rgis` (defensive mixture); bounds every weight by 1/mix.
        temper: exponent on the frequencies, or `auto` = the largest in [0, 1] for which the standard deviation of the
            log weight at the depth where walks are expected to stop stays below 0.7.
        seed: of every draw.
    """

    sampler: Sampler = "rgis"
    weights: Weights = "prefix"
    mix: float = 0.3
    temper: float | Literal["auto"] = 1.0
    seed: int = 0


def smoothed_frequency(counts: NDArray, tokens: int, top_k: int) -> FloatArray:
    """Activation frequency of every expert, positive even for experts that were never chosen.

    Args:
        counts: [N] number of tokens whose top-k contains the expert.
        tokens: number of tokens.
        top_k: experts per token.

    Returns:
        float64 [N], (count + 0.5) / (tokens * k + 0.5 * N).
    """
    counts = np.asarray(counts, dtype=np.float64)
    return (counts + 0.5) / (tokens * top_k + 0.5 * counts.shape[0])


def plackett_luce_permutation(log_prior: FloatArray, rng: np.random.Generator) -> IntArray:
    """Draw an order without replacement, each next player with probability proportional to its prior.

    Args:
        log_prior: float64 [N], log p up to a constant.

    Source: Gumbel-top-k; Yellott 1977, Kool et al. 2019.
    """
    return np.argsort(-(log_prior + rng.gumbel(size=log_prior.shape[0])), kind="stable").astype(np.int64)


def plackett_luce_log_weights(permutation: IntArray, log_prior: FloatArray) -> FloatArray:
    """log of uniform probability / Plackett-Luce probability of every prefix of a permutation.

    w_t = prod_{s<=t} [1 / (N-s+1)] / [p_{pi[s]} / sum_{j not yet removed} p_j]

    Args:
        permutation: int64 [N], or [M, N] for several.
        log_prior: float64 [N], log p up to a constant.

    Returns:
        float64, shaped like `permutation`; entry t belongs to the prefix that ends with permutation[t]. The last entry
        is log 1/(N! Q(pi)).
    """
    ordered = log_prior[permutation]
    remaining = np.logaddexp.accumulate(ordered[..., ::-1], axis=-1)[..., ::-1]
    left = np.arange(ordered.shape[-1], 0, -1, dtype=np.float64)
    return np.cumsum(-np.log(left) - ordered + remaining, axis=-1)


def mixture_log_weights(log_weights: FloatArray, mix: float) -> FloatArray:
    """log weight of uniform against mix * uniform + (1 - mix) * Plackett-Luce: -log(mix + (1 - mix) / w)."""
    if mix <= 0:
        return log_weights
    if mix >= 1:
        return np.zeros_like(log_weights)
    return -np.logaddexp(np.log(mix), np.log1p(-mix) - log_weights)


def auto_temper(prior: FloatArray, depth: int, seed: int, spread: float = AUTO_TEMPER_SPREAD) -> float:
    """Largest exponent in [0, 1] whose log weight after `depth` removals has a standard deviation of at most `spread`.

    The deviation is predicted from 64 simulated permutations that share their random numbers over all exponents.
    """
    log_prior = np.log(prior)
    gumbel = np.random.default_rng([seed, 0x7E39E5]).gumbel(size=(_AUTO_TEMPER_DRAWS, prior.shape[0]))
    position = int(np.clip(depth, 1, prior.shape[0])) - 1

    def deviation(exponent: float) -> float:
        tempered = exponent * log_prior
        orders = np.argsort(-(tempered + gumbel), axis=1, kind="stable")
        return float(np.std(plackett_luce_log_weights(orders, tempered)[:, position]))

    if deviation(1.0) <= spread:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(16):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if deviation(middle) <= spread else (low, middle)
    return low


class PermutationSampler:
    """Draws the permutations of one estimate.

    Args:
        num_players: N.
        permutations: M, how many will be drawn; `antithetic` spreads its rotations over them.
        options: see `SamplerOptions`.
        prior: float64 [N] positive activation frequencies; `rgis` needs it.
        depth: removals after which walks are expected to stop; only `temper="auto"` uses it.

    Raises:
        UsageError: options that contradict each other.
    """

    def __init__(
        self,
        num_players: int,
        permutations: int,
        options: SamplerOptions,
        *,
        prior: FloatArray | None = None,
        depth: int | None = None,
    ) -> None:
        if num_players < 1 or permutations < 1:
            raise UsageError("a Shapley estimate needs at least one player and one permutation")
        if not 0 <= options.mix <= 1:
            raise UsageError(f"the share of uniform permutations must lie in [0, 1], not {options.mix}")
        self.num_players = num_players
        self.permutations = permutations
        self.options = options
        self.temper = 1.0
        self._log_prior = np.zeros(num_players)
        if options.sampler == "rgis":
            self._log_prior = self._tempered(prior, depth)
        elif options.sampler == "antithetic" and permutations % 2:
            raise UsageError(f"antithetic permutations come in pairs; {permutations} is odd")

    @property
    def unit(self) -> int:
        """Permutations that form one independent draw: 2 for antithetic pairs, else 1."""
        return 2 if self.options.sampler == "antithetic" else 1

    def _tempered(self, prior: FloatArray | None, depth: int | None) -> FloatArray:
        if prior is None or np.shape(prior) != (self.num_players,) or not (np.asarray(prior) > 0).all():
            raise UsageError("router-guided sampling needs one positive activation frequency per player")
        prior = np.asarray(prior, dtype=np.float64)
        if self.options.temper == "auto":
            # The full weight always runs through all N ratios, wherever the walk stops.
            full = self.options.weights == "full" or depth is None
            self.temper = auto_temper(prior, self.num_players if full else int(depth or 1), self.options.seed)
        else:
            self.temper = float(self.options.temper)
        return self.temper * np.log(prior)

    def draw(self, index: int) -> IntArray:
        """Permutation number `index`, int64 [N]; entry 0 is removed first."""
        if self.options.sampler == "antithetic":
            return self._antithetic(index)
        rng = np.random.default_rng([self.options.seed, index])
        if self.options.sampler == "rgis" and rng.random() >= self.options.mix:
            return plackett_luce_permutation(self._log_prior, rng)
        return rng.permutation(self.num_players).astype(np.int64)

    def _antithetic(self, index: int) -> IntArray:
        # Pairs share a base order that is rotated from pair to pair, so that each player meets early and late
        # positions equally often; after N pairs every rotation is used up and a new base begins.
        pair, reverse = divmod(index, 2)
        block, within = divmod(pair, self.num_players)
        pairs = min(self.permutations // 2 - block * self.num_players, self.num_players)
        base = np.random.default_rng([self.options.seed, block]).permutation(self.num_players).astype(np.int64)
        rotated = np.roll(base, -(within * self.num_players // max(pairs, 1)))
        return rotated[::-1].copy() if reverse else rotated

    def log_weights(self, permutation: IntArray) -> FloatArray:
        """log importance weight of the marginal at every position of a permutation, float64 [N]."""
        if self.options.sampler != "rgis" or self.options.weights == "none":
            return np.zeros(self.num_players)
        log_weights = plackett_luce_log_weights(permutation, self._log_prior)
        if self.options.weights == "full":
            log_weights = np.full_like(log_weights, log_weights[-1])
        return mixture_log_weights(log_weights, self.options.mix)
