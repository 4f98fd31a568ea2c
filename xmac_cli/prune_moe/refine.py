"""Swap refinement: exchange kept experts of low score for dropped ones of high score while the value rises.

No ranking of single experts reaches the best subset, because experts stand in for one another. The K most promising
exchanges inside a layer (and inside a group of a group-limited router) are tried in order, and each that raises V is
kept. Costs K evaluations. Source: ours (docs/prune-moe-method.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from xmac_cli.cli.errors import InputError
from xmac_cli.cli.progress import NullProgress, Progress
from xmac_cli.prune_moe.moe_blocks import MoEModule
from xmac_cli.prune_moe.scores import ExpertScores
from xmac_cli.prune_moe.values import ExpertGame


@dataclass(frozen=True)
class Swap:
    """One exchange that was tried.

    Args:
        layer: decoder layer.
        dropped: expert that would leave.
        added: expert that would return.
        value: V with the exchange made.
        accepted: whether V rose.
    """

    layer: int
    dropped: int
    added: int
    value: float
    accepted: bool


@dataclass(frozen=True)
class Refinement:
    """Result of `refine_swaps`.

    Args:
        kept: decoder layer -> ascending expert ids.
        swaps: every exchange tried, in order.
        value_before, value_after: V of the kept set.
    """

    kept: dict[int, list[int]]
    swaps: tuple[Swap, ...]
    value_before: float
    value_after: float


def refine_swaps(
    kept: Mapping[int, Sequence[int]],
    scores: ExpertScores,
    game: ExpertGame,
    modules: Sequence[MoEModule],
    swaps: int,
    *,
    protect: frozenset[tuple[int, int]] = frozenset(),
    progress: Progress | None = None,
) -> Refinement:
    """Try exchanges between kept and dropped experts of the same layer and group.

    Args:
        kept: decoder layer -> expert ids that a plan keeps; layers that are absent keep all.
        scores: order the exchanges: largest score of the returning minus that of the leaving expert first.
        game: the global game whose value decides, players in the order of `modules`.
        modules: `moe_modules(model)`.
        swaps: K, how many exchanges to try.
        protect: (layer, expert) pairs that must stay.
        progress: shows evaluations.

    Returns:
        The refined sets; every layer and group keeps its size.
    """
    bounds = np.concatenate([[0], np.cumsum([entry.num_experts for entry in modules])]).astype(int)
    if int(bounds[-1]) != game.num_players:
        raise InputError(f"the game has {game.num_players} players, the model {int(bounds[-1])} experts")
    mask = np.ones(game.num_players, dtype=bool)
    for position, entry in enumerate(modules):
        if entry.layer in kept:
            mask[bounds[position] : bounds[position + 1]] = False
            mask[bounds[position] + np.asarray(list(kept[entry.layer]), dtype=int)] = True
    value = before = float(game.values(mask[None])[0])
    tried: list[Swap] = []
    with (progress or NullProgress()).task("swap refinement", total=swaps, unit="swaps") as task:
        for position, out, back in _candidates(mask, bounds, scores, modules, protect):
            if len(tried) == swaps:
                break
            low = bounds[position]
            if not mask[low + out] or mask[low + back]:
                continue  # an earlier exchange has already moved one of the two
            trial = mask.copy()
            trial[low + out], trial[low + back] = False, True
            found = float(game.values(trial[None])[0])
            accepted = found > value
            tried.append(Swap(modules[position].layer, out, back, found, accepted))
            task.advance()
            if accepted:
                mask, value = trial, found
    result = {entry.layer: np.flatnonzero(mask[bounds[i] : bounds[i + 1]]).tolist() for i, entry in enumerate(modules)}
    return Refinement(result, tuple(tried), before, value)


def _candidates(
    mask: np.ndarray,
    bounds: np.ndarray,
    scores: ExpertScores,
    modules: Sequence[MoEModule],
    protect: frozenset[tuple[int, int]],
) -> list[tuple[int, int, int]]:
    """(module position, leaving, returning) triples, most promising first; ties by layer and index."""
    ranked = []
    for position, entry in enumerate(modules):
        phi = scores.for_layer(entry.layer).phi
        present = mask[bounds[position] : bounds[position + 1]]
        group = np.arange(entry.num_experts) // (entry.num_experts // entry.num_groups)
        for out in np.flatnonzero(present).tolist():
            if (entry.layer, out) in protect:
                continue
            for back in np.flatnonzero(~present & (group == group[out])).tolist():
                ranked.append((float(phi[out] - phi[back]), position, out, back))
    return [(position, out, back) for _, position, out, back in sorted(ranked)]
