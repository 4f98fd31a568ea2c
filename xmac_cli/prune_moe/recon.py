"""The reconstruction game: how well the routed outputs of the layers survive when only some experts do.

v_l(S) = 1 - sum_t ||Y_S(t) - Y_N(t)||^2 / sum_t ||Y_N(t)||^2, Y = routed output of layer l on the full model's
activations; v(N) = 1, v(no expert) = 0. The global game is the same formula on the outputs of all layers side by side,
V(S) = 1 - sum_l residual_l(S) / sum_l energy_l, so that a layer weighs as much as it adds to the residual stream. It is
a sum of games with disjoint players: its Shapley values are those of the layer games times energy_l / sum of energies.
Per token only the Gram matrix of the expert outputs is needed; a coalition then costs O(k^2) a token
(xmac_kernels.coalition) instead of a forward pass.
Shapes: T tokens, n experts, B coalitions, N = sum of n players. Source: ours (docs/prune-moe-method.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from xmac_kernels.coalition import CoalitionTable, coalition_residual
from xmac_kernels.dispatch import ENVIRONMENT, BackendError

from xmac_cli.cli.errors import UnsupportedModelError, UsageError
from xmac_cli.prune_moe.calibration_pass import LayerStatistics, row_chunks
from xmac_cli.prune_moe.expert_outputs import all_expert_outputs
from xmac_cli.prune_moe.gates import GateFormula, gate_formula, masked_gates, ranked_gates
from xmac_cli.prune_moe.moe_blocks import MoEModule
from xmac_cli.prune_moe.routing import route_logits

BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]

# Gram matrices of one layer that are kept in memory, in bytes.
TABLE_BYTES = 4 << 30
# Share of the gates that a formula may give to other experts than the router did: ties and rounding in bfloat16.
FORMULA_TOLERANCE = 0.02
# Expert outputs that exist at one time, in bytes.
_OUTPUT_BYTES = 256 << 20


@dataclass(frozen=True)
class _GramChunk:
    """Tokens of one layer: logits [t, n] and Gram matrices float32 [t, n, n]; the kernel's table where one exists."""

    logits: Tensor
    gram: Tensor
    table: CoalitionTable | None


class ReconLayer:
    """Residuals of one MoE layer under any coalition of its experts.

    Args:
        statistics: of the layer, with the experts' inputs kept.
        backend: of `coalition_residual`, or None.
        table_bytes: Gram matrices beyond this are rebuilt for every call instead of kept.
    """

    def __init__(
        self, statistics: LayerStatistics, *, backend: str | None = None, table_bytes: int = TABLE_BYTES
    ) -> None:
        self.entry = statistics.entry
        self.backend = backend
        self._hidden = torch.cat(statistics.inputs)
        self._logits = torch.cat(statistics.logits)
        self._formula = _checked_formula(statistics, self._logits)
        self._keep = self._hidden.shape[0] * self.entry.num_experts**2 * 4 <= table_bytes
        self._chunks: list[_GramChunk] | None = None
        self._energy: float | None = None
        self.evaluations = 0

    @property
    def tokens(self) -> int:
        """T."""
        return int(self._hidden.shape[0])

    @property
    def energy(self) -> float:
        """sum_t ||Y_N||^2: what is lost when no expert is left."""
        if self._energy is None:
            self.residuals(np.zeros((0, self.entry.num_experts), dtype=bool))
        return self._energy or 0.0

    def residuals(self, masks: BoolArray) -> FloatArray:
        """sum_t ||Y_S - Y_N||^2 of every coalition masks [B, n], float64 [B]."""
        n = self.entry.num_experts
        asked = torch.from_numpy(np.concatenate([np.zeros((1, n), dtype=bool), masks]))
        total = np.zeros(asked.shape[0])
        for chunk in self._gram_chunks():
            total += self._chunk_residuals(chunk, asked).cpu().numpy()
        self._energy = float(total[0])
        self.evaluations += masks.shape[0]
        return total[1:]

    def values(self, masks: BoolArray) -> FloatArray:
        """v(S) of every coalition masks [B, n], float64 [B]."""
        return _share_kept(self.residuals(masks), self.energy)

    def release(self) -> None:
        """Forget the Gram matrices; the next call builds them again."""
        self._chunks = None

    def _gram_chunks(self) -> Sequence[_GramChunk]:
        if self._chunks is not None:
            return self._chunks
        n, width = self.entry.num_experts, self._hidden.shape[1]
        size = max(1, _OUTPUT_BYTES // (n * max(width, n) * 8))
        parts = row_chunks(self.tokens, size)
        if not self._keep:
            return _Lazily(lambda: (self._build(part) for part in row_chunks(self.tokens, size)))
        self._chunks = [self._build(part) for part in parts]
        return self._chunks

    def _build(self, part: slice) -> _GramChunk:
        hidden, logits = self._hidden[part], self._logits[part]
        with torch.inference_mode():
            outputs = all_expert_outputs(self.entry, hidden, logits)
            # A float64 product on the CPU; GPUs pay too much for it, and TF32 stays off by default.
            outputs = outputs.double() if outputs.device.type == "cpu" else outputs.float()
            gram = torch.bmm(outputs, outputs.mT)
            gram = ((gram + gram.mT) / 2).float()
        ranked = ranked_gates(self._formula, logits) if self._formula is not None else None
        table = None
        if ranked is not None and self._formula is not None:
            formula = self._formula
            table = CoalitionTable(
                ranked.choice, ranked.weight, gram, formula.top_k, formula.denominator, formula.scale, formula.epsilon
            )
        return _GramChunk(logits, gram, table)

    def _chunk_residuals(self, chunk: _GramChunk, masks: Tensor) -> Tensor:
        if chunk.table is not None:
            try:
                return coalition_residual(chunk.table, masks, backend=self.backend)
            except BackendError as error:
                raise UsageError(str(error), f"the environment variable {ENVIRONMENT} chooses it") from error
        full = self._dense_gates(chunk.logits, torch.ones_like(masks[0]))
        gram = chunk.gram.double()
        values = []
        for mask in masks:
            difference = self._dense_gates(chunk.logits, mask) - full
            values.append((torch.bmm(gram, difference[:, :, None])[:, :, 0] * difference).sum())
        return torch.stack(values)

    def _dense_gates(self, logits: Tensor, mask: Tensor) -> Tensor:
        index, gates = layer_gates(self.entry, self._formula, logits, mask.to(logits.device))
        dense = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
        return dense.scatter_add_(1, index, gates)


def _checked_formula(statistics: LayerStatistics, logits: Tensor) -> GateFormula | None:
    """The formula of the router, after it has reproduced what the router did on the calibration tokens.

    Raises:
        UnsupportedModelError: it does not, so the router is not what its family's row says.
    """
    entry, formula = statistics.entry, gate_formula(statistics.entry)
    if formula is None:
        return None
    index, gates = masked_gates(formula, logits, torch.ones(entry.num_experts, dtype=torch.bool, device=logits.device))
    seen = statistics.count if formula.score == "one" else statistics.gate / entry.output_scale
    ours = torch.bincount(index.flatten(), weights=gates.flatten(), minlength=entry.num_experts).cpu().numpy()
    deviation = float(np.abs(ours - seen).sum() / max(np.abs(seen).sum(), 1e-30))
    if deviation > FORMULA_TOLERANCE:
        raise UnsupportedModelError(
            f"the router of {entry.name} ({type(entry.router).__name__}) does not follow the gate formula of its "
            f"family, gates differ by {deviation:.1%}",
            hint="use --value ppl, which runs the router itself",
        )
    return formula


def _share_kept(residuals: FloatArray, energy: float) -> FloatArray:
    """1 - residual / energy; experts that put out nothing lose nothing."""
    return 1.0 - residuals / energy if energy > 0 else np.ones(residuals.shape)


class _Lazily(Sequence):
    """Chunks that are built while they are looked at, for layers whose Gram matrices do not fit."""

    def __init__(self, build: Callable) -> None:
        self._build = build

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._build())

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return list(self._build())[index]

    def __len__(self) -> int:
        return sum(1 for _ in self._build())


