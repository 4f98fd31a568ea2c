"""The cases of the interpreter tests on a real device; skipped without one."""

from __future__ import annotations

import pytest
import torch
from support.coalition_cases import DENOMINATORS, SHAPES, random_masks, random_table, relative_error
from xmac_kernels.coalition import CoalitionTable, coalition_residual
from xmac_kernels.coalition.reference import residual as reference_residual

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def on_device(table: CoalitionTable) -> CoalitionTable:
    return CoalitionTable(
        table.choice.cuda(),
        table.weight.cuda(),
        table.gram.cuda(),
        table.top_k,
        table.denominator,
        table.scale,
        table.epsilon,
    )


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("denominator", DENOMINATORS)
@pytest.mark.parametrize(("tokens", "n", "k"), SHAPES)
def test_device_backends_follow_the_definition(tokens: int, n: int, k: int, denominator: str, backend: str):
    table, masks = random_table(tokens, n, k, denominator), random_masks(n)
    got = coalition_residual(on_device(table), masks, backend=backend)
    assert relative_error(got, reference_residual(table, masks)) < 1e-6


def test_the_kernel_stays_within_four_times_the_bound_of_its_bytes():
    tokens, n, k, coalitions = 16_384, 64, 8, 64
    table = on_device(random_table(tokens, n, k, "topk"))
    masks = random_masks(n, count=coalitions).cuda()
    for _ in range(3):
        coalition_residual(table, masks)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        coalition_residual(table, masks)
    end.record()
    torch.cuda.synchronize()
    milliseconds = start.elapsed_time(end) / 10
    # Every coalition gathers up to (2k)^2 sectors of 32 bytes per token, mostly from L2; 2 TB/s is a floor for that.
    bound = tokens * coalitions * (2 * k) ** 2 * 32 / 2e12 * 1e3
    print(f"coalition_residual: {milliseconds:.3f} ms, bound {bound:.3f} ms")
    assert milliseconds < 4 * bound
