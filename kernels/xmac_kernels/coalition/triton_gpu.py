"""Launches the Triton kernel of coalition_residual (kernel.py) on CUDA tensors, or in the interpreter."""

from __future__ import annotations

from pathlib import Path

import torch
import triton
from torch import Tensor

from xmac_kernels.coalition.kernel import coalition_residual_kernel
from xmac_kernels.coalition.op import CoalitionTable
from xmac_kernels.launch import launch_config

LAUNCH_TABLE = Path(__file__).with_name("launch.json")
MODES = {"topk": 0, "survivors": 1, "none": 2}
_DEFAULT_ARCH = 80


def residual(table: CoalitionTable, masks: Tensor) -> Tensor:
    """float64 [B], see `coalition_residual`."""
    device = table.gram.device
    arch = _DEFAULT_ARCH
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        arch = 10 * major + minor
    config = launch_config(LAUNCH_TABLE, arch, table.num_experts, table.top_k)
    blocks = triton.cdiv(table.tokens, config.block_tokens)
    out = torch.empty((blocks, masks.shape[0]), dtype=torch.float64, device=device)
    coalition_residual_kernel[(masks.shape[0], blocks)](
        table.order,
        table.ordered_weight.float(),
        table.gram.float().contiguous(),
        table.full_gates.float(),
        masks.to(torch.int8).contiguous(),
        out,
        table.tokens,
        table.num_experts,
        masks.shape[0],
        table.scale,
        table.epsilon,
        k=table.top_k,
        MODE=MODES[table.denominator],
        NP=triton.next_power_of_2(table.num_experts),
        KP=triton.next_power_of_2(table.top_k),
        BLOCK_T=config.block_tokens,
        num_warps=config.num_warps,
    )
    return out.sum(dim=0)