def layer_gates(
    entry: MoEModule, formula: GateFormula | None, logits: Tensor, present: Tensor
) -> tuple[Tensor, Tensor]:
    """(index [T, k], gates float64 [T, k]) under a coalition: by formula, or by the router's own code without one."""
    if formula is not None:
        return masked_gates(formula, logits, present)
    return route_logits(entry, logits, present)


class ReconGame:
    """The global reconstruction game over the experts of several layers, with a memory of layer coalitions.

    A removal changes one layer, so a step of a walk costs one layer coalition; `prefetch` evaluates everything that a
    list of permutations needs layer by layer, holding the Gram matrices of one layer at a time.
    """

    def __init__(self, layers: Sequence[ReconLayer]) -> None:
        self.layers = list(layers)
        sizes = [layer.entry.num_experts for layer in self.layers]
        self.bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
        self.num_players = int(self.bounds[-1])
        self._memory: list[dict[bytes, float]] = [{} for _ in self.layers]

    def values(self, masks: BoolArray) -> FloatArray:
        """V of every coalition masks [B, N], float64 [B]."""
        total = np.zeros(masks.shape[0])
        for position in range(len(self.layers)):
            part = np.ascontiguousarray(masks[:, self.bounds[position] : self.bounds[position + 1]])
            total += self._residuals(position, part)
        return _share_kept(total, sum(layer.energy for layer in self.layers))

    def _residuals(self, position: int, masks: BoolArray) -> FloatArray:
        memory = self._memory[position]
        keys = [row.tobytes() for row in masks]
        fresh = {key: row for key, row in zip(keys, masks) if key not in memory}
        if fresh:
            memory.update(zip(fresh, self.layers[position].residuals(np.stack(list(fresh.values()))).tolist()))
        return np.array([memory[key] for key in keys])

    def prefetch(self, permutations: NDArray[np.int64], on_layer: Callable[[], None] | None = None) -> None:
        """Evaluate every layer coalition that walks along permutations [M, N] will meet."""
        for position in range(len(self.layers)):
            low, high = self.bounds[position], self.bounds[position + 1]
            masks = [np.ones(high - low, dtype=bool)]
            for order in permutations:
                mask = np.ones(high - low, dtype=bool)
                for player in order[(order >= low) & (order < high)]:
                    mask[player - low] = False
                    masks.append(mask.copy())
            self._residuals(position, np.stack(masks))
            self.layers[position].release()
            if on_layer is not None:
                on_layer()
