"""N-gram yardsticks: probabilities that sum to one and equal the formula counted by hand."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from xmac_cli.models.ngram import BigramModel

ROWS = np.array([[0, 1, 2, 1, 2], [2, 2, 1, 0, 1]], dtype=np.int64)
VOCABULARY = 4


def test_unigram_is_add_one_smoothed() -> None:
    model = BigramModel(ROWS, VOCABULARY)
    counts = Counter(ROWS.flatten().tolist())
    for token in range(VOCABULARY):
        expected = (counts[token] + 1) / (ROWS.size + VOCABULARY)
        assert np.exp(-model.unigram_nll(np.array([3, token])))[0] == pytest.approx(expected, rel=1e-12)


def test_bigram_is_the_witten_bell_formula_counted_by_hand() -> None:
    model = BigramModel(ROWS, VOCABULARY)
    pairs = Counter((int(a), int(b)) for row in ROWS for a, b in itertools.pairwise(row))
    unigrams = Counter(ROWS.flatten().tolist())
    for history in range(VOCABULARY):
        after = {b: n for (a, b), n in pairs.items() if a == history}
        total, kinds = sum(after.values()), len(after)
        for token in range(VOCABULARY):
            base = (unigrams[token] + 1) / (ROWS.size + VOCABULARY)
            expected = (after.get(token, 0) + kinds * base) / (total + kinds) if total else base
            got = np.exp(-model.bigram_nll(np.array([history, token])))[0]
            assert got == pytest.approx(expected, rel=1e-12)


def test_probabilities_sum_to_one_for_every_history() -> None:
    rows = np.random.default_rng(0).integers(0, 30, (20, 40))
    model = BigramModel(rows, 40)
    for history in range(40):
        nll = np.concatenate([model.bigram_nll(np.array([history, token])) for token in range(40)])
        assert np.exp(-nll).sum() == pytest.approx(1.0, rel=1e-12)


def test_pairs_do_not_reach_over_row_ends() -> None:
    split = BigramModel(np.array([[0, 1], [2, 3]]), 4)
    joined = BigramModel(np.array([[0, 1, 2, 3]]), 4)
    pair = np.array([1, 2])
    assert split.bigram_nll(pair)[0] > joined.bigram_nll(pair)[0]
