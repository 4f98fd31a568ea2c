"""Run the calibration tokens through a live model once and collect what its routers and experts do.

Sums are float64 over real tokens; padding is excluded. Per MoE layer with n experts, for token x with top-k set T(x),
gate g = the factor that really multiplies the output, f = expert output:
    count_j = #{x: j in T(x)},  gate_j = sum g_j,  probability_j = sum over *all* x of the router's score of j,
    norm_j = sum ||f_j||, squared_norm_j = sum ||f_j||^2, gated_norm_j = sum g_j ||f_j||  (over x with j in T(x)),
    max_activation_j = largest |entry| of f_j.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from xmac_cli.cli.errors import VerificationError
from xmac_cli.cli.progress import NullProgress, Progress
from xmac_cli.data.calibration import TokenBatch
from xmac_cli.prune_moe.expert_outputs import expert_output
from xmac_cli.prune_moe.families import find_family
from xmac_cli.prune_moe.moe_blocks import MoEModule
from xmac_cli.prune_moe.routing import RoutingCall, masked_routing


@dataclass
class LayerStatistics:
    """Sums of one MoE layer; every array is float64 [n].

    Args:
        entry: the block.
        tokens: real tokens seen.
        gate_mass: sum over tokens of the sum of the chosen gates.
        inputs: [t, d] inputs of the experts, one tensor per forward pass, when they were asked for.
        logits: [t, n] router logits, likewise.
    """

    entry: MoEModule
    count: np.ndarray
    gate: np.ndarray
    probability: np.ndarray
    norm: np.ndarray
    squared_norm: np.ndarray
    gated_norm: np.ndarray
    max_activation: np.ndarray
    tokens: int = 0
    gate_mass: float = 0.0
    inputs: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    @classmethod
    def empty(cls, entry: MoEModule) -> LayerStatistics:
        """No token seen."""
        n = entry.num_experts
        zeros = [np.zeros(n) for _ in range(7)]
        return cls(entry, zeros[0], zeros[1], zeros[2], zeros[3], zeros[4], zeros[5], zeros[6])

    @property
    def frequency(self) -> np.ndarray:
        """Share of tokens whose top-k contains the expert, float64 [n]."""
        return self.count / max(self.tokens, 1)


def calibrate(
    model: nn.Module,
    batch: TokenBatch,
    modules: list[MoEModule],
    *,
    batch_tokens: int = 8192,
    kept: Mapping[str, np.ndarray] | None = None,
    norms: bool = True,
    keep_inputs: bool = False,
    progress: Progress | None = None,
) -> list[LayerStatistics]:
    """Collect the statistics of every MoE layer.

    Args:
        model: in eval mode.
        batch: calibration tokens.
        modules: `moe_modules(model)`.
        batch_tokens: tokens per forward pass.
        kept: masks as in `masked_routing`, to measure a pruned model.
        norms: also compute expert outputs, which costs about one more pass through the experts.
        keep_inputs: keep the experts' inputs and the logits of all tokens.

    Returns:
        One entry per module, in order.

    Raises:
        VerificationError: an activation is not finite.
    """
    statistics = {entry.name: LayerStatistics.empty(entry) for entry in modules}
    current = torch.zeros(0, dtype=torch.bool)

    def observe(call: RoutingCall) -> None:
        _add(statistics[call.module.name], call, current.to(call.index.device), norms, keep_inputs)

    rows = max(1, batch_tokens // batch.input_ids.shape[1])
    progress = progress or NullProgress()
    with (
        torch.inference_mode(),
        masked_routing(model, kept, observe=observe, modules=modules),
        progress.task("calibration pass", total=batch.input_ids.shape[0], unit="sequences") as task,
    ):
        for part in row_chunks(batch.input_ids.shape[0], rows):
            current = batch.attention_mask[part].reshape(-1)
            forward(model, batch.input_ids[part], batch.attention_mask[part], logits=False)
            task.advance(part.stop - part.start)
    return list(statistics.values())


def row_chunks(rows: int, size: int) -> Iterator[slice]:
    """Slices that cover `rows` rows, `size` at a time."""
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def forward(model: nn.Module, input_ids: Tensor, attention_mask: Tensor, *, logits: bool = True) -> Tensor:
    """Logits [B, S, V] of a batch (only the last position when `logits` is False)."""
    device = next(model.parameters()).device
    options: dict[str, object] = {"use_cache": False}
    if not logits and "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = 1
    if not bool(attention_mask.all()):
        options["attention_mask"] = attention_mask.to(device=device, dtype=torch.int64)
    return model(input_ids=input_ids.to(device), **options).logits


def _add(sums: LayerStatistics, call: RoutingCall, real: Tensor, norms: bool, keep_inputs: bool) -> None:
    entry, n = call.module, call.module.num_experts
    hidden, logits = call.hidden[real], call.logits[real]
    # A masked router's logits may be -inf; what is no number can only come from the weights or from overflow.
    _check_finite(entry, "input", bool(torch.isfinite(hidden).all()))
    _check_finite(entry, "router", not bool(torch.isnan(logits).any()))
    index, available = call.index[real], call.available[real]
    gates = call.gates[real].double() * entry.output_scale
    sums.tokens += int(real.sum())
    sums.gate_mass += float(gates.sum())
    flat = index[available]
    sums.count += torch.bincount(flat, minlength=n).cpu().numpy()
    sums.gate += torch.bincount(flat, weights=gates[available], minlength=n).cpu().numpy()
    sums.probability += _score(entry, logits).sum(dim=0).cpu().numpy()
    if norms:
        for expert in torch.unique(flat).tolist():
            _add_norms(sums, entry, hidden, logits, (index == expert) & available, gates, expert)
    if keep_inputs:
        sums.inputs.append(hidden.clone())
        sums.logits.append(logits.clone())


def _add_norms(
    sums: LayerStatistics,
    entry: MoEModule,
    hidden: Tensor,
    logits: Tensor,
    slots: Tensor,
    gates: Tensor,
    expert: int,
) -> None:
    token, slot = slots.nonzero(as_tuple=True)
    output = expert_output(entry, hidden[token], logits[token], expert)
    length = output.double().norm(dim=1)
    _check_finite(entry, f"output of expert {expert}", bool(torch.isfinite(length).all()))
    # Where the gate scaled the input, the output already carries it.
    factor = torch.full_like(length, entry.output_scale) if entry.gate_on_input else gates[token, slot]
    sums.norm[expert] += float(length.sum())
    sums.squared_norm[expert] += float((length**2).sum())
    sums.gated_norm[expert] += float((factor * length).sum())
    sums.max_activation[expert] = max(sums.max_activation[expert], float(output.abs().max()))


def _check_finite(entry: MoEModule, what: str, finite: bool) -> None:
    if not finite:
        raise VerificationError(
            f"{entry.name}: the {what} is not finite on the calibration text, so no score would mean anything",
            "look for broken weights, or compute in --dtype float32",
        )


def _score(entry: MoEModule, logits: Tensor) -> Tensor:
    """The router's score of every expert for every token before top-k, float64 [t, n]."""
    family = find_family(entry.model_type)
    if family is not None and family.routing in ("sigmoid", "topk_sigmoid"):
        return torch.sigmoid(logits.double())
    return torch.softmax(logits.double(), dim=1)
