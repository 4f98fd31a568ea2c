"""Option values that are little languages of their own: LAYER:EXPERT lists, layer ranges, shares."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from xmac_cli.cli.errors import UsageError


def parse_protected(texts: Iterable[str]) -> set[tuple[int, int]]:
    """Read --protect.

    Args:
        texts: such as "3:17" or "3:17,4:2".

    Returns:
        (decoder layer, expert) pairs.

    Raises:
        UsageError: a part is not LAYER:EXPERT.
    """
    pairs = set()
    for part in (part.strip() for text in texts for part in text.split(",")):
        match = re.fullmatch(r"(\d+):(\d+)", part)
        if match is None:
            raise UsageError(f"--protect takes LAYER:EXPERT[,LAYER:EXPERT...], not '{part}'")
        pairs.add((int(match[1]), int(match[2])))
    return pairs


def parse_layers(text: str | None) -> set[int] | None:
    """Read --layers, such as "0-3,7"; None means all.

    Raises:
        UsageError: a part is neither a number nor a range.
    """
    if text is None:
        return None
    chosen: set[int] = set()
    for part in (part.strip() for part in text.split(",")):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None or (match[2] and (int(match[2]) < int(match[1]) or int(match[2]) > 100_000)):
            raise UsageError(f"--layers takes numbers and ranges such as 0-3,7, not '{part}'")
        chosen.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return chosen


def parse_share(text: str | None) -> tuple[int, int] | None:
    """Read --shards, such as "1/4".

    Raises:
        UsageError: it is not I/N with 1 <= I <= N.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"--shards takes I/N with I from 1 to N, not '{text}'")
    return int(match[1]), int(match[2])


def parse_temper(text: str) -> float | Literal["auto"]:
    """Read --rgis-temper: a number >= 0, or "auto".

    Raises:
        UsageError: it is neither.
    """
    if text == "auto":
        return "auto"
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise UsageError(f"--rgis-temper is a number >= 0 or auto, not '{text}'")
    return value
