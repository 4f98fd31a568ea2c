"""Several processes of one launch (`accelerate launch -m xmac_cli VERB ...`) as one: who am I, and sharing evaluations.

The first process does what a single one would do: it writes, prints and keeps the state. The others load the model too
and take their part of the expensive evaluations. All of them run the same deterministic code in lock step.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")


def process_rank() -> tuple[int, int]:
    """(rank, number of processes) of this launch, from the environment alone; (0, 1) for an ordinary run."""
    size = os.environ.get("WORLD_SIZE", "1")
    rank = os.environ.get("RANK", "0")
    if not (size.isdigit() and rank.isdigit()) or int(size) < 2:
        return 0, 1
    return int(rank), int(size)


def join_processes(device: str) -> str:
    """Join the process group, if there is one.

    Args:
        device: what the user asked for: "auto", "cpu", "cuda" or "cuda:N".

    Returns:
        the device of this process: its own GPU where "auto" or "cuda" was asked for and there are several processes.
    """
    if process_rank()[1] == 1:
        return device
    import torch
    from accelerate import PartialState

    on_cpu = device == "cpu" or not torch.cuda.is_available()
    state = PartialState(cpu=on_cpu)
    atexit.register(state.destroy_process_group)
    return "cpu" if on_cpu else f"cuda:{state.local_process_index}"


def from_first(value: T) -> T:
    """The value that the first process holds, in every process."""
    if process_rank()[1] == 1:
        return value
    import torch.distributed as group

    holder = [value]
    group.broadcast_object_list(holder, src=0)
    return holder[0]


def shared_evaluation(evaluate: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    """Let every process evaluate its part of the rows.

    Args:
        evaluate: rows [B, N] -> float64 [B], each row on its own.

    Returns:
        the same function; every process gets all B values, in order. Every process must call it with the same rows.
    """
    rank, size = process_rank()
    if size == 1:
        return evaluate

    def together(rows: np.ndarray) -> np.ndarray:
        import numpy as np
        import torch.distributed as group

        mine = evaluate(rows[rank::size]) if rank < len(rows) else np.zeros(0)
        parts: list[np.ndarray | None] = [None] * size
        group.all_gather_object(parts, mine)
        values = np.empty(len(rows))
        for index, part in enumerate(parts):
            values[index::size] = part
        return values

    return together
