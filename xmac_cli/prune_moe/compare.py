"""Which criterion is best for this model? Held-out perplexity of several criteria, measured before anything is written.

A plan is judged by running the original model with the removed experts masked, which computes exactly what the pruned
checkpoint will (docs/prune-moe.md, "Masked equality"), so no checkpoint has to be made to compare. Perplexity is
reported per domain: one averaged number hides what a removal costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from xmac_cli.cli.errors import ConstraintError, InputError
from xmac_cli.cli.progress import Progress
from xmac_cli.prune_moe.budget import Budget
from xmac_cli.prune_moe.plan import Allocation, Plan, make_plan
from xmac_cli.report.schema import Table

if TYPE_CHECKING:
    import numpy as np

    from xmac_cli.prune_moe.layout import Layout
    from xmac_cli.prune_moe.moe_blocks import MoEModule
    from xmac_cli.prune_moe.scores import ExpertScores

TOTAL = "total"
ALLOCATIONS: tuple[Allocation, ...] = ("uniform", "global")


@dataclass(frozen=True)
class Domain:
    """Held-out documents of one file.

    Args:
        name: file stem.
        sha256: of the file.
        documents: token ids per document; the first token of each is not scored.
    """

    name: str
    sha256: str
    documents: tuple[tuple[int, ...], ...]

    @property
    def tokens(self) -> int:
        """Scored tokens."""
        return sum(len(ids) - 1 for ids in self.documents)


@dataclass(frozen=True)
class Outcome:
    """Perplexities of one plan, or the mean over several seeds of a random one.

    Args:
        criterion: label of the scores.
        allocation: "uniform" or "global".
        ratio: requested share of experts to remove.
        actual: share that the plan removes.
        perplexity: token-weighted over all domains.
        domains: perplexity per domain.
        spread: lowest and highest total over seeds, or None for a single plan.
    """

    criterion: str
    allocation: str
    ratio: float
    actual: float
    perplexity: float
    domains: Mapping[str, float]
    spread: tuple[float, float] | None = None

    def as_json(self) -> dict[str, Any]:
        """JSON form."""
        body = {**vars(self), "domains": dict(self.domains)}
        return {**body, "spread": list(self.spread) if self.spread else None}


def read_domains(paths: Sequence[Path], tokenizer: Any, tokens_each: int) -> list[Domain]:
    """Tokenise the first `tokens_each` tokens of every file.

    Raises:
        InputError: a file has no document of two tokens.
    """
    from xmac_cli.data.calibration import tokenize
    from xmac_cli.data.documents import read_documents

    domains = []
    for path in paths:
        source = read_documents(path)
        left, documents = tokens_each, []
        for document in source.documents:
            ids = tokenize(document, tokenizer, close=False)[: left + 1]
            if len(ids) >= 2:
                documents.append(tuple(ids))
                left -= len(ids) - 1
            if left <= 0:
                break
        if not documents:
            raise InputError(f"{path} has no document of at least two tokens")
        domains.append(Domain(source.name, source.sha256, tuple(documents)))
    return domains


def masked_perplexity(
    model: Any, modules: list[MoEModule], kept: Mapping[int, Sequence[int]], domains: Sequence[Domain], window: int
) -> dict[str, float]:
    """Perplexity of the model with only the kept experts, per domain and in total.

    Args:
        model: transformers causal model.
        modules: `moe_modules(model)`.
        kept: decoder layer -> expert ids that stay; layers that are absent keep all.
        domains: held-out text.
        window: tokens per window; windows move on by half of it.

    Returns:
        domain name -> perplexity, and "total" weighted by tokens.
    """
    from xmac_cli.models.perplexity import token_nll
    from xmac_cli.prune_moe.routing import masked_routing

    masks = {module.name: _mask(module.num_experts, kept[module.layer]) for module in modules if module.layer in kept}
    sums: dict[str, tuple[float, int]] = {}
    with masked_routing(model, masks, modules=modules):
        for domain in domains:
            losses = token_nll(model, domain.documents, window=window, stride=max(1, window // 2))
            sums[domain.name] = (math.fsum(float(row.sum()) for row in losses), domain.tokens)
    nll = math.fsum(total for total, _ in sums.values()) / sum(count for _, count in sums.values())
    return {**{name: math.exp(total / count) for name, (total, count) in sums.items()}, TOTAL: math.exp(nll)}


def _mask(num_experts: int, kept: Sequence[int]) -> np.ndarray:
    import numpy as np

    mask = np.zeros(num_experts, dtype=bool)
    mask[list(kept)] = True
    return mask


def compare_criteria(
    layout: Layout,
    scores_of: Callable[[str, float], Sequence[ExpertScores] | None],
    evaluate: Callable[[Plan], Mapping[str, float]],
    criteria: Sequence[str],
    ratios: Sequence[float],
    progress: Progress,
) -> list[Outcome]:
    """Judge every criterion at every ratio under both allocations.

    Args:
        layout: of the checkpoint.
        scores_of: (criterion, ratio) -> scores, one per seed, or None where the criterion is not feasible.
        evaluate: plan -> perplexities, see `masked_perplexity`.
        criteria: labels.
        ratios: shares to remove.
        progress: one step per plan.

    Returns:
        outcomes, ordered by allocation, criterion, ratio.
    """
    outcomes = []
    with progress.task("comparing", total=len(ALLOCATIONS) * len(criteria) * len(ratios), unit="plans") as task:
        for allocation in ALLOCATIONS:
            for criterion in criteria:
                for ratio in ratios:
                    outcome = _judge(layout, scores_of, evaluate, criterion, ratio, allocation)
                    task.advance()
                    if outcome is not None:
                        progress.metric(outcome.as_json())
                        outcomes.append(outcome)
    return outcomes


def _judge(
    layout: Layout,
    scores_of: Callable[[str, float], Sequence[ExpertScores] | None],
    evaluate: Callable[[Plan], Mapping[str, float]],
    criterion: str,
    ratio: float,
    allocation: Allocation,
) -> Outcome | None:
    seeds = scores_of(criterion, ratio)
    if seeds is None or (allocation == "global" and criterion == "naee"):
        return None  # NAEE chooses a subset of given size in each layer; its scores order nothing across layers.
    results, actual = [], 0.0
    for scores in seeds:
        form: Literal["auto", "plan-only"] = "auto" if allocation == "uniform" else "plan-only"
        try:
            plan = make_plan(layout, scores, Budget.of(ratio=ratio), allocation=allocation, export=form)
        except ConstraintError:
            return None
        actual = plan.actual_ratio
        results.append(evaluate(plan))
    totals = [result[TOTAL] for result in results]
    names = [name for name in results[0] if name != TOTAL]
    means = {name: sum(result[name] for result in results) / len(results) for name in names}
    spread = (min(totals), max(totals)) if len(totals) > 1 else None
    return Outcome(criterion, allocation, ratio, actual, sum(totals) / len(totals), means, spread)


def comparison_tables(outcomes: Sequence[Outcome], full: Mapping[str, float]) -> list[Table]:
    """One table of totals per allocation, then one per allocation and ratio with every domain."""
    tables = []
    for allocation in dict.fromkeys(o.allocation for o in outcomes):
        chosen = [o for o in outcomes if o.allocation == allocation]
        ratios = sorted({o.ratio for o in chosen})
        names = list(dict.fromkeys(o.criterion for o in chosen))
        cells = {(o.criterion, o.ratio): o for o in chosen}
        rows: list[list[object]] = [["(nothing removed)", *[full[TOTAL]] * len(ratios)]]
        rows += [[_label(chosen, n), *(_total(cells.get((n, r))) for r in ratios)] for n in names]
        columns = ["criterion", *(f"{ratio:.0%} removed" for ratio in ratios)]
        tables.append(Table(f"Held-out perplexity, {allocation} allocation", columns, rows))
        for ratio in ratios:
            tables.append(_domain_table(allocation, ratio, [o for o in chosen if o.ratio == ratio], full))
    return tables


def _total(outcome: Outcome | None) -> float | None:
    return None if outcome is None else outcome.perplexity


def _label(outcomes: Sequence[Outcome], name: str) -> str:
    several = any(o.criterion == name and o.spread for o in outcomes)
    return f"{name} (mean of seeds)" if several else name


def _domain_table(allocation: str, ratio: float, outcomes: Sequence[Outcome], full: Mapping[str, float]) -> Table:
    domains = [name for name in full if name != TOTAL]
    rows: list[list[object]] = [["(nothing removed)", *(full[d] for d in domains), full[TOTAL], None]]
    for outcome in sorted(outcomes, key=lambda o: o.perplexity):
        spread = f"{outcome.spread[0]:.4g} - {outcome.spread[1]:.4g}" if outcome.spread else None
        cells = [outcome.domains[d] for d in domains]
        rows.append([outcome.criterion, *cells, outcome.perplexity, spread])
    actual = outcomes[0].actual if outcomes else ratio
    title = f"{ratio:.0%} removed, {allocation}: perplexity per domain"
    note = f"{actual:.1%} of the routed experts are gone; best total first"
    return Table(title, ["criterion", *domains, TOTAL, "seeds"], rows, note)


def verdicts(outcomes: Sequence[Outcome], tolerance: float = 0.01) -> list[dict[str, Any]]:
    """Say plainly, per allocation and ratio, whether a Shapley score won.

    Args:
        outcomes: of `compare_criteria`.
        tolerance: relative difference below which two totals count as a tie.

    Returns:
        mappings with allocation, ratio, `best` (criterion), `shapley` (best Shapley criterion), `verdict`
        ("wins", "ties" or "loses") and `margin` (best Shapley total over best other total, minus one).
    """
    found = []
    for allocation, ratio in dict.fromkeys((o.allocation, o.ratio) for o in outcomes):
        here = [o for o in outcomes if (o.allocation, o.ratio) == (allocation, ratio)]
        ours = [o for o in here if o.criterion.startswith("shapley")]
        others = [o for o in here if not o.criterion.startswith("shapley")]
        if not ours or not others:
            continue
        mine, theirs = (min(group, key=lambda o: o.perplexity) for group in (ours, others))
        margin = mine.perplexity / theirs.perplexity - 1
        verdict = "ties" if abs(margin) < tolerance else ("wins" if margin < 0 else "loses")
        found.append(
            {
                "allocation": allocation,
                "ratio": ratio,
                "shapley": mine.criterion,
                "best_other": theirs.criterion,
                "verdict": verdict,
                "margin": round(margin, 6),
            }
        )
    return found


def verdict_table(found: Sequence[Mapping[str, Any]]) -> Table:
    """The verdicts for people."""
    rows = [
        [v["allocation"], f"{v['ratio']:.0%}", v["shapley"], v["best_other"], v["verdict"], f"{v['margin']:+.1%}"]
        for v in found
    ]
    columns = ["allocation", "removed", "best Shapley", "best other", "Shapley", "perplexity against it"]
    return Table("Where Shapley wins, ties within 1 %, or loses", columns, rows)
