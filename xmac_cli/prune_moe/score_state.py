"""What an interrupted scoring run leaves behind: one `.npz` per game, and the key that says whose it is.

A file is replaced after every batch of permutations, by rename, so that it is always complete.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from xmac_cli.cli.errors import ResumeMismatchError
from xmac_cli.prune_moe.shapley import ShapleyState

_KEY_FILE = "scoring.json"


class ScoreStates:
    """States of the games of one scoring run.

    Args:
        directory: where they are kept; None keeps nothing.
        key: everything the result depends on, JSON-able.
        resume: continue what the directory holds; otherwise it is emptied of states.

    Raises:
        ResumeMismatchError: the directory belongs to a run with another key.
    """

    def __init__(self, directory: Path | None, key: Mapping[str, Any], *, resume: bool) -> None:
        self._directory = directory
        if directory is None:
            return
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(dict(key), sort_keys=True, indent=1) + "\n"
        key_file = directory / _KEY_FILE
        if resume and key_file.is_file():
            stored = key_file.read_text(encoding="utf-8")
            if stored != text:
                raise ResumeMismatchError(
                    f"the scoring state in {directory} belongs to {_difference(stored, key)}",
                    hint="run again without --resume, or with the options of the interrupted run",
                )
        else:
            for stale in directory.glob("game-*.npz"):
                stale.unlink()
            key_file.write_text(text, encoding="utf-8")

    def load(self, game: str) -> ShapleyState | None:
        """State of a game, or None when there is none.

        Raises:
            ResumeMismatchError: the file is damaged.
        """
        path = self._path(game)
        if path is None or not path.is_file():
            return None
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return ShapleyState.from_arrays(dict(arrays))
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise ResumeMismatchError(f"the scoring state {path} is damaged: {error}", "delete it") from error

    def save(self, game: str, state: ShapleyState) -> None:
        """Replace the state of a game."""
        path = self._path(game)
        if path is None:
            return
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            np.savez(file, **state.to_arrays())  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    def _path(self, game: str) -> Path | None:
        return None if self._directory is None else self._directory / f"game-{game}.npz"


def _difference(stored: str, key: Mapping[str, Any]) -> str:
    """Names the first option that differs."""
    try:
        old = json.loads(stored)
    except ValueError:
        return "an unreadable run"
    new = json.loads(json.dumps(dict(key)))
    changed = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    return f"a run with another {changed[0]}" if changed else "another run"
