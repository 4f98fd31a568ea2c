"""The flags every verb understands, beside its own options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from xmac_cli.cli.errors import UsageError
from xmac_cli.cli.options import Option, check_values

_RUN = "Running"
_OUT = "Output"


@dataclass(frozen=True)
class RunSettings:
    """How a verb runs; none of these changes what the method is, only where, how fast and how safely it works."""

    overwrite: Annotated[bool, Option("replace an existing OUTPUT once the new one is complete", panel=_OUT)] = False
    resume: Annotated[bool, Option("continue interrupted work instead of starting again", panel=_RUN)] = False
    link: Annotated[
        bool, Option("reflink or hard-link shards that do not change instead of copying them", panel=_OUT)
    ] = False
    device: Annotated[str, Option("auto, cpu, cuda or cuda:N", metavar="DEVICE", panel=_RUN)] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Option("dtype to compute in; auto is the checkpoint's own", panel=_RUN),
    ] = "auto"
    seed: Annotated[int, Option("seed of everything random", ge=0, panel=_RUN)] = 0
    threads: Annotated[int | None, Option("CPU threads (default: all cores)", ge=1, panel=_RUN)] = None
    trust_remote_code: Annotated[
        bool, Option("run Python code that the checkpoint ships; never without this flag", panel=_RUN)
    ] = False
    report: Annotated[
        Path | None, Option("write report.html, report.json and plots to this directory", metavar="DIR", panel=_OUT)
    ] = None
    plots: Annotated[Path | None, Option("write the plots to this directory", metavar="DIR", panel=_OUT)] = None

    def __post_init__(self) -> None:
        check_values(self)
        kind, _, number = self.device.partition(":")
        if kind not in ("auto", "cpu", "cuda") or (number and (kind != "cuda" or not number.isdigit())):
            raise UsageError(f"--device is auto, cpu, cuda or cuda:N, not '{self.device}'")
