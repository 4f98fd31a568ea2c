"""Run a live model with some experts absent, and watch what its routers do.

Semantics of V(S), used by scoring, baselines and verification alike (docs/prune-moe-method.md): the router logit of an
absent expert is -inf before softmax or sigmoid; so is its score wherever the router chooses (selection biases, groups);
k' = min(k, survivors); a layer without survivors contributes a routed output of exactly 0 while shared experts still
act. Cutting the experts out of the checkpoint computes the same function.

Mechanism: the router's own code runs under a `TorchFunctionMode` that edits three operations: the linear map that
makes the logits, `topk`, and the `gather` that reads gates at the chosen ids. No routing formula is repeated here, so
a router keeps its precision, its scaling and its quirks. Shapes: B sequences of S tokens, n experts, k chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from xmac_cli.cli.errors import UnsupportedModelError, UsageError
from xmac_cli.prune_moe.moe_blocks import MoEModule, moe_modules

__all__ = ["MoEModule", "RoutingCall", "masked_routing", "moe_modules", "route_logits"]

_TOPK = (torch.topk, torch.Tensor.topk)
_GATHER = (torch.gather, torch.Tensor.gather)


@dataclass(frozen=True)
class RoutingCall:
    """What one MoE block did with the tokens of one forward pass.

    Args:
        module: the block.
        hidden: [B*S, d] input of the experts.
        logits: [B*S, n] router logits of all experts, before anything was masked.
        index: int64 [B*S, k] chosen expert ids.
        gates: [B*S, k] factor with which each chosen expert really acts; 0 where fewer than k experts were available.
        available: bool [B*S, k], False in slots that stayed empty because fewer than k experts were available.
    """

    module: MoEModule
    hidden: Tensor
    logits: Tensor
    index: Tensor
    gates: Tensor
    available: Tensor


@contextmanager
def masked_routing(
    model: nn.Module,
    kept: Mapping[str, np.ndarray | Tensor] | None = None,
    *,
    observe: Callable[[RoutingCall], None] | None = None,
    modules: list[MoEModule] | None = None,
) -> Iterator[None]:
    """Within this context the model computes with the kept experts only.

    Args:
        model: a transformers model; its weights are not touched.
        kept: module name of a MoE block -> bool mask of the experts that stay, [n] for all sequences or [B, n] with
            one coalition per sequence of the batch. Blocks that are not named keep all their experts.
        observe: called once per block and forward pass with what the router did.
        modules: the result of `moe_modules(model)`, to save the search.

    Raises:
        UsageError: an unknown block name, or a mask of the wrong size.
        UnsupportedModelError: see `moe_modules`; also when a router computes its logits in an unknown way.
    """
    blocks = {entry.name: entry for entry in (modules if modules is not None else moe_modules(model))}
    masks = {name: _as_mask(blocks, name, mask) for name, mask in (kept or {}).items()}
    with ExitStack() as undo:
        for name, entry in blocks.items():
            if name in masks or observe is not None:
                _RoutingPatch(entry, masks.get(name), observe).install(undo)
        yield


def route_logits(entry: MoEModule, logits: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
    """Run a router's own code on given logits, without hidden states and without its block.

    Args:
        entry: the block whose router runs; one that returns (logits, gates, ids) and needs no further input.
        logits: [T, n] router logits of all experts.
        present: bool [n].

    Returns:
        (index int64 [T, k], gates float64 [T, k]); the gate is 0 in slots that stayed empty.

    Raises:
        UnsupportedModelError: the router does not have that form.
    """
    patch = _RoutingPatch(entry, present.reshape(1, -1), None)
    patch.trace.replay = logits
    width = getattr(entry.router, "hidden_dim", getattr(entry.router, "in_features", None))
    if width is None or entry.gate_on_input:
        raise UnsupportedModelError(f"the router of {entry.name} ({type(entry.router).__name__}) cannot be replayed")
    blank = torch.zeros(1, dtype=logits.dtype, device=logits.device).expand(logits.shape[0], width)
    with torch.inference_mode(), patch.trace:
        _, gates, index = entry.router.forward(blank)
    return index, gates.double().masked_fill(patch.absent(index), 0)


def _as_mask(blocks: Mapping[str, MoEModule], name: str, mask: np.ndarray | Tensor) -> Tensor:
    if name not in blocks:
        raise UsageError(f"`{name}` is not a MoE block of this model", hint=f"its blocks are {', '.join(blocks)}")
    tensor = torch.as_tensor(mask)
    n = blocks[name].num_experts
    if tensor.dtype != torch.bool or tensor.dim() not in (1, 2) or tensor.shape[-1] != n:
        raise UsageError(
            f"the mask of `{name}` must be bool [{n}] or [sequences, {n}], not {tensor.dtype} {list(tensor.shape)}"
        )
    return tensor.reshape(-1, n)


class _RoutingPatch:
    """Replaces one router's forward and cleans the gates on their way into the experts."""

    def __init__(self, entry: MoEModule, mask: Tensor | None, observe: Callable[[RoutingCall], None] | None) -> None:
        self.entry = entry
        self.mask = mask
        self.observe = observe
        self.trace = _RouterTrace(entry, mask)

    def install(self, undo: ExitStack) -> None:
        router = self.entry.router
        inner = router.forward
        had_own = "forward" in vars(router)

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.trace = _RouterTrace(self.entry, self.mask)
            with self.trace:
                output = inner(*args, **kwargs)
            if self.trace.logits is None:
                raise UnsupportedModelError(
                    f"the router of {self.entry.name} ({type(router).__name__}) does not compute its logits with a "
                    "linear map, so experts cannot be masked"
                )
            if self.entry.gate_on_input:
                self._watch_input_gates(args[0], output[0])
            return output

        def restore() -> None:
            if had_own:
                router.forward = inner
            else:
                del router.forward

        router.forward = forward
        undo.callback(restore)
        if not self.entry.gate_on_input:
            hook = self.entry.experts.register_forward_pre_hook(self._before_experts, with_kwargs=True)
            undo.callback(hook.remove)

    def _watch_input_gates(self, hidden: Tensor, scores: Tensor) -> None:
        if self.observe is None or self.trace.logits is None or self.trace.index is None:
            return
        index = self.trace.index
        available = torch.ones_like(index, dtype=torch.bool)
        if self.trace.unavailable is not None:
            available = ~self.trace.unavailable
        gates = scores.gather(-1, index) * available
        self.observe(RoutingCall(self.entry, hidden, self.trace.logits, index, gates, available))

    def _before_experts(self, experts: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if len(args) != 3 or kwargs:
            raise UnsupportedModelError(f"{self.entry.name} calls its experts in a way that no rule covers")
        hidden, index, gates = args
        available = torch.ones_like(index, dtype=torch.bool)
        if self.mask is not None:
            available = ~self.absent(index)
            gates = gates.masked_fill(~available, 0)
        if self.observe is not None and self.trace.logits is not None:
            rows = hidden.reshape(-1, hidden.shape[-1])
            logits = self.trace.logits.reshape(-1, self.entry.num_experts)
            self.observe(RoutingCall(self.entry, rows, logits, index, gates, available))
        return (hidden, index, gates), kwargs

    def absent(self, index: Tensor) -> Tensor:
        """Which of the chosen slots [T, k] must not act: absent experts, and slots beyond the survivors."""
        present = self.trace.rows(index.shape[0], index.device)
        absent = ~present.gather(1, index)
        if self.trace.unavailable is not None:
            return absent | self.trace.unavailable
        # Routers without a plain top-k fill their slots in order (sparsemixer), and repeat one when none is left.
        slots = torch.arange(index.shape[1], device=index.device)
        return absent | (slots >= present.sum(dim=1, keepdim=True))


class _RouterTrace(TorchFunctionMode):
    """Edits the router's operations while it runs, and remembers its logits and its choice."""

    def __init__(self, entry: MoEModule, mask: Tensor | None) -> None:
        super().__init__()
        self.num_experts = entry.num_experts
        self.mask = mask
        self.logits: Tensor | None = None
        self.index: Tensor | None = None
        self.unavailable: Tensor | None = None
        self.replay: Tensor | None = None

    def rows(self, tokens: int, device: torch.device) -> Tensor:
        """The mask of every token, bool [tokens, n]."""
        if self.mask is None:
            raise RuntimeError("a router without a mask has no masked rows")
        sequences = self.mask.shape[0]
        if tokens % sequences:
            raise UsageError(f"{tokens} tokens cannot be shared by {sequences} coalitions, one per sequence")
        return self.mask.to(device).repeat_interleave(tokens // sequences, dim=0)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _TOPK:
            return self._topk(func, *args, **kwargs)
        output = self.replay if func is F.linear and self.replay is not None else func(*args, **kwargs)
        if func is F.linear and output.shape[-1] == self.num_experts:
            self.logits = output
            if self.mask is not None:
                rows = self.rows(output.numel() // self.num_experts, output.device)
                return output.masked_fill(~rows.view(output.shape), -torch.inf)
        if func in _GATHER and self.unavailable is not None:
            index = args[2] if len(args) > 2 else kwargs.get("index")
            if index is self.index:
                return output.masked_fill(self.unavailable, 0)
        return output

    def _topk(self, func: Any, scores: Tensor, *args: Any, **kwargs: Any) -> Any:
        per_token = scores[0].numel() if scores.dim() > 1 and scores.shape[0] else 0
        if self.mask is None or per_token != self.num_experts:
            chosen = func(scores, *args, **kwargs)
            if scores.shape[-1] == self.num_experts:
                self.index = chosen[1]
            return chosen
        present = self.rows(scores.shape[0], scores.device).view(scores.shape)
        masked = scores.masked_fill(~present, -torch.inf)
        index = func(masked, *args, **kwargs)[1]
        values = scores.gather(-1, index)
        missing = masked.gather(-1, index) == -torch.inf
        if scores.dim() == 2:
            self.index, self.unavailable = index, missing
        else:
            # Inside a group of a group-limited router: the k' = min(k, survivors) rule again. A lone survivor counts
            # alone, a group without survivors can never be chosen before one that has some.
            empty = ~present.any(dim=-1, keepdim=True)
            values = values.masked_fill(missing, 0).masked_fill(empty, -torch.inf)
        return torch.return_types.topk((values, index))
