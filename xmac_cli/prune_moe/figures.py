"""Plots of scores, plans and comparisons. Each function returns a Figure that is drawn only when asked for.

Shapes: L MoE layers, n routed experts per layer; importance phi is [L, n], higher means keep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xmac_cli.report.schema import Figure

if TYPE_CHECKING:
    import numpy as np

    from xmac_cli.prune_moe.scores import ExpertScores

_KEPT, _DROPPED = "#2b6cb0", "#c05621"


def score_figures(scores: ExpertScores, kept: Mapping[int, Sequence[int]] | None = None) -> list[Figure]:
    """The plots of one set of scores.

    Args:
        scores: importance per layer and expert.
        kept: layer index -> ids that a plan keeps, to colour what survives; None colours nothing.
    """
    figures = [_heat_map(scores), _sorted_scores(scores, kept), _cumulative(scores)]
    if all("freq" in layer.extra for layer in scores.layers):
        figures.append(_against_frequency(scores, kept))
    if kept is not None:
        figures.append(_kept_counts(scores, kept))
    convergence = scores.metadata.get("convergence")
    if isinstance(convergence, Sequence) and len(convergence) > 1:
        figures.append(_convergence(convergence))
    return figures


def _stack(scores: ExpertScores) -> np.ndarray:
    import numpy as np

    width = max(layer.num_experts for layer in scores.layers)
    grid = np.full((len(scores.layers), width), np.nan)
    for row, layer in enumerate(scores.layers):
        grid[row, : layer.num_experts] = layer.phi
    return grid


def _heat_map(scores: ExpertScores) -> Figure:
    def draw(figure: Any) -> None:
        axes = figure.subplots()
        image = axes.imshow(_stack(scores), aspect="auto", cmap="viridis", interpolation="nearest")
        axes.set_yticks(range(len(scores.layers)), [str(layer.layer) for layer in scores.layers])
        axes.set_xlabel("expert")
        axes.set_ylabel("decoder layer")
        figure.colorbar(image, label=f"importance ({scores.criterion})")

    return Figure("scores", "Importance of every routed expert; dark experts go first", draw)


def _sorted_scores(scores: ExpertScores, kept: Mapping[int, Sequence[int]] | None) -> Figure:
    def draw(figure: Any) -> None:
        import numpy as np

        phi = np.concatenate([layer.phi for layer in scores.layers])
        order = np.argsort(phi, kind="stable")
        error = None
        if all(layer.se is not None for layer in scores.layers):
            error = np.concatenate([layer.se for layer in scores.layers if layer.se is not None])[order]
        axes = figure.subplots()
        rank = np.arange(phi.size)
        if error is not None:
            axes.errorbar(rank, phi[order], yerr=error, fmt="none", ecolor="#999999", elinewidth=0.8)
        survives = _survives(scores, kept)[order]
        for flag, colour, label in ((True, _KEPT, "kept"), (False, _DROPPED, "dropped")):
            chosen = survives == flag
            if chosen.any():
                axes.scatter(rank[chosen], phi[order][chosen], s=14, color=colour, label=label, zorder=3)
        axes.axhline(0, color="#666666", linewidth=0.6)
        axes.set_xlabel("expert, from least to most important")
        axes.set_ylabel("importance")
        if kept is not None:
            axes.legend(frameon=False)

    return Figure("sorted", "Sorted importance with one standard error", draw)


def _survives(scores: ExpertScores, kept: Mapping[int, Sequence[int]] | None) -> np.ndarray:
    import numpy as np

    flags = []
    for layer in scores.layers:
        mask = np.ones(layer.num_experts, dtype=bool)
        if kept is not None and layer.layer in kept:
            mask[:] = False
            mask[list(kept[layer.layer])] = True
        flags.append(mask)
    return np.concatenate(flags)


def _cumulative(scores: ExpertScores) -> Figure:
    def draw(figure: Any) -> None:
        import numpy as np

        axes = figure.subplots()
        for layer in scores.layers:
            positive = np.sort(np.clip(layer.phi, 0, None))[::-1]
            total = positive.sum()
            if total > 0:
                share = np.concatenate([[0.0], np.cumsum(positive) / total])
                axes.plot(np.linspace(0, 1, share.size), share, label=f"layer {layer.layer}", linewidth=1)
        axes.plot([0, 1], [0, 1], color="#999999", linestyle=":", linewidth=1)
        axes.set_xlabel("share of a layer's experts, most important first")
        axes.set_ylabel("share of positive importance")
        if len(scores.layers) <= 12:
            axes.legend(frameon=False, fontsize="small")

    return Figure("cumulative", "How concentrated importance is in each layer; dotted: all experts equal", draw)


def _against_frequency(scores: ExpertScores, kept: Mapping[int, Sequence[int]] | None) -> Figure:
    def draw(figure: Any) -> None:
        import numpy as np

        axes = figure.subplots()
        frequency = np.concatenate([layer.extra["freq"] for layer in scores.layers])
        phi = np.concatenate([layer.phi for layer in scores.layers])
        survives = _survives(scores, kept)
        axes.scatter(frequency[survives], phi[survives], s=16, color=_KEPT)
        axes.scatter(frequency[~survives], phi[~survives], s=16, color=_DROPPED)
        axes.set_xlabel("share of tokens that choose the expert")
        axes.set_ylabel(f"importance ({scores.criterion})")

    return Figure("frequency", "Importance against how often the router chooses an expert", draw)


def _kept_counts(scores: ExpertScores, kept: Mapping[int, Sequence[int]]) -> Figure:
    def draw(figure: Any) -> None:
        axes = figure.subplots()
        names = [str(layer.layer) for layer in scores.layers]
        counts = [len(kept.get(layer.layer, range(layer.num_experts))) for layer in scores.layers]
        totals = [layer.num_experts for layer in scores.layers]
        axes.bar(names, totals, color="#dddddd")
        axes.bar(names, counts, color=_KEPT)
        axes.set_xlabel("decoder layer")
        axes.set_ylabel("experts kept")

    return Figure("kept", "Experts kept in each layer (grey: before)", draw)


def _convergence(points: Sequence[Any]) -> Figure:
    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.plot([p[0] for p in points], [p[1] for p in points], marker="o", markersize=3, color=_KEPT)
        axes.axhline(0.6, color="#999999", linestyle=":")
        axes.set_xlabel("permutations")
        axes.set_ylabel("Spearman of odd against even permutations")

    return Figure(
        "convergence", "Does the ranking repeat itself? Dotted: below it the ranking is not to be trusted", draw
    )


def spearman_figure(names: Sequence[str], matrix: np.ndarray) -> Figure:
    """Rank correlation between criteria.

    Args:
        names: C criteria.
        matrix: float64 [C, C].
    """

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.imshow(matrix, vmin=-1, vmax=1, cmap="RdBu")
        axes.set_xticks(range(len(names)), names, rotation=40, ha="right")
        axes.set_yticks(range(len(names)), names)
        for row in range(len(names)):
            for column in range(len(names)):
                axes.text(column, row, f"{matrix[row, column]:.2f}", ha="center", va="center", fontsize="small")

    return Figure("spearman", "Rank correlation between criteria over all experts", draw, (6.0, 5.0))


def comparison_figure(rows: Sequence[Mapping[str, Any]], full: float, allocation: str) -> Figure:
    """Held-out perplexity against the removed share, one line a criterion.

    Args:
        rows: mappings with `criterion`, `allocation`, `ratio`, `perplexity`.
        full: perplexity of the unpruned model.
        allocation: which rows to draw.
    """

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        chosen = [row for row in rows if row["allocation"] == allocation]
        for name in dict.fromkeys(row["criterion"] for row in chosen):
            points = sorted((row["ratio"], row["perplexity"]) for row in chosen if row["criterion"] == name)
            style = {"color": "#888888", "linestyle": "--"} if name == "random" else {}
            axes.plot([0, *(p[0] for p in points)], [full, *(p[1] for p in points)], marker="o", label=name, **style)
        axes.set_yscale("log")
        axes.set_xlabel("share of routed experts removed")
        axes.set_ylabel("held-out perplexity")
        axes.legend(frameon=False)

    return Figure(f"comparison-{allocation}", f"Held-out perplexity, {allocation} allocation", draw)
