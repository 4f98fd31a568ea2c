"""Which experts stay, given scores and a count: the arithmetic of selection, free of files and models.

Uniform: the best n' of every layer. Global (Shapley-MoE, section 3.1): the lowest of all layers' experts go, down to a
floor per layer. Group-limited routers (DeepSeek) see experts in contiguous groups of n / n_group, and compute the same
function after cutting only when every group keeps the same number, or slots are padded. Ties: the higher index goes
first. Arrays: phi [n] float64, higher = keep.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xmac_cli.cli.errors import ConstraintError

if TYPE_CHECKING:
    import numpy as np

Kept = tuple[int, ...]


@dataclass(frozen=True)
class Constraints:
    """What a router demands of the experts that stay.

    Args:
        num_experts: n before pruning.
        top_k: experts per token.
        n_group: contiguous groups; 1 = none.
        topk_group: groups a token may use.
        group_floor: smallest number of experts in a group (2 where a group is scored by its two best).
        align: stored counts must be a multiple of this.
    """

    num_experts: int
    top_k: int
    n_group: int = 1
    topk_group: int = 1
    group_floor: int = 1
    align: int = 1

    @property
    def step(self) -> int:
        """Stored counts are multiples of this: aligned, and the same number in every group."""
        return math.lcm(self.align, self.n_group)

    @property
    def smallest_group(self) -> int:
        """Fewest experts of a group such that any allowed choice of groups offers top_k experts."""
        return 0 if self.n_group == 1 else max(self.group_floor, -(-self.top_k // self.topk_group))

    @property
    def smallest_count(self) -> int:
        """Fewest experts of a layer: top_k, and 2 at least (of a single expert some classes make a dense MLP)."""
        return max(2, self.top_k, self.n_group * self.smallest_group)

    @property
    def global_floor(self) -> int:
        """Fewest experts that a global ranking may leave a layer: at least an eighth."""
        return max(self.smallest_count, -(-self.num_experts // 8))

    def group_of(self, expert: int) -> int:
        """The group of an expert."""
        return expert * self.n_group // self.num_experts


def round_half_up(value: float) -> int:
    """Nearest integer, halves upwards; immune to the last digit of a product such as 0.35 * 10."""
    return math.floor(round(value, 9) + 0.5)


def check_count(count: int, limits: Constraints) -> None:
    """Refuse a stored count that the router cannot work with.

    Raises:
        ConstraintError: with the reason and what would be possible.
    """
    if count >= limits.num_experts:
        raise ConstraintError(
            f"keeping {count} of {limits.num_experts} experts removes nothing",
            "ask for fewer experts" + (f"; counts are multiples of {limits.step}" if limits.step > 1 else ""),
        )
    if count % limits.n_group:
        raise ConstraintError(
            f"{count} experts cannot be spread over n_group = {limits.n_group} groups", _nearest(count, limits)
        )
    if count % limits.align:
        raise ConstraintError(f"{count} is not a multiple of --align {limits.align}", _nearest(count, limits))
    if count < limits.smallest_count:
        reason = f"a token uses {limits.top_k}"
        if limits.n_group > 1:
            reason += f", from {limits.topk_group} of {limits.n_group} groups of at least {limits.smallest_group}"
        raise ConstraintError(
            f"{count} experts are too few: {reason}", f"keep at least {limits.smallest_count} in each layer"
        )


def _nearest(count: int, limits: Constraints) -> str:
    up = min(-(-count // limits.step) * limits.step, limits.num_experts)
    down = count // limits.step * limits.step
    return f"the nearest counts are {down} and {up}" if down >= limits.smallest_count else f"the nearest count is {up}"


def round_up_to_step(count: int, limits: Constraints) -> int:
    """The next count that is aligned and divides over the groups."""
    return -(-count // limits.step) * limits.step


def best_first(phi: np.ndarray, protected: Collection[int] = ()) -> list[int]:
    """Expert ids, the ones to keep first: protected, then high scores, then low ids."""
    return sorted(range(len(phi)), key=lambda expert: (expert not in protected, -phi[expert], expert))


def keep_best(phi: np.ndarray, count: int, limits: Constraints, protected: Collection[int] = ()) -> Kept:
    """The best `count` experts of a layer, the same number in every group.

    Raises:
        ConstraintError: more experts are protected than may stay.
    """
    kept: list[int] = []
    per_group = count // limits.n_group
    order = best_first(phi, protected)
    for group in range(limits.n_group):
        members = [expert for expert in order if limits.group_of(expert) == group]
        wanted = [expert for expert in members if expert in protected]
        if len(wanted) > per_group:
            raise ConstraintError(
                f"{len(wanted)} experts are protected where {per_group} may stay: {sorted(wanted)}",
                "protect fewer experts or keep more",
            )
        kept += members[:per_group]
    return tuple(sorted(kept))


def drop_lowest(
    phis: Sequence[np.ndarray],
    count: int,
    limits: Constraints,
    *,
    floor: int,
    protected: Sequence[Collection[int]] = (),
) -> list[Kept]:
    """Remove the `count` lowest experts of all layers together, respecting the floors of layers and groups.

    Args:
        phis: scores of each layer, [n].
        count: experts to remove in total.
        limits: of the router; a group never falls below `limits.smallest_group`.
        floor: fewest experts that stay in a layer.
        protected: per layer, ids that stay.

    Returns:
        Ascending kept ids of each layer.

    Raises:
        ConstraintError: floors and protected experts do not leave `count` experts to remove.
    """
    guarded = list(protected) or [()] * len(phis)
    kept = [set(range(len(phi))) for phi in phis]
    groups = [[len(phi) // limits.n_group] * limits.n_group for phi in phis]
    order = sorted(
        ((float(phi[expert]), layer, expert) for layer, phi in enumerate(phis) for expert in range(len(phi))),
        key=lambda entry: (entry[0], -entry[1], -entry[2]),
    )
    removed = 0
    for _, layer, expert in order:
        if removed == count:
            break
        group = limits.group_of(expert)
        if expert in guarded[layer] or len(kept[layer]) <= floor or groups[layer][group] <= limits.smallest_group:
            continue
        kept[layer].remove(expert)
        groups[layer][group] -= 1
        removed += 1
    if removed < count:
        raise ConstraintError(
            f"only {removed} of {count} experts can be removed: every layer keeps at least {floor}"
            + (", and some are protected" if any(guarded) else ""),
            "ask for a smaller ratio",
        )
    return [tuple(sorted(layer)) for layer in kept]


def slots_needed(kept: Sequence[Kept], limits: Constraints) -> int:
    """Stored count that holds every layer: the largest group of any layer decides, aligned."""
    largest = max(
        sum(limits.group_of(expert) == group for expert in layer) for layer in kept for group in range(limits.n_group)
    )
    per_group = largest
    while per_group * limits.n_group % limits.align:
        per_group += 1
    return per_group * limits.n_group


def fill_slots(phis: Sequence[np.ndarray], kept: Sequence[Kept], count: int, limits: Constraints) -> list[Kept]:
    """Give every layer `count` experts: what a global ranking kept, and the best of what it dropped."""
    return [keep_best(phi, count, limits, protected=layer) for phi, layer in zip(phis, kept)]


def place_in_slots(kept: Kept, count: int, num_experts: int, n_group: int) -> tuple[int | None, ...]:
    """Which expert sits in each stored slot; None = an empty slot.

    Kept experts keep their order and their group; empty slots are the last ones of each group.
    """
    slots: list[int | None] = []
    for group in range(n_group):
        members: list[int | None] = [expert for expert in kept if expert * n_group // num_experts == group]
        slots += members + [None] * (count // n_group - len(members))
    return tuple(slots)
