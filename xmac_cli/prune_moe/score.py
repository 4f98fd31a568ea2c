"""Score every routed expert of a live model: one calibration pass, then one criterion.

The result is an `ExpertScores` with phi (higher = keep), its standard error, statistics of the calibration pass, and
diagnostics of the estimator in `metadata`. Interrupted work continues from `state_dir` and ends with identical numbers.
Next-token-prediction (MTP) layers are not part of a transformers model and are never scored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import nn
from xmac_kernels import dispatch

from xmac_cli import __version__
from xmac_cli.cli.errors import InputError
from xmac_cli.cli.progress import NullProgress, Progress
from xmac_cli.data.calibration import TokenBatch
from xmac_cli.prune_moe.baselines import (
    greedy_scores,
    leave_one_out_scores,
    naee_scores,
    random_scores,
    statistic_scores,
)
from xmac_cli.prune_moe.calibration_pass import LayerStatistics, calibrate
from xmac_cli.prune_moe.gates import gate_formula
from xmac_cli.prune_moe.moe_blocks import MoEModule, moe_modules
from xmac_cli.prune_moe.options import STATISTIC_CRITERIA
from xmac_cli.prune_moe.recon import ReconLayer
from xmac_cli.prune_moe.score_diagnostics import convergence, diagnostics, warnings
from xmac_cli.prune_moe.score_options import ScoreOptions
from xmac_cli.prune_moe.score_state import ScoreStates
from xmac_cli.prune_moe.scores import ExpertScores, LayerScores, load_scores
from xmac_cli.prune_moe.shapley_scores import ScoredLayers, ShapleyRun, open_game, recon_layers

FloatArray = NDArray[np.float64]


def score(
    model: nn.Module,
    batch: TokenBatch,
    options: ScoreOptions,
    *,
    progress: Progress | None = None,
    state_dir: Path | None = None,
    resume: bool = False,
    model_fingerprint: str = "",
) -> ExpertScores:
    """Score the experts of a model.

    Args:
        model: a transformers model in eval mode; its weights are not touched.
        batch: calibration tokens; padding is excluded everywhere.
        options: criterion and estimator.
        progress: bars and metrics.
        state_dir: where finished permutations are kept, or None.
        resume: continue from `state_dir`.
        model_fingerprint: of the checkpoint, stored in the scores and checked when resuming.

    Returns:
        Scores with metadata: options, seed, calibration, V_full, V_empty, diagnostics, convergence, warnings, versions.

    Raises:
        UsageError, ConstraintError: options that do not fit this model.
        UnsupportedModelError: no supported MoE blocks.
        ResumeMismatchError: `state_dir` belongs to another run.
    """
    modules = moe_modules(model)
    key = {
        **options.as_json(),
        "tokens_sha256": batch.token_sha256,
        "model_fingerprint": model_fingerprint,
        "experts": [entry.num_experts for entry in modules],
    }
    states = ScoreStates(state_dir, key, resume=resume)
    progress = progress or NullProgress()
    if options.criterion == "from-file":
        return _from_file(options.scores_file, modules)
    with torch.inference_mode():
        statistics = calibrate(
            model,
            batch,
            modules,
            batch_tokens=options.batch_tokens,
            keep_inputs=_needs_inputs(options),
            progress=progress,
        )
        run = _Run(model, batch, modules, options, statistics, states, progress)
        scored = run.by_criterion()
    layers = tuple(_layer_scores(scored, position, layer) for position, layer in enumerate(statistics))
    return ExpertScores(options.criterion, layers, run.metadata(scored, model_fingerprint))


def _needs_inputs(options: ScoreOptions) -> bool:
    by_value = options.criterion in ("shapley", "loo") and options.value == "recon"
    return by_value or options.criterion in ("naee", "greedy")


@dataclass(frozen=True)
class _Run(ShapleyRun):
    """Everything a criterion may look at is what the Shapley games share."""

    def by_criterion(self) -> ScoredLayers:
        """Scores of all layers by the criterion of the options."""
        options = self.options
        sizes = [entry.num_experts for entry in self.modules]
        if options.criterion in STATISTIC_CRITERIA:
            return ScoredLayers([statistic_scores(options.criterion, layer) for layer in self.statistics])
        if options.criterion == "random":
            return ScoredLayers(random_scores(sizes, options.seed))
        if options.criterion == "loo":
            game = open_game(self.model, self.batch, self.modules, options, self.statistics)
            return ScoredLayers(list(np.split(leave_one_out_scores(game), np.cumsum(sizes)[:-1])))
        if options.criterion == "naee":
            keep = options.keep or 0
            return self._each_layer(lambda layer: naee_scores(layer, keep))
        if options.criterion == "greedy":
            return self._each_layer(greedy_scores)
        return self.scores()

    def _each_layer(self, score_layer: Callable[[ReconLayer], FloatArray]) -> ScoredLayers:
        phi = []
        with self.progress.task(self.options.criterion, total=len(self.modules), unit="layers") as task:
            for layer in recon_layers(self.statistics, self.options):
                phi.append(score_layer(layer))
                layer.release()
                task.advance()
        return ScoredLayers(phi)

    def metadata(self, scored: ScoredLayers, fingerprint: str) -> dict[str, Any]:
        """What the score file says about how the scores were made."""
        values = diagnostics(scored.results)
        formulas = {entry.layer: gate_formula(entry) for entry in self.modules}
        return {
            "options": self.options.as_json(),
            "seed": self.options.seed,
            "calibration": self.batch.describe(),
            "tokens": self.batch.tokens,
            "tokens_sha256": self.batch.token_sha256,
            "model_fingerprint": fingerprint,
            "model_type": self.modules[0].model_type,
            "V_full": values.get("v_full"),
            "V_empty": values.get("v_empty"),
            "diagnostics": values,
            "convergence": convergence(scored.results, self_normalize=self.options.self_normalize, unit=scored.unit),
            "null_move_exact": {
                str(layer): formula is not None and formula.null_move_is_exact for layer, formula in formulas.items()
            },
            "gate_mass": {str(s.entry.layer): s.gate_mass / max(s.tokens, 1) for s in self.statistics},
            "warnings": [*self.batch.warnings, *warnings(scored.results)],
            "kernel_backend": dispatch.last_used.get("coalition_residual") if _needs_inputs(self.options) else None,
            "versions": {
                "xmac": __version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "numpy": np.__version__,
            },
        }


def _layer_scores(scored: ScoredLayers, position: int, layer: LayerStatistics) -> LayerScores:
    used = np.maximum(layer.count, 1.0)
    se = scored.se[position] if len(scored.se) else None
    return LayerScores(
        name=layer.entry.name,
        layer=layer.entry.layer,
        phi=scored.phi[position],
        # One permutation has no spread; a missing error is told apart from an error of zero.
        se=se if se is not None and bool(np.isfinite(se).all()) else None,
        evals=scored.evals[position] if len(scored.evals) else None,
        extra={
            "freq": layer.frequency,
            "gate_mean": layer.probability / max(layer.tokens, 1),
            "reap": layer.gated_norm / used,
            "ean": layer.norm,
            "max_activation": layer.max_activation,
        },
    )


def _from_file(path: Path | None, modules: list[MoEModule]) -> ExpertScores:
    if path is None:
        raise InputError("no score file was given")
    scores = load_scores(path)
    for entry in modules:
        found = scores.for_layer(entry.layer).num_experts
        if found != entry.num_experts:
            raise InputError(f"{path} scores {found} experts in layer {entry.layer}, the model has {entry.num_experts}")
    return scores
