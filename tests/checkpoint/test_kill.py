"""Killed at any moment and resumed, the output is the same; before completion there is no output."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import checkpoint_job
from support.checkpoint_files import random_tensors, save_sharded, tree

SHARDS = 10


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kill") / "in"
    names = [[f"l.{shard}.e.{e}.w" for e in range(6)] + [f"l.{shard}.gate"] for shard in range(SHARDS)]
    save_sharded(root, [random_tensors(part, 5 + n, rows=128, columns=512) for n, part in enumerate(names)])
    (root / "tokenizer.json").write_text("{}")
    (root / "sub").mkdir()
    (root / "sub" / "code.py").write_text("x = 1\n")
    return root


@pytest.fixture(scope="module")
def reference(source: Path) -> dict[str, bytes]:
    """The tree of an uninterrupted run."""
    assert checkpoint_job.run(source, source.with_name("reference"))
    return tree(source.with_name("reference"))


@pytest.fixture
def destination(source: Path, tmp_path: Path) -> Path:
    return tmp_path / "out"


def start(source: Path, destination: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, checkpoint_job.__file__, str(source), str(destination), *flags]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return output


def complete(destination: Path, reference: dict[str, bytes]) -> None:
    assert tree(destination) == reference
    assert [path.name for path in destination.parent.iterdir()] == [destination.name], "nothing else may be left"


def kill_after(process: subprocess.Popen[str], seconds: float) -> bool:
    """Send SIGKILL some time after the work began; True when that came before the end."""
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return process.returncode != 0


def test_ten_kills_at_random_moments(source: Path, reference: dict[str, bytes], destination: Path) -> None:
    dice = random.Random(11)
    process = start(source, destination)
    assert process.stdout is not None
    process.stdout.readline()
    began = time.monotonic()
    finish(process)
    usual = time.monotonic() - began
    killed = kept = 0
    journal = destination.with_name("out.partial") / "journal.jsonl"
    for _ in range(40):
        shutil.rmtree(destination, ignore_errors=True)
        flags: list[str] = []
        while kill_after(start(source, destination, *flags), dice.uniform(0.0, 0.8 * usual)):
            if destination.exists():
                break  # it came between publishing and the end
            killed += 1
            kept += journal.exists() and journal.read_bytes().count(b"\n") > 1
            flags = ["--resume"]
            if killed % 2:
                break
        finish(start(source, destination, "--resume", "--overwrite"))
        complete(destination, reference)
        if killed >= 10:
            break
    assert killed >= 10
    assert kept >= 3, "kills must have hit runs that had something worth resuming"


def test_a_kill_at_any_file_operation_is_survived(source: Path, reference: dict[str, bytes], destination: Path) -> None:
    events = int(finish(start(source, destination)).split()[1])
    assert events > 100
    journal = destination.with_name("out.partial") / "journal.jsonl"
    moments = sorted(set(range(1, events, events // 9)) | set(range(events - 9, events + 1)))
    resumed = 0
    for moment in moments:
        shutil.rmtree(destination, ignore_errors=True)
        process = start(source, destination, "--kill-at", str(moment))
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
        if destination.exists():
            assert tree(destination) == reference, "an output that exists is complete"
            if not journal.exists():
                continue  # killed after everything was done
        finish(start(source, destination, "--resume"))
        complete(destination, reference)
        resumed += 1
    assert resumed >= len(moments) - 3


def test_a_kill_while_an_old_output_is_replaced_leaves_the_old_or_the_new_one(
    source: Path, reference: dict[str, bytes], destination: Path
) -> None:
    old = {"config.json": b"{}", "old.txt": b"old"}
    destination.mkdir()
    events = int(finish(start(source, destination, "--overwrite")).split()[1])
    for moment in [events // 2, *range(events - 9, events + 1)]:
        shutil.rmtree(destination)
        destination.mkdir()
        for name, content in old.items():
            (destination / name).write_bytes(content)
        start(source, destination, "--overwrite", "--kill-at", str(moment)).communicate(timeout=60)
        assert tree(destination) in (old, reference)
        finish(start(source, destination, "--overwrite", "--resume"))
        complete(destination, reference)


def test_a_kill_with_linked_shards_never_harms_the_source(
    source: Path, reference: dict[str, bytes], destination: Path
) -> None:
    before = tree(source)
    for moment in (40, 60, 80):
        start(source, destination, "--link", "--kill-at", str(moment)).communicate(timeout=60)
        finish(start(source, destination, "--link", "--resume"))
        assert tree(destination) == reference
        shutil.rmtree(destination)
    assert tree(source) == before
