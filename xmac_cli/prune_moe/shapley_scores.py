"""Shapley values of all routed experts of a model: one game over all layers, or one game per layer.

Ties the estimator (shapley.py) to the games (values.py, recon.py). Value games run several permutations in lock step as
far as the token budget of a forward pass allows; the reconstruction game runs all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import nn

from xmac_cli.cli.progress import Progress
from xmac_cli.data.calibration import TokenBatch
from xmac_cli.models.processes import from_first, process_rank, shared_evaluation
from xmac_cli.prune_moe.calibration_pass import LayerStatistics
from xmac_cli.prune_moe.moe_blocks import MoEModule
from xmac_cli.prune_moe.permutation_walk import BatchValueFn
from xmac_cli.prune_moe.recon import ReconGame, ReconLayer
from xmac_cli.prune_moe.sampling import PermutationSampler, SamplerOptions, smoothed_frequency
from xmac_cli.prune_moe.score_options import ScoreOptions
from xmac_cli.prune_moe.score_state import ScoreStates
from xmac_cli.prune_moe.shapley import ShapleyResult, estimate_shapley, exact_shapley, expected_depth
from xmac_cli.prune_moe.values import ExpertGame, ModelGame

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class ScoredLayers:
    """Scores of all layers.

    Args:
        phi: float64 [n] per layer.
        se: float64 [n] per layer, or empty for criteria without sampling error.
        evals: int64 [n] per layer, likewise.
        results: the estimates behind them: one of the global game, one per layer game, or none.
        unit: permutations per independent draw.
    """

    phi: list[FloatArray]
    se: Sequence[FloatArray] = ()
    evals: Sequence[NDArray[np.int64]] = ()
    results: Sequence[ShapleyResult] = ()
    unit: int = 1


@dataclass(frozen=True)
class ShapleyRun:
    """What every game of a run shares.

    Args:
        model, batch, modules, options: as in `score`.
        statistics: of the calibration pass; with the experts' inputs for the reconstruction game.
        states: of interrupted work.
        progress: bars and metrics.
    """

    model: nn.Module
    batch: TokenBatch
    modules: list[MoEModule]
    options: ScoreOptions
    statistics: list[LayerStatistics]
    states: ScoreStates
    progress: Progress

    def scores(self) -> ScoredLayers:
        """Run the games that the options ask for."""
        unit = 2 if self.options.sampler == "antithetic" else 1
        if self.options.scope == "global" and not (self.options.value == "recon" and self.options.sampler == "exact"):
            result = self._global()
            bounds = np.cumsum([entry.num_experts for entry in self.modules])[:-1]
            phi, se = list(np.split(result.phi, bounds)), list(np.split(result.se, bounds))
            return ScoredLayers(phi, se, list(np.split(result.evals, bounds)), [result], unit)
        results, shares = [], np.ones(len(self.modules))
        for position in range(len(self.modules)):
            result, shares[position] = self._layer(position)
            results.append(result)
        if self.options.scope == "global":
            # The global reconstruction value is a weighted sum of the layers' values, so its exact Shapley values are
            # theirs times the weights (linearity); no sum over all N players has to be enumerated.
            shares /= shares.sum()
        phi = [share * result.phi for share, result in zip(shares, results)]
        se = [share * result.se for share, result in zip(shares, results)]
        return ScoredLayers(phi, se, [result.evals for result in results], results, unit)

    def _global(self) -> ShapleyResult:
        prior = np.concatenate([self._prior(position) for position in range(len(self.modules))])
        if self.options.value == "recon":
            game = ReconGame(recon_layers(self.statistics, self.options))
            self._prefetch(game, prior)
            return self._estimate("global", game.values, game.num_players, prior, batch=self.options.permutations)
        model_game = ModelGame(
            self.model,
            self.batch,
            self.modules,
            value=self.options.value,
            batch_tokens=self.options.batch_tokens,
        )
        return self._estimate_model("global", model_game, prior)

    def _layer(self, position: int) -> tuple[ShapleyResult, float]:
        """The game of one layer, and its weight in the global reconstruction game (1 for scope `layer`)."""
        entry = self.modules[position]
        name, prior = f"layer-{entry.layer}", self._prior(position)
        if self.options.value == "recon":
            layer = ReconLayer(self.statistics[position], backend=self.options.backend)
            result = self._estimate(name, layer.values, entry.num_experts, prior, batch=self.options.permutations)
            weight = layer.energy if self.options.scope == "global" else 1.0
            layer.release()
            return result, weight
        model_game = ModelGame(
            self.model,
            self.batch,
            self.modules,
            value=self.options.value,
            layer=entry,
            batch_tokens=self.options.batch_tokens,
        )
        return self._estimate_model(name, model_game, prior), 1.0

    def _estimate_model(self, name: str, game: ModelGame, prior: FloatArray) -> ShapleyResult:
        together = max(1, self.options.batch_tokens // self.batch.input_ids.numel())
        processes = process_rank()[1]
        # What an expert is used for is known only to the process that evaluated the coalition; skipping the shortcut
        # costs passes and changes no value.
        inactive = game.inactive if game.has_null_moves and processes == 1 else None
        values = shared_evaluation(game.values)
        # Free places of a forward pass cost nothing on an accelerator, and an idle process neither; on one CPU a guess
        # costs as much as any other coalition.
        on_cpu = next(self.model.parameters()).device.type == "cpu"
        capacity = (processes if processes > 1 else 0) if on_cpu else together * processes
        return self._estimate(
            name, values, game.num_players, prior, batch=together * processes, capacity=capacity, inactive=inactive
        )

    def _estimate(
        self,
        name: str,
        values: BatchValueFn,
        players: int,
        prior: FloatArray,
        *,
        batch: int,
        capacity: int = 0,
        inactive: Callable[[NDArray[np.bool_]], NDArray[np.bool_]] | None = None,
    ) -> ShapleyResult:
        options = self.options
        if options.sampler == "exact":
            return exact_shapley(None, players, value_fn_batch=values)
        return estimate_shapley(
            None,
            players,
            permutations=options.permutations,
            truncate=options.truncate,
            sampler=options.sampler,
            prior=prior,
            weights=options.rgis_weights,
            mix=options.rgis_mix,
            temper=options.rgis_temper,
            self_normalize=options.self_normalize,
            seed=options.seed,
            value_fn_batch=values,
            batch=batch,
            capacity=capacity,
            inactive=inactive,
            log_values=options.value in ("nll", "kl"),
            state=from_first(self.states.load(name)),
            on_state=lambda state: self.states.save(name, state),
            progress=self.progress,
        )

    def _prior(self, position: int) -> FloatArray:
        layer = self.statistics[position]
        return smoothed_frequency(layer.count, layer.tokens, layer.entry.top_k)

    def _prefetch(self, game: ReconGame, prior: FloatArray) -> None:
        options = self.options
        if options.sampler == "exact" or self.states.load("global") is not None:
            return
        sampler = PermutationSampler(
            game.num_players,
            options.permutations,
            SamplerOptions(options.sampler, options.rgis_weights, options.rgis_mix, options.rgis_temper, options.seed),
            prior=prior,
            depth=expected_depth(game.num_players, options.truncate),
        )
        orders = np.stack([sampler.draw(index) for index in range(options.permutations)])
        with self.progress.task("expert outputs and coalitions", total=len(game.layers), unit="layers") as task:
            game.prefetch(orders, on_layer=task.advance)


def recon_layers(statistics: Sequence[LayerStatistics], options: ScoreOptions) -> list[ReconLayer]:
    """The layers of a reconstruction game."""
    return [ReconLayer(layer, backend=options.backend) for layer in statistics]


def open_game(
    model: nn.Module,
    batch: TokenBatch,
    modules: list[MoEModule],
    options: ScoreOptions,
    statistics: Sequence[LayerStatistics],
) -> ExpertGame:
    """The global game of the options' value, for criteria and refinements that evaluate single coalitions.

    Args:
        model, batch, modules, options: as in `score`.
        statistics: with the experts' inputs, for the reconstruction game.
    """
    if options.value == "recon":
        return ReconGame(recon_layers(statistics, options))
    return ModelGame(model, batch, modules, value=options.value, batch_tokens=options.batch_tokens, null_moves=False)
