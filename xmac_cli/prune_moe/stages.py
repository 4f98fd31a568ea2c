"""The stages of prune-moe as functions of (options, job): score, plan, apply, all three, and compare.

Each checks what can be checked from headers first, so that a wrong budget is answered before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xmac_cli.cli.errors import InputError, UsageError
from xmac_cli.cli.places import check_writable
from xmac_cli.cli.verb import Job
from xmac_cli.prune_moe.budget import Budget
from xmac_cli.prune_moe.layout import Layout, sniff_layout
from xmac_cli.prune_moe.option_texts import parse_layers, parse_protected
from xmac_cli.prune_moe.options import PruneOptions
from xmac_cli.prune_moe.plan import Plan, load_plan, make_plan, placeholder_scores, save_plan, super_experts
from xmac_cli.prune_moe.scores import TENSOR_FILE, ExpertScores, load_scores, save_scores, score_file
from xmac_cli.report.schema import Report

if TYPE_CHECKING:
    from xmac_cli.prune_moe.scoring_job import ScoringJob


def run_score(options: PruneOptions, job: Job) -> Report:
    """Calibrate and score; OUTPUT is a score directory."""
    from xmac_cli.prune_moe.figures import score_figures
    from xmac_cli.prune_moe.tables import score_report

    layout = sniff_layout(job.checkpoint)
    scoring = _scoring(options, job, layout)
    scores = scoring.scores()
    save_scores(job.staged.path, scores)
    return replace(score_report(scores), figures=tuple(score_figures(scores)), warnings=scoring.warnings(scores))


def assist_scoring(options: PruneOptions, job: Job) -> None:
    """The part of a further process: evaluate coalitions for the first one."""
    layout = sniff_layout(job.checkpoint)
    if options.stage == "all":
        _check_budget(options, layout)
    if options.scores is None:
        _scoring(options, job, layout).scores()


def run_plan(options: PruneOptions, job: Job) -> Report:
    """Plan from a score directory; writes plan.json and nothing else."""
    from xmac_cli.prune_moe.figures import score_figures
    from xmac_cli.prune_moe.tables import plan_report

    if options.plan_out is None:
        raise UsageError("--stage plan needs --plan-out FILE")
    if options.scores is None:
        raise UsageError("--stage plan needs --scores DIR", "make one with --stage score -o DIR")
    if options.refine_swaps:
        raise UsageError("--refine-swaps runs the model, so it needs --stage all")
    check_writable(options.plan_out, "--plan-out", directory=False)
    layout = sniff_layout(job.checkpoint)
    scores = _stored_scores(options, layout, options.scores)
    plan = plan_from_scores(options, layout, scores, score_file(options.scores))
    save_plan(options.plan_out, plan)
    report = plan_report(plan, scores)
    figures = score_figures(scores, {layer.layer: layer.keep for layer in plan.layers})
    warnings = (*report.warnings, *_foreign_scores(layout, scores))
    return replace(report, output=options.plan_out, figures=tuple(figures), warnings=warnings)


def run_apply(options: PruneOptions, job: Job) -> Report:
    """Cut the experts that a plan drops out of the files; no model is loaded unless --verify asks for it."""
    if options.plan_file is None:
        raise UsageError("--stage apply needs --plan FILE", "make one with --stage plan --plan-out FILE")
    layout = sniff_layout(job.checkpoint)
    return _write(options, job, layout, _stored_plan(options, options.plan_file), None)


def run_all(options: PruneOptions, job: Job) -> Report:
    """Score (or take --scores), plan, refine, apply, verify."""
    if options.plan_out is not None:
        check_writable(options.plan_out, "--plan-out", directory=False)
    if options.scores_out is not None:
        check_writable(options.scores_out, "--scores-out", directory=True)
    layout = sniff_layout(job.checkpoint)
    _check_budget(options, layout)
    scoring = None
    if options.scores is not None:
        scores = _stored_scores(options, layout, options.scores)
    else:
        scoring = _scoring(options, job, layout)
        scores = scoring.scores()
    directory = options.scores_out or (job.scratch / "scores" if job.scratch and options.scores is None else None)
    file = score_file(options.scores) if options.scores else None
    if directory is not None and options.scores is None:
        save_scores(directory, scores)
        file = directory / TENSOR_FILE
    plan = plan_from_scores(options, layout, scores, file)
    if options.refine_swaps:
        scoring = scoring or _scoring(options, job, layout)
        plan = scoring.refined(plan, scores)
    if options.plan_out is not None:
        save_plan(options.plan_out, plan)
    report = _write(options, job, layout, plan, scores)
    extra = scoring.warnings(scores) if scoring is not None else _foreign_scores(layout, scores)
    return replace(report, warnings=(*report.warnings, *extra))


def preview(options: PruneOptions, source: Path) -> Report:
    """--dry-run: what pruning would change and cost."""
    from xmac_cli.prune_moe.dry_run import Scoring, dry_run

    layout = sniff_layout(source)
    if options.plan_file is not None:
        return dry_run(layout, _stored_plan(options, options.plan_file))
    if options.scores is not None:
        scores = _stored_scores(options, layout, options.scores)
        return dry_run(layout, plan_from_scores(options, layout, scores, score_file(options.scores)))
    scoring = Scoring(
        options.criterion,
        options.value,
        options.permutations,
        options.truncate,
        options.calib_samples * options.calib_seqlen,
    )
    return dry_run(layout, _check_budget(options, layout), scoring)


def _stored_plan(options: PruneOptions, path: Path) -> Plan:
    """A plan file, and options that do not contradict it."""
    plan = load_plan(path)
    asked = (options.ratio, options.keep, options.target_params, options.target_size)
    if any(value is not None for value in asked):
        budget = budget_of(options)
        if dict(plan.requested) != {budget.kind: budget.value}:
            wanted = ", ".join(f"{kind} {value}" for kind, value in plan.requested.items())
            raise UsageError(
                f"the plan {path} was made for {wanted}, but {budget.kind} {budget.value} is asked for",
                "leave the budget away, or make a new plan",
            )
    if options.mtp not in ("slice", plan.mtp):
        raise UsageError(
            f"the plan {path} says {plan.mtp} for next-token layers, but --mtp {options.mtp} is given",
            "leave --mtp away, or make a new plan",
        )
    return plan


def _stored_scores(options: PruneOptions, layout: Layout, path: Path) -> ExpertScores:
    """Scores made before, and options that do not contradict them.

    Raises:
        UsageError: another criterion is asked for.
        InputError: the scores belong to a model with other layers.
    """
    scores = load_scores(path)
    if options.criterion not in ("shapley", "from-file", scores.criterion):
        raise UsageError(
            f"the scores in {path} are of criterion '{scores.criterion}', but --criterion {options.criterion} is given",
            "leave --criterion away, or score again without --scores",
        )
    unknown = sorted({entry.layer for entry in scores.layers} - {block.layer for block in layout.layers})
    if unknown:
        raise InputError(
            f"the scores in {path} are of another model: they name the layers {unknown}, which have no experts here",
            "score this checkpoint",
        )
    return scores


def _foreign_scores(layout: Layout, scores: ExpertScores) -> tuple[str, ...]:
    """A warning when scores were made on another checkpoint, which may be meant (a quantised copy)."""
    from xmac_cli.checkpoint.fingerprint import fast_fingerprint

    made_on = scores.metadata.get("model_fingerprint")
    if made_on in (None, fast_fingerprint(layout.checkpoint)):
        return ()
    return ("the scores were made on another checkpoint than this one; they mean something only for the same model",)


def _check_budget(options: PruneOptions, layout: Layout) -> Plan:
    """A plan without scores: a budget that cannot be met is answered before the model is loaded."""
    return plan_from_scores(options, layout, placeholder_scores(layout), None, headers_only=True)


def plan_from_scores(
    options: PruneOptions, layout: Layout, scores: ExpertScores, file: Path | None, *, headers_only: bool = False
) -> Plan:
    """The plan that the options ask for.

    Args:
        options: budget, allocation, constraints.
        layout: of the checkpoint.
        scores: importance; equal scores when there are none yet.
        file: the score file, to be named in the plan.
        headers_only: read no weights.

    Raises:
        UsageError, ConstraintError: as `make_plan`.
    """
    protect = parse_protected(options.protect)
    if options.protect_super and not headers_only:
        protect |= super_experts(scores)
    return make_plan(
        layout,
        scores,
        budget_of(options),
        allocation=options.allocation,
        export=options.export,
        align=options.align,
        protect=protect,
        layers=parse_layers(options.layers),
        mtp=options.mtp,
        scores_file=file,
        headers_only=headers_only,
    )


def budget_of(options: PruneOptions) -> Budget:
    """The one budget the options give."""
    return Budget.of(
        ratio=options.ratio,
        keep=options.keep,
        target_params=options.target_params,
        target_size=options.target_size,
    )


def _scoring(options: PruneOptions, job: Job, layout: Layout) -> ScoringJob:
    from xmac_cli.prune_moe.scoring_job import ScoringJob

    return ScoringJob(options, job, layout)


def _write(options: PruneOptions, job: Job, layout: Layout, plan: Plan, scores: ExpertScores | None) -> Report:
    from xmac_cli.prune_moe.figures import score_figures
    from xmac_cli.prune_moe.surgery import ready_plan, write_pruned
    from xmac_cli.prune_moe.tables import plan_report
    from xmac_cli.prune_moe.verify import verify_pruned

    checked = ready_plan(plan, layout, None)
    complete = write_pruned(job.staged, layout, checked, progress=job.progress, link=job.link)
    report = plan_report(checked, scores)
    if not complete:
        return report
    verified = verify_pruned(
        layout,
        checked,
        job.staged.path,
        options.verify,
        seed=job.seed,
        device=job.device,
        progress=job.progress,
    )
    figures: Sequence[Any] = ()
    if scores is not None:
        figures = score_figures(scores, {layer.layer: layer.keep for layer in checked.layers})
    result = {**report.result, "verification": verified.as_json()}
    return replace(report, result=result, figures=tuple(figures))
