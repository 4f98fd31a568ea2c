"""The compare stage: loads the model once, scores it by every criterion, and judges every plan on held-out text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from xmac_cli.cli.errors import UsageError
from xmac_cli.cli.verb import Job
from xmac_cli.prune_moe.compare import (
    ALLOCATIONS,
    compare_criteria,
    comparison_tables,
    masked_perplexity,
    read_domains,
    verdict_table,
    verdicts,
)
from xmac_cli.prune_moe.figures import comparison_figure, spearman_figure
from xmac_cli.prune_moe.layout import sniff_layout
from xmac_cli.prune_moe.options import CRITERIA, PruneOptions
from xmac_cli.prune_moe.plan import Plan
from xmac_cli.prune_moe.scores import ExpertScores
from xmac_cli.report.schema import Report

if TYPE_CHECKING:
    from xmac_cli.prune_moe.scoring_job import ScoringJob

_WINDOW = 512
_GAMES = ("recon", "ppl", "nll", "kl")


def run_compare(options: PruneOptions, job: Job) -> Report:
    """Held-out perplexity of every criterion, ratio and allocation; nothing is written.

    Raises:
        UsageError: no held-out text, or an unknown criterion.
    """
    from xmac_cli.prune_moe.scoring_job import ScoringJob

    if not options.eval_data:
        raise UsageError("--stage compare needs held-out text", "name it with --eval-data FILE, one file per domain")
    parsed = {label: parse_contender(label) for label in options.criteria}
    layout = sniff_layout(job.checkpoint)
    scoring = ScoringJob(options, job, layout)
    domains = read_domains(options.eval_data, scoring.tokenizer, options.eval_tokens)
    made: dict[tuple[str, float], list[ExpertScores] | None] = {}

    def scores_of(label: str, ratio: float) -> Sequence[ExpertScores] | None:
        contender = parsed[label]
        key = (label, ratio if contender.criterion == "naee" else 0.0)
        if key not in made:
            made[key] = _score(scoring, contender, ratio, options.random_seeds)
        return made[key]

    def judge(kept: Mapping[int, Sequence[int]]) -> dict[str, float]:
        return masked_perplexity(scoring.model, scoring.modules, kept, domains, _window(scoring.model))

    def evaluate(plan: Plan) -> Mapping[str, float]:
        return judge({layer.layer: layer.keep for layer in plan.layers})

    full = judge({})
    outcomes = compare_criteria(layout, scores_of, evaluate, options.criteria, options.ratios, job.progress)
    found = verdicts(outcomes)
    rows = [outcome.as_json() for outcome in outcomes]
    ranked = {label: scores[0] for (label, _), scores in made.items() if scores and parsed[label].criterion != "naee"}
    names, matrix = spearman_matrix(ranked)
    result = {
        "full": full,
        "outcomes": rows,
        "verdicts": found,
        "spearman": {"criteria": names, "matrix": matrix.tolist()},
        "calibration": scoring.batch.describe(),
        "held_out": [{"name": d.name, "sha256": d.sha256, "tokens": d.tokens} for d in domains],
    }
    figures = [comparison_figure(rows, full["total"], allocation) for allocation in ALLOCATIONS]
    figures.append(spearman_figure(names, matrix))
    tables = [*comparison_tables(outcomes, full), verdict_table(found)]
    warnings = [f"{label}: not feasible here" for (label, _), scores in made.items() if scores is None]
    return Report(result, tables=tables, figures=figures, warnings=tuple(dict.fromkeys(warnings)))


@dataclass(frozen=True)
class Contender:
    """One criterion of a comparison.

    Args:
        criterion: name.
        value: value of the Shapley game, or None.
        permutations: M of the Shapley estimator, or None for the option's.
    """

    criterion: str
    value: str | None = None
    permutations: int | None = None


def parse_contender(label: str) -> Contender:
    """Read "reap", "shapley:ppl" or "shapley:recon:200" (game and permutations).

    Raises:
        UsageError: unknown names, or permutations that are no positive number.
    """
    criterion, *rest = label.split(":")
    if criterion not in CRITERIA or criterion == "from-file":
        raise UsageError(f"'{label}' is no criterion that can be compared", f"known: {', '.join(CRITERIA[:-1])}")
    if not rest:
        return Contender(criterion)
    permutations = rest[1] if len(rest) == 2 else "1"
    if criterion != "shapley" or len(rest) > 2 or rest[0] not in _GAMES or not permutations.isdigit():
        raise UsageError(
            f"'{label}': write shapley:GAME or shapley:GAME:PERMUTATIONS with a game of {', '.join(_GAMES)}"
        )
    return Contender(criterion, rest[0], int(permutations) if len(rest) == 2 else None)


def _score(scoring: ScoringJob, contender: Contender, ratio: float, seeds: int) -> list[ExpertScores] | None:
    options: Any = replace(scoring.options, criterion=contender.criterion)
    if contender.value is not None:
        options = replace(options, value=contender.value)
    if contender.permutations is not None:
        options = replace(options, permutations=contender.permutations)
    if contender.criterion == "naee":
        return scoring.naee(ratio)
    if contender.criterion != "random":
        return [scoring.scores(options)]
    return [scoring.scores(options, seed=scoring.job.seed + offset) for offset in range(seeds)]


def _window(model: Any) -> int:
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or _WINDOW
    return min(_WINDOW, int(longest))


def spearman_matrix(scores: Mapping[str, ExpertScores]) -> tuple[list[str], Any]:
    """Rank correlation of criteria over all experts.

    Returns:
        names, and float64 [C, C].
    """
    import numpy as np

    from xmac_cli.prune_moe.rank_correlation import spearman

    flat = {name: np.concatenate([layer.phi for layer in one.layers]) for name, one in scores.items()}
    names = list(flat)
    matrix = np.array([[spearman(flat[a], flat[b]) for b in names] for a in names]).reshape(len(names), len(names))
    return names, matrix
