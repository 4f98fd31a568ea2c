"""Value functions of coalitions of experts that need the model's own forward pass.

    ppl: V(S) = 1 / PPL = exp(-mean NLL)    nll: V(S) = -mean NLL    kl: V(S) = -mean KL(full || S)
over the next-token predictions at real tokens of the calibration batch, float64 sums. Several coalitions share one
forward pass: the batch is repeated and every sequence carries its own router mask. In a layer game all other layers are
intact and only layers from that one on are computed. Shapes: C coalitions, B sequences of S tokens, N players.
Source: Huang et al., NeurIPS 2025, section 3 (ppl); the rest is ours.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from xmac_cli.data.calibration import TokenBatch
from xmac_cli.prune_moe.calibration_pass import forward, row_chunks
from xmac_cli.prune_moe.gates import gate_formula
from xmac_cli.prune_moe.layer_suffix import LayerSuffix
from xmac_cli.prune_moe.moe_blocks import MoEModule
from xmac_cli.prune_moe.routing import RoutingCall, masked_routing

ModelValue = Literal["ppl", "nll", "kl"]
BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]

# Log-probabilities of the full model are kept for `kl` up to this size, and computed again beyond it.
REFERENCE_BYTES = 2 << 30


class ExpertGame(Protocol):
    """A value for every coalition of experts."""

    num_players: int

    def values(self, masks: BoolArray) -> FloatArray:
        """V of masks [C, N], float64 [C]."""
        ...


@dataclass(frozen=True)
class _Losses:
    """Sums per row of one forward pass: loss float64 [R]; predicted tokens int64 [R]."""

    loss: Tensor
    count: Tensor


class ModelGame:
    """A game whose value is what the model predicts.

    Args:
        model: in eval mode.
        batch: calibration tokens.
        modules: `moe_modules(model)`.
        value: see the module docstring.
        layer: the block whose experts play while all others are intact; None = experts of all blocks play.
        batch_tokens: tokens per forward pass, over all coalitions in it.
        null_moves: remember which experts were used, for `inactive`.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: TokenBatch,
        modules: list[MoEModule],
        *,
        value: ModelValue = "ppl",
        layer: MoEModule | None = None,
        batch_tokens: int = 8192,
        null_moves: bool = True,
    ) -> None:
        self.model = model
        self.batch = batch
        self.modules = modules
        self.value = value
        self.players = [layer] if layer is not None else modules
        self.bounds = np.concatenate([[0], np.cumsum([entry.num_experts for entry in self.players])]).astype(int)
        self.num_players = int(self.bounds[-1])
        self._rows = max(1, batch_tokens // batch.input_ids.shape[1])
        self._suffix = LayerSuffix(model, layer) if layer is not None else None
        self._null_moves = np.concatenate(
            [np.full(entry.num_experts, null_moves and _null_move_is_exact(entry)) for entry in self.players]
        )
        self._used: dict[bytes, BoolArray] = {}
        self._reference: list[Tensor] | None = None
        if self._suffix is not None or value == "kl":
            self._prepare()

    @property
    def has_null_moves(self) -> bool:
        """Whether `inactive` can ever name an expert."""
        return bool(self._null_moves.any())

    def values(self, masks: BoolArray) -> FloatArray:
        """V of masks [C, N], float64 [C]."""
        sequences = self.batch.input_ids.shape[0]
        loss = torch.zeros(masks.shape[0], dtype=torch.float64)
        count = torch.zeros(masks.shape[0], dtype=torch.int64)
        full = np.ones(self.num_players, dtype=bool).tobytes()
        self._used = {key: used for key, used in self._used.items() if key == full}
        used = np.zeros(masks.shape, dtype=bool)
        for part in row_chunks(masks.shape[0] * sequences, self._rows):
            pairs = np.arange(part.start, part.stop)
            coalitions, rows = pairs // sequences, pairs % sequences
            losses = self._forward(masks[coalitions], torch.from_numpy(rows), coalitions, used)
            where = torch.from_numpy(coalitions)
            loss.index_add_(0, where, losses.loss)
            count.index_add_(0, where, losses.count)
        self._used |= {mask.tobytes(): row for mask, row in zip(masks, used)}
        mean = (loss / count).numpy()
        return np.exp(-mean) if self.value == "ppl" else -mean

    def inactive(self, mask: BoolArray) -> BoolArray:
        """Experts that no token used when this coalition was last evaluated, where that makes a removal exact."""
        used = self._used.get(mask.tobytes())
        return np.zeros_like(mask) if used is None else self._null_moves & ~used

    def _forward(self, masks: BoolArray, rows: Tensor, coalitions: NDArray[np.int64], used: BoolArray) -> _Losses:
        kept = {entry.name: masks[:, self.bounds[i] : self.bounds[i + 1]] for i, entry in enumerate(self.players)}
        offset = {entry.name: int(self.bounds[i]) for i, entry in enumerate(self.players)}

        def observe(call: RoutingCall) -> None:
            if call.module.name in offset:
                _mark_used(call, coalitions, used, offset[call.module.name])

        replay = self._suffix.replay(rows) if self._suffix is not None else nullcontext()
        watch = observe if self.has_null_moves else None
        with torch.inference_mode(), masked_routing(self.model, kept, observe=watch, modules=self.players), replay:
            attention = self.batch.attention_mask[rows]
            logits = forward(self.model, self.batch.input_ids[rows], attention)
        return self._losses(logits, rows)

    def _losses(self, logits: Tensor, rows: Tensor) -> _Losses:
        loss, count = [], []
        for position, row in enumerate(rows.tolist()):
            real = self.batch.attention_mask[row]
            predicts = (real[1:] & real[:-1]).to(logits.device)
            ours = logits[position, :-1][predicts]
            if self.value == "kl":
                reference = self._full_log_probabilities(row)
                terms = F.kl_div(F.log_softmax(ours.float(), dim=-1), reference, log_target=True, reduction="none")
                loss.append(terms.double().sum().cpu())
            else:
                targets = self.batch.input_ids[row, 1:].to(logits.device)[predicts]
                loss.append(F.cross_entropy(ours.float(), targets, reduction="none").double().sum().cpu())
            count.append(int(predicts.sum()))
        return _Losses(torch.stack(loss), torch.tensor(count))

    def _full_log_probabilities(self, row: int) -> Tensor:
        """log p of the full model at the predicting positions of one sequence, float32 [S', V]."""
        if self._reference is not None:
            return self._reference[row]
        real = self.batch.attention_mask[row]
        with torch.inference_mode():
            logits = forward(self.model, self.batch.input_ids[row : row + 1], real[None])[0, :-1]
        return F.log_softmax(logits[(real[1:] & real[:-1]).to(logits.device)].float(), dim=-1)

    def _prepare(self) -> None:
        recording = self._suffix.record() if self._suffix is not None else nullcontext()
        reference: list[Tensor] = []
        with torch.inference_mode(), recording:
            for part in row_chunks(self.batch.input_ids.shape[0], self._rows):
                attention = self.batch.attention_mask[part]
                logits = forward(self.model, self.batch.input_ids[part], attention, logits=self.value == "kl")
                bytes_needed = self.batch.input_ids.numel() * logits.shape[-1] * 4
                if self.value == "kl" and bytes_needed <= REFERENCE_BYTES:
                    reference += _predicting_log_probabilities(logits, attention)
        self._reference = reference or None


def _predicting_log_probabilities(logits: Tensor, attention: Tensor) -> list[Tensor]:
    predicts = (attention[:, 1:] & attention[:, :-1]).to(logits.device)
    return [F.log_softmax(row[:-1][keep].float(), dim=-1) for row, keep in zip(logits, predicts)]


def _null_move_is_exact(entry: MoEModule) -> bool:
    formula = gate_formula(entry)
    return formula is not None and formula.null_move_is_exact


def _mark_used(call: RoutingCall, coalitions: NDArray[np.int64], used: BoolArray, offset: int) -> None:
    """Note the experts in any token's top-k; padding counts too, which can only make the shortcut rarer."""
    n, rows = call.module.num_experts, coalitions.shape[0]
    hit = torch.zeros(call.index.shape[0], n, dtype=torch.bool, device=call.index.device)
    hit.scatter_(1, call.index, call.available)
    by_row = hit.view(rows, -1, n).any(dim=1).cpu().numpy()
    for coalition, experts in zip(coalitions, by_row):
        used[coalition, offset : offset + n] |= experts
