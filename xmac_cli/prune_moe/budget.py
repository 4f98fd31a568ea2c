"""How much to remove: a share, a count, or a size to end with."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from xmac_cli.cli.errors import UsageError

_COUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMBT]?)\s*", re.IGNORECASE)
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?\s*", re.IGNORECASE)
_THOUSANDS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Budget:
    """Exactly one demand.

    Args:
        kind: "ratio" of routed experts to remove, "keep" experts per layer, "target_params" or "target_bytes".
        value: the number.
    """

    kind: Literal["ratio", "keep", "target_params", "target_bytes"]
    value: float | int

    @classmethod
    def of(
        cls,
        *,
        ratio: float | None = None,
        keep: int | None = None,
        target_params: str | int | None = None,
        target_size: str | int | None = None,
    ) -> Budget:
        """The one demand that is not None.

        Args:
            ratio: share of routed experts to remove, 0 < ratio < 1.
            keep: experts to keep in each layer.
            target_params: parameters to end with at most, as 16000000000 or "16B".
            target_size: bytes of tensors to end with at most, as 32212254720 or "30GiB" or "32GB".

        Raises:
            UsageError: none or several are given, or one cannot be read.
        """
        given = {"--ratio": ratio, "--keep": keep, "--target-params": target_params, "--target-size": target_size}
        named = [flag for flag, value in given.items() if value is not None]
        if len(named) != 1:
            raise UsageError(
                f"give exactly one of {', '.join(given)}" + (f", not {' and '.join(named)}" if named else "")
            )
        if ratio is not None:
            if not 0 < ratio < 1:
                raise UsageError(f"--ratio {ratio} is not between 0 and 1", "it is the share of experts to remove")
            return cls("ratio", float(ratio))
        if keep is not None:
            return cls("keep", int(keep))
        if target_params is not None:
            return cls("target_params", parse_count(target_params))
        return cls("target_bytes", parse_size(target_size if target_size is not None else ""))


def parse_count(text: str | int) -> int:
    """Read a number of parameters such as "16B", "350M" or 4300000."""
    match = _COUNT.fullmatch(str(text))
    if not match:
        raise UsageError(f"cannot read {text!r} as a number of parameters", "write it as 16B, 350M or 4300000")
    return round(float(match[1]) * _THOUSANDS[match[2].upper()])


def parse_size(text: str | int) -> int:
    """Read a size in bytes such as "30GiB" (2^30), "32GB" (10^9) or 4096."""
    match = _SIZE.fullmatch(str(text))
    if not match:
        raise UsageError(f"cannot read {text!r} as a size", "write it as 30GiB, 32GB or a number of bytes")
    unit = (match[2] or "").upper()
    return round(float(match[1]) * (_BINARY[unit] if match[3] else _THOUSANDS[unit]))
