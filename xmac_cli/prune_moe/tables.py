"""What prune-moe reports: scores with their diagnostics, and a plan with what it changes."""

from __future__ import annotations

from typing import Any

from xmac_cli.prune_moe.plan import Plan
from xmac_cli.prune_moe.scores import ExpertScores
from xmac_cli.report.schema import Report, Table


def score_report(scores: ExpertScores) -> Report:
    """Result and tables of a scoring run."""
    result = {
        "criterion": scores.criterion,
        "metadata": dict(scores.metadata),
        "layers": [
            {"layer": layer.layer, "phi": layer.phi.tolist(), **_optional(layer.se, "se")} for layer in scores.layers
        ],
    }
    return Report(result, tables=score_tables(scores))


def _optional(values: Any, name: str) -> dict[str, Any]:
    return {} if values is None else {name: values.tolist()}


def score_tables(scores: ExpertScores) -> list[Table]:
    """Scores per layer, and the diagnostics of the estimator where there was one."""
    rows = []
    for layer in scores.layers:
        order = layer.phi.argsort(kind="stable")
        lowest = " ".join(str(int(i)) for i in order[:4])
        error = None if layer.se is None else float(layer.se.mean())
        rows.append([layer.layer, layer.num_experts, float(layer.phi.min()), float(layer.phi.max()), error, lowest])
    columns = ["layer", "experts", "lowest", "highest", "mean standard error", "least important experts"]
    tables = [Table(f"Importance ({scores.criterion})", columns, rows)]
    diagnostics = scores.metadata.get("diagnostics")
    if isinstance(diagnostics, dict) and diagnostics:
        tables.append(Table("Estimator", ["", "value"], [[k.replace("_", " "), v] for k, v in diagnostics.items()]))
    return tables


def plan_report(plan: Plan, scores: ExpertScores | None) -> Report:
    """Result and tables of a plan; `plan` in the result is what plan.json holds."""
    result: dict[str, Any] = {"plan": plan.as_json()}
    tables = [plan_table(plan)]
    if scores is not None:
        tables += score_tables(scores)
        result["scores"] = score_report(scores).result
    return Report(result, tables=tables, warnings=plan.warnings)


def plan_table(plan: Plan) -> Table:
    """Before, after, and their ratio."""
    amounts = plan.amounts
    kept = [len(layer.keep) for layer in plan.layers]
    span = f"{min(kept)}" if min(kept) == max(kept) else f"{min(kept)} to {max(kept)}"
    rows: list[list[object]] = [
        ["routed experts", plan.n_before * len(plan.layers), sum(kept), -plan.actual_ratio],
        ["experts per layer", plan.n_before, span, None],
        ["stored experts per layer", plan.n_before, plan.n_after, plan.n_after / plan.n_before - 1],
        _change("parameters", amounts.parameters_before, amounts.parameters_after),
        _change("bytes", amounts.bytes_before, amounts.bytes_after),
    ]
    shown = [[*row[:3], f"{row[3]:+.1%}" if isinstance(row[3], float) else None] for row in rows]
    title = f"{plan.model_type}, {plan.criterion}, {plan.allocation} allocation, export {plan.export}"
    return Table(title, ["", "before", "after", "change"], shown)


def _change(name: str, before: int, after: int) -> list[object]:
    return [name, before, after, after / before - 1]
