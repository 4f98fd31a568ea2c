"""What the numbers of an estimate are worth: the diagnostics that every report carries.

Standard errors alone do not say whether a ranking repeats; effective sample size, split-half correlation and the
telescoping identity do (docs/prune-moe-method.md, "Diagnostics").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from xmac_cli.prune_moe.shapley import ShapleyResult, ShapleyState, summarize

LOWEST_ESS_SHARE = 0.25
LOWEST_SPLIT_HALF = 0.6
_CONVERGENCE_POINTS = 10


def diagnostics(results: Sequence[ShapleyResult]) -> dict[str, Any]:
    """Diagnostics of one global game, or of several layer games: passes summed, the rest averaged, the worst kept.

    Returns:
        JSON-able values; None where a number is undefined.
    """
    if not results:
        return {}
    sampled = [result for result in results if result.state is not None]
    shares = [result.ess / result.state.permutations for result in sampled if result.state is not None]
    evaluated = [float(result.state.evaluated.mean()) for result in sampled if result.state is not None]
    return {
        "games": len(results),
        "permutations": sampled[0].state.permutations if sampled and sampled[0].state is not None else None,
        "coalitions_evaluated": int(sum(result.passes for result in results)),
        "share_of_marginals_known": _number(np.mean(evaluated)) if evaluated else 1.0,
        "v_full": _number(np.mean([result.v_full for result in results])),
        "v_empty": _number(np.mean([result.v_empty for result in results])),
        "v_stop": _number(np.mean([result.v_stop for result in results])),
        "ess": _number(min((result.ess for result in sampled), default=math.nan)),
        "ess_share": _number(min(shares, default=math.nan)),
        "split_half": _number(_worst([result.split_half for result in results])),
        "telescoping_error": _number(max(result.telescoping_error for result in results)),
        "mean_standard_error": _number(np.mean([np.mean(result.se) for result in results])),
        "temper": _number(results[0].temper),
    }


def convergence(results: Sequence[ShapleyResult], *, self_normalize: bool, unit: int) -> list[list[float]]:
    """Split-half correlation after growing numbers of permutations, as [permutations, correlation] pairs.

    Several games are averaged; numbers of permutations where it is undefined are left out.
    """
    states = [result.state for result in results if result.state is not None]
    if not states:
        return []
    total = states[0].permutations
    counts = sorted({max(2 * unit, round(total * i / _CONVERGENCE_POINTS) // unit * unit) for i in range(1, 11)})
    points = []
    for count in (c for c in counts if c <= total):
        halves = [
            summarize(_first(state, count), self_normalize=self_normalize, unit=unit).split_half for state in states
        ]
        value = float(np.mean(halves))
        if math.isfinite(value):
            points.append([float(count), value])
    return points


def warnings(results: Sequence[ShapleyResult]) -> list[str]:
    """Sentences for a reader who would otherwise trust the numbers."""
    values = diagnostics(results)
    found = []
    if values.get("ess_share") is not None and values["ess_share"] < LOWEST_ESS_SHARE:
        found.append(
            f"the importance weights leave an effective sample of {values['ess']:.1f} of {values['permutations']} "
            "permutations; use --rgis-mix, --rgis-temper auto, or --sampler antithetic"
        )
    if values.get("split_half") is not None and values["split_half"] < LOWEST_SPLIT_HALF:
        found.append(
            f"odd and even permutations rank the experts differently (Spearman {values['split_half']:.2f}); "
            "use more permutations"
        )
    return found


def _first(state: ShapleyState, count: int) -> ShapleyState:
    return ShapleyState(
        marginals=state.marginals[:count],
        evaluated=state.evaluated[:count],
        log_weights=state.log_weights[:count],
        stop_log_weights=state.stop_log_weights[:count],
        v_stop=state.v_stop[:count],
        v_full=state.v_full,
        v_empty=state.v_empty,
        passes=state.passes,
    )


def _worst(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return min(known, default=math.nan)


def _number(value: float | np.floating) -> float | None:
    return float(value) if math.isfinite(value) else None
