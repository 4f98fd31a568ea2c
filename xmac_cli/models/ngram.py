"""Unigram and bigram models of token ids, the yardsticks of the demo models.

Unigram: add-one (Laplace) smoothing. Bigram: Witten-Bell interpolation with the unigram (Chen and Goodman, "An
Empirical Study of Smoothing Techniques for Language Modeling", 1996, section 2.4), which needs no tuning:
p(w | h) = (c(h, w) + T(h) p(w)) / (c(h) + T(h)), where T(h) is the number of different tokens seen after h.
"""

from __future__ import annotations

import numpy as np


class BigramModel:
    """Counts of a token stream.

    Args:
        rows: int64 [R, S], rows of consecutive tokens; no pair reaches from one row into the next.
        vocabulary: number of token ids V.
    """

    def __init__(self, rows: np.ndarray, vocabulary: int) -> None:
        counts = np.bincount(rows.reshape(-1), minlength=vocabulary)
        self._unigram = (counts + 1) / (counts.sum() + vocabulary)
        self._vocabulary = vocabulary
        pairs = rows[:, :-1].astype(np.int64) * vocabulary + rows[:, 1:]
        self._pairs, self._pair_counts = np.unique(pairs, return_counts=True)
        self._history = np.bincount(rows[:, :-1].reshape(-1), minlength=vocabulary)
        self._continuations = np.bincount(self._pairs // vocabulary, minlength=vocabulary)

    def unigram_nll(self, ids: np.ndarray) -> np.ndarray:
        """Negative log-likelihood in nats of tokens 1 ... T-1, float64 [T - 1]."""
        return -np.log(self._unigram[ids[1:]])

    def bigram_nll(self, ids: np.ndarray) -> np.ndarray:
        """Negative log-likelihood in nats of tokens 1 ... T-1 given the one before, float64 [T - 1]."""
        history, token = ids[:-1].astype(np.int64), ids[1:].astype(np.int64)
        unigram = self._unigram[token]
        wanted = history * self._vocabulary + token
        place = np.minimum(np.searchsorted(self._pairs, wanted), len(self._pairs) - 1)
        count = np.where(self._pairs[place] == wanted, self._pair_counts[place], 0)
        seen, kinds = self._history[history], self._continuations[history]
        weight = np.maximum(seen + kinds, 1)
        interpolated = (count + kinds * unigram) / weight
        return -np.log(np.where(seen > 0, interpolated, unigram))
