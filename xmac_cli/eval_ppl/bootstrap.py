"""Bootstrap interval of a token-weighted mean over documents (Efron and Tibshirani, 1993, chapter 13: percentiles).

Tokens of one document are not independent, so whole documents are resampled; with several domains, within each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def bootstrap_interval(
    strata: Sequence[tuple[np.ndarray, np.ndarray]], *, samples: int, seed: int, level: float = 0.95
) -> tuple[float, float] | None:
    """Percentile interval of sum(nll) / sum(tokens).

    Args:
        strata: per domain, nll sums [D] in nats and token counts [D] of its documents.
        samples: bootstrap replicates.
        seed: of the resampling.
        level: probability the interval should cover.

    Returns:
        (low, high) in nats per token, or None when no domain has two documents.
    """
    if samples < 1 or all(len(tokens) < 2 for _, tokens in strata):
        return None
    draw = np.random.default_rng(seed)
    loss = np.zeros(samples)
    count = np.zeros(samples)
    for nll, tokens in strata:
        # Row r holds how often each document occurs in replicate r.
        times = draw.multinomial(len(tokens), np.full(len(tokens), 1 / len(tokens)), size=samples)
        loss += times @ nll
        count += times @ tokens
    low, high = np.quantile(loss / count, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
