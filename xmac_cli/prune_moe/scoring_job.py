"""One loaded model and one calibration batch, from which any number of scores are made.

Loading is what takes long, so it happens at the first use and once.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import cached_property
from typing import Any

from xmac_cli.checkpoint.fingerprint import fast_fingerprint
from xmac_cli.cli.errors import ConstraintError, UsageError
from xmac_cli.cli.verb import Job
from xmac_cli.data.calibration import CalibrationOptions, TokenBatch
from xmac_cli.models.loading import load_model, load_tokenizer
from xmac_cli.models.processes import join_processes
from xmac_cli.prune_moe.allocation import round_half_up
from xmac_cli.prune_moe.calibration_pass import calibrate
from xmac_cli.prune_moe.layout import Layout
from xmac_cli.prune_moe.moe_blocks import MoEModule, moe_modules
from xmac_cli.prune_moe.option_texts import parse_protected, parse_temper
from xmac_cli.prune_moe.options import PruneOptions
from xmac_cli.prune_moe.plan import Plan, placeholder_scores, super_experts, with_keep
from xmac_cli.prune_moe.refine import refine_swaps
from xmac_cli.prune_moe.score import score
from xmac_cli.prune_moe.score_options import ScoreOptions
from xmac_cli.prune_moe.scores import ExpertScores
from xmac_cli.prune_moe.shapley_scores import open_game


class ScoringJob:
    """Scores of one checkpoint on one calibration text.

    Args:
        options: of the verb, preset applied.
        job: of the run.
        layout: of the checkpoint.

    Raises:
        UsageError: no calibration text, where the criterion needs one.
    """

    def __init__(self, options: PruneOptions, job: Job, layout: Layout) -> None:
        self.options = options
        self.job = job
        self.layout = layout
        if not options.calib and (options.criterion != "random" or options.stage == "compare"):
            raise UsageError(
                "scoring needs calibration text",
                "name it with --calib FILE, or use scores made before with --scores DIR",
            )

    @cached_property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer."""
        return load_tokenizer(self.job.checkpoint, trust_remote_code=self.job.settings.trust_remote_code)

    @cached_property
    def model(self) -> Any:
        """The checkpoint as a transformers model."""
        trust = self.job.settings.trust_remote_code
        device = join_processes(self.job.device)
        return load_model(self.job.checkpoint, device=device, dtype=self.job.dtype, trust_remote_code=trust)

    @cached_property
    def modules(self) -> list[MoEModule]:
        """Its MoE blocks."""
        return moe_modules(self.model)

    @cached_property
    def batch(self) -> TokenBatch:
        """The calibration batch."""
        options = self.options
        calibration = CalibrationOptions(
            samples=options.calib_samples,
            seqlen=options.calib_seqlen,
            packing=options.calib_packing,
            chat_template=options.chat_template,
            weights=options.calib_weights or None,
            seed=self.job.seed,
        )
        return calibration.load(options.calib, self.tokenizer)

    @cached_property
    def fingerprint(self) -> str:
        """Of the checkpoint."""
        return fast_fingerprint(self.layout.checkpoint)

    def scores(self, options: PruneOptions | None = None, *, seed: int | None = None) -> ExpertScores:
        """Score every expert.

        Args:
            options: other options than the job's, such as another criterion.
            seed: another seed than the job's.
        """
        options = options or self.options
        wanted = score_options(options, self.job.seed if seed is None else seed, self._keep(options))
        if wanted.criterion == "random" and not options.calib:
            return _random(self.layout, wanted.seed)
        state = None
        if self.job.scratch is not None:
            name = hashlib.sha256(json.dumps(wanted.as_json(), sort_keys=True).encode()).hexdigest()[:16]
            state = self.job.scratch / f"score-{name}"
        return score(
            self.model,
            self.batch,
            wanted,
            progress=self.job.progress,
            state_dir=state,
            resume=self.job.resume,
            model_fingerprint=self.fingerprint,
        )

    def naee(self, ratio: float) -> list[ExpertScores] | None:
        """The best subset of each layer at one ratio, or None where there are too many subsets."""
        wanted = replace(self.options, criterion="naee", ratio=ratio, keep=None, target_params=None, target_size=None)
        try:
            return [self.scores(wanted)]
        except ConstraintError:
            return None

    def refined(self, plan: Plan, scores: ExpertScores) -> Plan:
        """Apply --refine-swaps to a plan."""
        wanted = score_options(self.options, self.job.seed, None)
        statistics = calibrate(
            self.model,
            self.batch,
            self.modules,
            batch_tokens=wanted.batch_tokens,
            keep_inputs=wanted.value == "recon",
            progress=self.job.progress,
        )
        game = open_game(self.model, self.batch, self.modules, wanted, statistics)
        protect = parse_protected(self.options.protect)
        if self.options.protect_super:
            protect |= super_experts(scores)
        found = refine_swaps(
            {layer.layer: layer.keep for layer in plan.layers},
            scores,
            game,
            self.modules,
            self.options.refine_swaps,
            protect=frozenset(protect),
            progress=self.job.progress,
        )
        made = sum(swap.accepted for swap in found.swaps)
        rise = f"{found.value_before:.4g} to {found.value_after:.4g}"
        self.job.progress.note(f"{made} of {len(found.swaps)} exchanges kept; V rose from {rise}")
        return with_keep(plan, self.layout, found.kept)

    def warnings(self, scores: ExpertScores) -> tuple[str, ...]:
        """What the estimator warns of."""
        return tuple(scores.metadata.get("warnings", ()))

    def _keep(self, options: PruneOptions) -> int | None:
        """Experts that stay per layer, which NAEE must know before it scores."""
        if options.criterion != "naee":
            return None
        if options.keep is not None:
            return options.keep
        if options.ratio is None:
            raise UsageError("NAEE searches subsets of a given size: use --ratio or --keep with it")
        return self.layout.num_experts - round_half_up(options.ratio * self.layout.num_experts)


def score_options(options: PruneOptions, seed: int, keep: int | None) -> ScoreOptions:
    """The options of `score` among those of the verb."""
    return ScoreOptions(
        criterion=options.criterion,
        value=options.value,
        scope=options.scope,
        sampler=options.sampler,
        rgis_weights=options.rgis_weights,
        rgis_mix=options.rgis_mix,
        rgis_temper=parse_temper(options.rgis_temper),
        permutations=options.permutations,
        truncate=options.truncate,
        self_normalize=options.self_normalize,
        seed=seed,
        batch_tokens=options.batch_tokens,
        keep=keep,
        scores_file=options.scores if options.criterion == "from-file" else None,
    )


def _random(layout: Layout, seed: int) -> ExpertScores:
    """The random baseline needs neither model nor text."""
    from xmac_cli.prune_moe.baselines import random_scores

    blank = placeholder_scores(layout)
    drawn = random_scores([layer.num_experts for layer in blank.layers], seed)
    layers = tuple(replace(layer, phi=phi) for layer, phi in zip(blank.layers, drawn, strict=True))
    return ExpertScores("random", layers, {"seed": seed})
