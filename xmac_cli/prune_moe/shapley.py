"""Shapley values of a game given by a value function: Monte-Carlo over permutations, and exact enumeration.

phi_e = sum over S not containing e of |S|! (N-|S|-1)! / N! * [V(S + e) - V(S)]. The estimator removes players from the
full set (permutation_walk.py) in the order of a sampler (sampling.py):
    phi_e = sum_m w_me Delta_me / M,   or   sum_m w_me Delta_me / sum_m w_me   (self-normalised),
where a marginal behind the cut counts as Delta = 0. Source: Huang et al., NeurIPS 2025, Algorithm 1; prefix weights,
mixture and diagnostics are ours (docs/prune-moe-method.md). Everything is float64; N players, M permutations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import factorial
from typing import Any, Literal

import numpy as np

from xmac_cli.cli.errors import ResumeMismatchError, UsageError, VerificationError
from xmac_cli.cli.progress import NullProgress, Progress
from xmac_cli.prune_moe.permutation_walk import (
    BatchValueFn,
    BoolArray,
    CoalitionGame,
    FloatArray,
    IntArray,
    Truncation,
    ValueFn,
    walk_permutations,
)
from xmac_cli.prune_moe.rank_correlation import spearman
from xmac_cli.prune_moe.sampling import PermutationSampler, Sampler, SamplerOptions, Weights

EXACT_LIMIT = 16
TELESCOPING_TOLERANCE = 1e-6
# Share of the M*N marginals that is evaluated at tau = 0.5, from the published 92 -> 36 minutes.
EXPECTED_EVALUATED_SHARE = 0.4
_EXACT_CHUNK = 1024


@dataclass(frozen=True)
class ShapleyState:
    """Everything a finished part of an estimate has produced; enough to continue it or to aggregate it.

    Args:
        marginals: float64 [m, N] unweighted marginals of the m permutations walked so far.
        evaluated: bool [m, N].
        log_weights: float64 [m, N] log importance weight of each marginal.
        stop_log_weights: float64 [m] log weight at the last evaluated position.
        v_stop: float64 [m].
        v_full: V(all).
        v_empty: V(no player), NaN while not evaluated.
        passes: evaluations of the value function so far.
    """

    marginals: FloatArray
    evaluated: BoolArray
    log_weights: FloatArray
    stop_log_weights: FloatArray
    v_stop: FloatArray
    v_full: float
    v_empty: float
    passes: int

    @property
    def permutations(self) -> int:
        """Number of permutations walked."""
        return int(self.marginals.shape[0])

    def to_arrays(self) -> dict[str, np.ndarray]:
        """The state as named arrays, for a file."""
        return {name: np.asarray(value) for name, value in vars(self).items()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> ShapleyState:
        """Inverse of `to_arrays`."""
        values: dict[str, Any] = dict(arrays)
        values |= {"v_full": float(arrays["v_full"]), "v_empty": float(arrays["v_empty"])}
        values["passes"] = int(arrays["passes"])
        return cls(**values)


@dataclass(frozen=True)
class ShapleyResult:
    """An estimate with its diagnostics.

    Args:
        phi: float64 [N] estimated Shapley values.
        se: float64 [N] standard errors, from the spread between permutations (pairs for `antithetic`); NaN for one.
        evals: int64 [N] evaluated marginals behind each value.
        ess: effective sample size of the weights at the walks' ends; M without weights.
        v_full: V(all).
        v_empty: V(no player), NaN when it was never evaluated.
        v_stop: mean value at the walks' ends.
        split_half: Spearman correlation of the values from odd and from even permutations; NaN when undefined.
        telescoping_error: |sum of unweighted values - (V(all) - mean V_stop)|, relative.
        passes: evaluations of the value function.
        temper: exponent used on the sampling frequencies.
        state: the per-permutation material; None after exact enumeration.
    """

    phi: FloatArray
    se: FloatArray
    evals: IntArray
    ess: float
    v_full: float
    v_empty: float
    v_stop: float
    split_half: float
    telescoping_error: float
    passes: int
    temper: float = 1.0
    state: ShapleyState | None = None


def expected_depth(n_players: int, truncate: float) -> int:
    """Removals after which a walk is expected to be cut off."""
    return n_players if truncate <= 0 else int(np.ceil(EXPECTED_EVALUATED_SHARE * n_players))


def estimate_shapley(
    value_fn: ValueFn | None,
    n_players: int,
    *,
    permutations: int = 20,
    truncate: float = 0.5,
    sampler: Sampler = "rgis",
    prior: FloatArray | None = None,
    weights: Weights = "prefix",
    mix: float = 0.3,
    temper: float | Literal["auto"] = 1.0,
    self_normalize: bool = True,
    seed: int = 0,
    value_fn_batch: BatchValueFn | None = None,
    batch: int = 1,
    capacity: int = 0,
    inactive: Callable[[BoolArray], BoolArray] | None = None,
    value_floor: float = 0.0,
    log_values: bool = False,
    state: ShapleyState | None = None,
    on_state: Callable[[ShapleyState], None] | None = None,
    progress: Progress | None = None,
) -> ShapleyResult:
    """Estimate the Shapley values of a game.

    Args:
        value_fn: bool mask [N] of the players present -> value; may be None when `value_fn_batch` is given.
        n_players: N.
        permutations: M.
        truncate: tau; a walk is cut off once its value is below this share of V(all). 0 walks to the end.
        sampler, prior, weights, mix, temper, seed: see `sampling.SamplerOptions`; prior is float64 [N].
        self_normalize: divide by the sum of weights instead of by M (consistent, lower variance, slightly biased).
        value_fn_batch: masks [B, N] -> float64 [B]; then `batch` permutations advance in lock step.
        batch: permutations walked together; the result does not depend on it.
        capacity: coalitions one evaluation may hold; free places take guessed next steps, see `walk_permutations`.
        inactive: see `permutation_walk.CoalitionGame`.
        value_floor, log_values: how a share of V(all) is measured, see `permutation_walk.Truncation`.
        state: continue from here; permutations already walked are not walked again.
        on_state: receives the state after every batch of permutations.
        progress: shows evaluations.

    Raises:
        UsageError: contradictory options.
        ResumeMismatchError: `state` belongs to another game.
        VerificationError: a value is not finite, or the telescoping identity does not hold.
    """
    options = SamplerOptions(sampler, weights, mix, temper, seed)
    expected = expected_depth(n_players, truncate)
    draws = PermutationSampler(n_players, permutations, options, prior=prior, depth=expected)
    progress = progress or NullProgress()
    with progress.task("Shapley permutations", total=permutations * expected, unit="coalitions") as task:
        game = CoalitionGame(n_players, value_fn, value_fn_batch, inactive, task)
        state = _check_state(state, n_players) or _empty_state(n_players, game)
        game.v_empty, game.passes = state.v_empty, state.passes
        truncation = Truncation(truncate, value_floor, log_values)
        if inactive is not None and 0 < state.permutations < permutations:
            game.values(np.ones((1, n_players), dtype=bool))  # after a restart, the oracle must see V(all) again
            game.passes -= 1
        while state.permutations < permutations:
            count = min(max(batch, 1), permutations - state.permutations)
            state = _extend(state, draws, game, truncation, count, capacity)
            progress.metric({"permutations": state.permutations, "passes": state.passes})
            if on_state is not None:
                on_state(state)
    return summarize(state, self_normalize=self_normalize, unit=draws.unit, temper=draws.temper)


def _empty_state(n: int, game: CoalitionGame) -> ShapleyState:
    v_full = float(game.values(np.ones((1, n), dtype=bool))[0])
    none = np.zeros((0, n))
    return ShapleyState(none, none.astype(bool), none, np.zeros(0), np.zeros(0), v_full, float("nan"), game.passes)


def _check_state(state: ShapleyState | None, n: int) -> ShapleyState | None:
    if state is not None and state.marginals.shape[1] != n:
        raise ResumeMismatchError(f"the saved state has {state.marginals.shape[1]} players, this game has {n}")
    return state


def _extend(
    state: ShapleyState,
    draws: PermutationSampler,
    game: CoalitionGame,
    truncation: Truncation,
    count: int,
    capacity: int,
) -> ShapleyState:
    orders = np.stack([draws.draw(state.permutations + i) for i in range(count)])
    walks = walk_permutations(orders, game, truncation, state.v_full, capacity=capacity)
    by_position = np.stack([draws.log_weights(order) for order in orders])
    by_player = np.empty_like(by_position)
    np.put_along_axis(by_player, orders, by_position, axis=1)
    at_stop = by_position[np.arange(count), np.maximum(walks.depth - 1, 0)]
    return ShapleyState(
        marginals=np.concatenate([state.marginals, walks.marginals]),
        evaluated=np.concatenate([state.evaluated, walks.evaluated]),
        log_weights=np.concatenate([state.log_weights, by_player]),
        stop_log_weights=np.concatenate([state.stop_log_weights, at_stop]),
        v_stop=np.concatenate([state.v_stop, walks.v_stop]),
        v_full=state.v_full,
        v_empty=game.v_empty,
        passes=game.passes,
    )


def summarize(state: ShapleyState, *, self_normalize: bool = True, unit: int = 1, temper: float = 1.0) -> ShapleyResult:
    """Turn walked permutations into values, standard errors and diagnostics.

    Args:
        state: the walked permutations.
        self_normalize: see `estimate_shapley`.
        unit: permutations per independent draw.
        temper: recorded in the result.
    """
    phi, se = _estimate(state.marginals, state.log_weights, self_normalize, unit)
    unweighted = float(state.marginals.mean(axis=0).sum())
    lost = state.v_full - float(state.v_stop.mean())
    error = abs(unweighted - lost) / max(abs(state.v_full), abs(float(state.v_stop.mean())), 1e-300)
    if not error <= TELESCOPING_TOLERANCE:
        raise VerificationError(f"marginals do not add up to V(all) - V(stop): relative error {error:.1e}")
    log_w = state.stop_log_weights
    w = np.exp(log_w - log_w.max())
    return ShapleyResult(
        phi=phi,
        se=se,
        evals=state.evaluated.sum(axis=0).astype(np.int64),
        ess=float(w.sum() ** 2 / (w @ w)),
        v_full=state.v_full,
        v_empty=state.v_empty,
        v_stop=float(state.v_stop.mean()),
        split_half=_split_half(state, self_normalize, unit),
        telescoping_error=error,
        passes=state.passes,
        temper=temper,
        state=state,
    )


def _estimate(
    marginals: FloatArray, log_weights: FloatArray, self_normalize: bool, unit: int
) -> tuple[FloatArray, FloatArray]:
    count = marginals.shape[0]
    if self_normalize:
        w = np.exp(log_weights - log_weights.max(axis=0))
        total = w.sum(axis=0)
        phi = (w * marginals).sum(axis=0) / total
        residual = w * (marginals - phi) / total * count
    else:
        contributions = np.exp(log_weights) * marginals
        phi = contributions.mean(axis=0)
        residual = contributions - phi
    if unit > 1:
        residual = residual.reshape(count // unit, unit, -1).mean(axis=1)
    draws = residual.shape[0]
    if draws < 2:
        return phi, np.full(phi.shape, np.nan)
    return phi, np.sqrt((residual**2).sum(axis=0) / (draws - 1) / draws)


def _split_half(state: ShapleyState, self_normalize: bool, unit: int) -> float:
    half = np.arange(state.permutations) // unit % 2 == 0
    if half.all() or state.marginals.shape[1] < 2:
        return float("nan")
    values = [_estimate(state.marginals[part], state.log_weights[part], self_normalize, 1)[0] for part in (half, ~half)]
    return spearman(values[0], values[1])


def coalition_table(value_fn: ValueFn | None, n: int, *, value_fn_batch: BatchValueFn | None = None) -> FloatArray:
    """Values of all coalitions, float64 [2^n]; bit i of the index says whether player i is present.

    Raises:
        UsageError: n > 16.
    """
    if n > EXACT_LIMIT:
        raise UsageError(
            f"exact enumeration of {n} players needs 2^{n} evaluations",
            hint=f"it is offered up to {EXACT_LIMIT} players; use --scope layer or a sampler",
        )
    game = CoalitionGame(n, value_fn, value_fn_batch)
    masks = (np.arange(2**n)[:, None] >> np.arange(n)) & 1 == 1
    return np.concatenate([game.values(masks[i : i + _EXACT_CHUNK]) for i in range(0, 2**n, _EXACT_CHUNK)])


def shapley_from_table(table: FloatArray) -> FloatArray:
    """Exact Shapley values, float64 [n], from the values of all 2^n coalitions."""
    n = int(table.shape[0]).bit_length() - 1
    index = np.arange(2**n)
    size = ((index[:, None] >> np.arange(n)) & 1).sum(axis=1)
    weight = np.array([factorial(s) * factorial(n - s - 1) / factorial(n) for s in range(n)])
    phi = np.empty(n)
    for player in range(n):
        without = index[(index >> player) & 1 == 0]
        phi[player] = weight[size[without]] @ (table[without | (1 << player)] - table[without])
    return phi


def exact_shapley(value_fn: ValueFn | None, n: int, *, value_fn_batch: BatchValueFn | None = None) -> ShapleyResult:
    """Shapley values by enumeration of all 2^n coalitions, n <= 16.

    Returns:
        A result with standard error 0; `evals` counts the marginals of each player.
    """
    return exact_result(coalition_table(value_fn, n, value_fn_batch=value_fn_batch))


def exact_result(table: FloatArray) -> ShapleyResult:
    """The exact Shapley values of a table of all coalitions, with the efficiency axiom checked.

    Raises:
        VerificationError: the values do not add up to V(all) - V(no player).
    """
    phi = shapley_from_table(table)
    n = phi.shape[0]
    v_full, v_empty = float(table[-1]), float(table[0])
    error = abs(float(phi.sum()) - (v_full - v_empty)) / max(abs(v_full), abs(v_empty), 1e-300)
    if not error <= TELESCOPING_TOLERANCE:
        raise VerificationError(f"Shapley values do not add up to V(all) - V(empty): relative error {error:.1e}")
    return ShapleyResult(
        phi=phi,
        se=np.zeros(n),
        evals=np.full(n, 2 ** (n - 1), dtype=np.int64),
        ess=float(2 ** (n - 1)),
        v_full=v_full,
        v_empty=v_empty,
        v_stop=v_empty,
        split_half=1.0,
        telescoping_error=error,
        passes=int(table.shape[0]),
    )
