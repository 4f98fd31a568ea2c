"""Walk permutations by removal from the full set of players, several in lock step.

Algorithm 1 of Huang et al., NeurIPS 2025: start at V(all), remove one player after the other, and give each player the
drop in value that its removal caused; once the value has fallen below a share tau of V(all) the rest of the walk is
noise and is cut off (its marginals count as 0). Two shortcuts change nothing in the result: players known to be
inactive in the last evaluated coalition are removed without an evaluation, and V(empty) is evaluated once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xmac_cli.cli.errors import VerificationError
from xmac_cli.cli.progress import Task

BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
ValueFn = Callable[[BoolArray], float]
BatchValueFn = Callable[[BoolArray], FloatArray]


@dataclass(frozen=True)
class Truncation:
    """When a walk has lost so much value that the rest of it is cut off.

    The level of a coalition is its share of the full model's value. For a positive value such as 1/PPL that is
    (V - floor) / (V_full - floor) with floor 0, as published. A value on a log scale (`nll`, `kl`) has no meaningful
    ratio; its level is exp(V - V_full), which for V = -NLL is exactly the ratio of 1/PPL, so that the `nll` game stops
    where the `ppl` game stops.

    Args:
        threshold: tau; 0 never cuts off.
        floor: value that counts as level 0.
        logarithmic: the value is the logarithm of a positive quantity.
    """

    threshold: float = 0.5
    floor: float = 0.0
    logarithmic: bool = False

    def stops(self, values: FloatArray, v_full: float) -> BoolArray:
        """Which of the values lie below the threshold."""
        if self.threshold <= 0:
            return np.zeros(values.shape, dtype=bool)
        if self.logarithmic:
            return np.exp(np.minimum(values - v_full, 0.0)) < self.threshold
        span = v_full - self.floor
        return values - self.floor < self.threshold * span if span > 0 else np.zeros(values.shape, dtype=bool)


class CoalitionGame:
    """A characteristic function with a count of its evaluations.

    Args:
        num_players: N.
        value_fn: bool mask [N] -> value.
        value_fn_batch: bool masks [B, N] -> float64 [B]; used instead of `value_fn` when given.
        inactive: bool mask [N] of a coalition just evaluated -> bool [N], players whose removal from it provably
            changes nothing.
        task: a progress bar that advances with every evaluation.
    """

    def __init__(
        self,
        num_players: int,
        value_fn: ValueFn | None,
        value_fn_batch: BatchValueFn | None = None,
        inactive: Callable[[BoolArray], BoolArray] | None = None,
        task: Task | None = None,
    ) -> None:
        if value_fn is None and value_fn_batch is None:
            raise ValueError("a game needs a value function")
        self.num_players = num_players
        self.passes = 0
        self.task = task
        self.v_empty = float("nan")
        self._value_fn = value_fn
        self._value_fn_batch = value_fn_batch
        self._inactive = inactive

    def values(self, masks: BoolArray) -> FloatArray:
        """Values of the coalitions masks [B, N], float64 [B]."""
        empty = ~masks.any(axis=1)
        known = empty & np.isfinite(self.v_empty)
        values = np.full(masks.shape[0], self.v_empty)
        if not known.all():
            values[~known] = self._evaluate(masks[~known])
        if empty.any():
            self.v_empty = float(values[empty][0])
        return values

    def _evaluate(self, masks: BoolArray) -> FloatArray:
        if self._value_fn_batch is not None:
            values = np.asarray(self._value_fn_batch(masks), dtype=np.float64)
        elif self._value_fn is not None:
            values = np.array([self._value_fn(mask) for mask in masks], dtype=np.float64)
        self.passes += masks.shape[0]
        if self.task is not None:
            self.task.advance(masks.shape[0])
        if not np.isfinite(values).all():
            raise VerificationError(
                "the value of a coalition is not a finite number",
                hint="calibrate in float32, or use a value that is bounded (`ppl`, `recon`)",
            )
        return values

    def inactive(self, masks: BoolArray) -> BoolArray:
        """Players without influence in each of the coalitions just evaluated, bool [B, N]."""
        if self._inactive is None:
            return np.zeros_like(masks)
        return np.stack([self._inactive(mask) for mask in masks]) & masks


@dataclass(frozen=True)
class Walks:
    """Outcome of B walks; arrays are ordered by player, not by position.

    Args:
        marginals: float64 [B, N], drop in value at each player's removal, 0 behind the cut.
        evaluated: bool [B, N], players whose marginal is known exactly.
        v_stop: float64 [B], value at which the walk ended.
        depth: int64 [B], number of removals before the cut.
    """

    marginals: FloatArray
    evaluated: BoolArray
    v_stop: FloatArray
    depth: IntArray


def walk_permutations(
    permutations: IntArray, game: CoalitionGame, truncation: Truncation, v_full: float, *, capacity: int = 0
) -> Walks:
    """Walk B permutations at once; each step evaluates one coalition per walk that is still going.

    Args:
        permutations: int64 [B, N].
        game: the value function. V(all) must be its last evaluation when it knows inactive players.
        truncation: when to cut off.
        v_full: V(all).
        capacity: coalitions that one evaluation may hold. What the walks that are still going leave free is filled with
            their next steps, on the guess that they go on; a guess behind a cut is thrown away. 0 never guesses.
    """
    rows, n = permutations.shape
    masks = np.ones((rows, n), dtype=bool)
    marginals = np.zeros((rows, n))
    evaluated = np.zeros((rows, n), dtype=bool)
    value = np.full(rows, v_full)
    position = np.zeros(rows, dtype=np.int64)
    going = ~truncation.stops(value, v_full)
    idle = np.repeat(game.inactive(masks[:1]), rows, axis=0)
    foreseen: dict[tuple[int, int], tuple[float, BoolArray]] = {}
    while True:
        for row in np.flatnonzero(going & idle.any(axis=1)):
            # An inactive player leaves the output as it is, so the next inactive one may leave as well.
            while position[row] < n and idle[row, permutations[row, position[row]]]:
                player = permutations[row, position[row]]
                masks[row, player], evaluated[row, player] = False, True
                position[row] += 1
        moving = np.flatnonzero(going & (position < n))
        if not moving.size:
            break
        _evaluate_steps(permutations, masks, position, moving, game, capacity, foreseen)
        players = permutations[moving, position[moving]]
        masks[moving, players] = False
        steps = [foreseen.pop((int(row), int(position[row]))) for row in moving]
        values = np.array([step[0] for step in steps])
        marginals[moving, players] = value[moving] - values
        evaluated[moving, players] = True
        value[moving] = values
        position[moving] += 1
        idle[moving] = np.stack([step[1] for step in steps]) & masks[moving]
        going[moving] = ~truncation.stops(values, v_full)
    return Walks(marginals, evaluated, value, position)


def _evaluate_steps(
    permutations: IntArray,
    masks: BoolArray,
    position: IntArray,
    moving: IntArray,
    game: CoalitionGame,
    capacity: int,
    foreseen: dict[tuple[int, int], tuple[float, BoolArray]],
) -> None:
    """Make sure that `foreseen` holds the next step of every moving walk: its value and who is inactive after it."""
    wanted = [int(row) for row in moving if (int(row), int(position[row])) not in foreseen]
    if not wanted:
        return
    n = permutations.shape[1]
    ahead = max(1, capacity // len(wanted))
    keys: list[tuple[int, int]] = []
    coalitions: list[BoolArray] = []
    for row in wanted:
        mask = masks[row].copy()
        for step in range(int(position[row]), min(int(position[row]) + ahead, n)):
            mask[permutations[row, step]] = False
            keys.append((row, step))
            coalitions.append(mask.copy())
    stacked = np.stack(coalitions)
    values, inactive = game.values(stacked), game.inactive(stacked)
    foreseen.update({key: (float(values[i]), inactive[i]) for i, key in enumerate(keys)})
