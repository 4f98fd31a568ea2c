"""The public operation and its input table; see the package docstring for the mathematics."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from xmac_kernels import dispatch

Denominator = Literal["topk", "survivors", "none"]
MAX_TRITON_EXPERTS = 1024
MAX_TRITON_TOP_K = 16


@dataclass(frozen=True)
class CoalitionTable:
    """Everything about T tokens that a coalition's residual depends on.

    Args:
        choice: [T, n] score by which the router ranks experts; ties go to the lower index.
        weight: [T, n] non-negative numerators of the gates: exp(logit) or sigmoid(logit).
        gram: float32 or float64 [T, n, n] inner products of expert outputs.
        top_k: k; with fewer than k survivors, all of them act.
        denominator: what gates are divided by: the sum of `weight` over the chosen experts ("topk"), over all survivors
            ("survivors", softmax without renormalisation), or nothing ("none").
        scale: constant factor on every gate.
        epsilon: added to the denominator.

    Raises:
        ValueError: shapes do not fit together.
    """

    choice: Tensor
    weight: Tensor
    gram: Tensor
    top_k: int
    denominator: Denominator
    scale: float = 1.0
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        tokens, n = self.choice.shape
        if self.weight.shape != (tokens, n) or self.gram.shape != (tokens, n, n):
            raise ValueError(
                f"choice {list(self.choice.shape)}, weight {list(self.weight.shape)} and gram {list(self.gram.shape)} "
                "must be [T, n], [T, n] and [T, n, n]"
            )
        if not 1 <= self.top_k <= n:
            raise ValueError(f"top_k must lie in 1..{n}, not {self.top_k}")
        if self.denominator not in ("topk", "survivors", "none"):
            raise ValueError(f"unknown denominator '{self.denominator}'")

    @property
    def tokens(self) -> int:
        """T."""
        return int(self.choice.shape[0])

    @property
    def num_experts(self) -> int:
        """n."""
        return int(self.choice.shape[1])

    @cached_property
    def order(self) -> Tensor:
        """int16 [T, n], experts of each token from best to worst choice."""
        return torch.argsort(self.choice, dim=1, descending=True, stable=True).to(torch.int16).contiguous()

    @cached_property
    def ordered_weight(self) -> Tensor:
        """`weight` in the order of `order`, [T, n]."""
        return self.weight.gather(1, self.order.long()).contiguous()

    @cached_property
    def full_gates(self) -> Tensor:
        """float64 [T, k], gates of the full model; column s belongs to expert `order[:, s]`."""
        chosen = self.ordered_weight[:, : self.top_k].double()
        if self.denominator == "none":
            return self.scale * chosen
        summed = chosen if self.denominator == "topk" else self.weight.double()
        total = summed.sum(dim=1, keepdim=True) + self.epsilon
        return torch.where(total > 0, self.scale * chosen / total, 0.0).contiguous()


def coalition_residual(table: CoalitionTable, masks: Tensor, *, backend: str | None = None) -> Tensor:
    """Squared error of the layer's output under each coalition, summed over tokens.

    Args:
        table: the tokens.
        masks: bool [B, n], True where the expert is present.
        backend: "triton", "numba" or "torch"; None chooses, see `xmac_kernels.dispatch`.

    Returns:
        float64 [B] on the device of the table. A row does not depend on the other rows.

    Raises:
        ValueError: a mask of the wrong shape, or a backend that cannot do this.
    """
    if masks.dim() != 2 or masks.shape[1] != table.num_experts or masks.dtype != torch.bool:
        raise ValueError(f"masks must be bool [B, {table.num_experts}], not {masks.dtype} {list(masks.shape)}")
    device = table.gram.device
    masks = masks.to(device)
    if not masks.shape[0] or not table.tokens:
        return torch.zeros(masks.shape[0], dtype=torch.float64, device=device)

    def run_torch() -> Tensor:
        from xmac_kernels.coalition.torch_ops import residual

        return residual(table, masks)

    def run_numba() -> Tensor:
        from xmac_kernels.coalition.numba_cpu import residual

        return residual(table, masks)

    def run_triton() -> Tensor:
        from xmac_kernels.coalition.triton_gpu import residual

        return residual(table, masks)

    unfit = {}
    if table.num_experts > MAX_TRITON_EXPERTS or table.top_k > MAX_TRITON_TOP_K:
        unfit["triton"] = f"it takes at most {MAX_TRITON_EXPERTS} experts and top-{MAX_TRITON_TOP_K}"
    if device.type != "cpu":
        unfit["numba"] = f"it needs CPU tensors, these are on {device.type}"
    return dispatch.run(
        "coalition_residual",
        {"triton": run_triton, "numba": run_numba, "torch": run_torch},
        device_type=device.type,
        backend=backend,
        unfit=unfit,
    )
