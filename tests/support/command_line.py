"""Run the installed command as a user would; a small trained MoE to run it on."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

XMAC = [sys.executable, "-m", "xmac_cli"]


def xmac(*arguments: object, code: int = 0, **options: object) -> "subprocess.CompletedProcess[str]":
    """Run the command as a user would, on one thread, and check its exit code."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    command = [*XMAC, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, **options)
    assert done.returncode == code, done.stderr
    return done


@dataclass(frozen=True)
class Trained:
    """A checkpoint, its calibration flags and its held-out files."""

    model: Path
    calib: tuple[str, ...]
    held_out: tuple[Path, ...]
