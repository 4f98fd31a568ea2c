"""Launch configurations: read from the JSON that ships beside a kernel, never tuned while a program runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class LaunchConfig:
    """BLOCK_T tokens a program, and its number of warps."""

    block_tokens: int
    num_warps: int


@cache
def _table(path: Path) -> dict[int, list[list[int]]]:
    content = json.loads(path.read_text(encoding="utf-8"))
    return {int(arch): rows for arch, rows in content.items() if arch.isdigit()}


def launch_config(path: Path, arch: int, n: int, k: int) -> LaunchConfig:
    """The configuration for n experts and top-k on an architecture such as 90; unknown ones use the nearest lower.

    Raises:
        ValueError: no row covers n and k.
    """
    table = _table(path)
    known = max((a for a in table if a <= arch), default=min(table))
    for largest_n, largest_k, block_tokens, num_warps in table[known]:
        if n <= largest_n and k <= largest_k:
            return LaunchConfig(block_tokens, num_warps)
    raise ValueError(f"no launch configuration for {n} experts and top-{k}")
