"""Outputs of single routed experts, computed by the live model's own expert code.

Asking for expert e alone is asking the experts module to route every token to e with gate 1, so fused, quantised and
biased experts need no code here. Where the gate scales an expert's *input* (Llama 4), the output at the token's own
gate is what adds up, and gates count as 1 afterwards. Shapes: t tokens, n experts, d model channels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xmac_cli.prune_moe.moe_blocks import MoEModule


def expert_output(entry: MoEModule, hidden: Tensor, logits: Tensor, expert: int) -> Tensor:
    """What one expert would add to the residual stream with gate 1.

    Args:
        entry: the MoE block.
        hidden: [t, d] input of the experts.
        logits: [t, n] router logits; only used where the gate scales the input.
        expert: its index.

    Returns:
        [t, d], before the block's constant output factor.
    """
    if entry.gate_on_input:
        return all_expert_outputs(entry, hidden, logits)[:, expert]
    index = torch.full((hidden.shape[0], 1), expert, dtype=torch.int64, device=hidden.device)
    gates = torch.ones((hidden.shape[0], 1), dtype=hidden.dtype, device=hidden.device)
    # `.forward`, because this may run inside a hook of the experts module.
    output = entry.experts.forward(hidden, index, gates).reshape(hidden.shape[0], -1)
    return _project(entry.output_projection, output)


def all_expert_outputs(entry: MoEModule, hidden: Tensor, logits: Tensor) -> Tensor:
    """Outputs of all n experts for every token, [t, n, d]; arguments as in `expert_output`."""
    n = entry.num_experts
    if entry.gate_on_input:
        gates = torch.sigmoid(logits.float()).to(hidden.dtype)
        scaled = hidden.repeat(n, 1) * gates.T.reshape(-1, 1)
        return entry.experts.forward(scaled).reshape(n, hidden.shape[0], -1).transpose(0, 1)
    return torch.stack([expert_output(entry, hidden, logits, expert) for expert in range(n)], dim=1)


def _project(projection: nn.Module | None, output: Tensor) -> Tensor:
    if projection is None or isinstance(projection, nn.Identity):
        return output
    # A bias of the projection belongs to the sum, not to one expert; it cancels in every difference.
    return F.linear(output, projection.weight)  # type: ignore[arg-type]
