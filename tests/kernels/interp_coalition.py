"""The Triton kernel of coalition_residual in the interpreter. Run by test_coalition_interp.py, in its own process.

TRITON_INTERPRET=1 python -m pytest tests/kernels/interp_coalition.py
"""

from __future__ import annotations

import os

import pytest
import torch
from support.coalition_cases import DENOMINATORS, SHAPES, random_masks, random_table, relative_error
from xmac_kernels.coalition import CoalitionTable, coalition_residual
from xmac_kernels.coalition.reference import residual as reference_residual

pytestmark = [
    pytest.mark.kernels_interp,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 from the start"),
]


@pytest.mark.parametrize("denominator", DENOMINATORS)
@pytest.mark.parametrize(("tokens", "n", "k"), SHAPES)
def test_the_kernel_follows_the_definition(tokens: int, n: int, k: int, denominator: str):
    table, masks = random_table(tokens, n, k, denominator), random_masks(n, count=5)
    got = coalition_residual(table, masks, backend="triton")
    assert relative_error(got, reference_residual(table, masks)) < 1e-6


def test_kernel_and_cpu_choose_the_same_experts_when_scores_tie():
    table, masks = random_table(50, 9, 3, "topk", ties=True), random_masks(9)
    got = coalition_residual(table, masks, backend="triton")
    assert relative_error(got, coalition_residual(table, masks, backend="numba")) < 1e-6


def test_all_scores_equal():
    base, masks = random_table(20, 8, 2, "topk"), random_masks(8)
    table = CoalitionTable(torch.zeros(20, 8), torch.ones(20, 8), base.gram, 2, "topk")
    got = coalition_residual(table, masks, backend="triton")
    assert relative_error(got, reference_residual(table, masks)) < 1e-6


@pytest.mark.parametrize("denominator", ["topk", "none"])
def test_untouched_tokens_lose_exactly_nothing(denominator: str):
    table = random_table(30, 8, 2, denominator)
    assert coalition_residual(table, torch.ones(1, 8, dtype=torch.bool), backend="triton").item() == 0.0


def test_two_runs_give_the_same_bytes():
    table, masks = random_table(70, 8, 2, "topk"), random_masks(8)
    first = coalition_residual(table, masks, backend="triton")
    assert torch.equal(first, coalition_residual(table, masks, backend="triton"))
