"""SIGKILL at random moments, then resume: the tree is the one of an uninterrupted run, and never there too early."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from support.prune_cases import mixtral_config, random_scores, tree_hash, write_files

from xmac_cli.cli.errors import ResumeMismatchError
from xmac_cli.prune_moe.budget import Budget
from xmac_cli.prune_moe.layout import sniff_layout
from xmac_cli.prune_moe.plan import make_plan, save_plan
from xmac_cli.prune_moe.surgery import apply_plan

LAYERS, EXPERTS, WIDTH, FFN = 6, 8, 64, 96

# Applies a plan, but dawdles after every piece of work, so that a kill can hit any moment.
DAWDLER = """
import sys, time
from contextlib import contextmanager
from pathlib import Path
from xmac_cli.prune_moe.surgery import apply_plan

class Task:
    def advance(self, amount=1):
        time.sleep(0.01)

class Dawdle:
    @contextmanager
    def task(self, *args, **kwargs):
        yield Task()
    def metric(self, values): pass
    def note(self, text): pass

src, dst, plan = map(Path, sys.argv[1:4])
print("ready", flush=True)
apply_plan(src, dst, plan, progress=Dawdle(), resume=True)
"""


@pytest.fixture
def job(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint of six shards, and a plan for it."""
    rng = np.random.default_rng(0)
    shards = []
    for layer in range(LAYERS):
        block = f"model.layers.{layer}.block_sparse_moe"
        shard = {f"{block}.gate.weight": rng.normal(size=(EXPERTS, WIDTH)).astype(np.float32)}
        for expert in range(EXPERTS):
            for name in ("w1", "w2", "w3"):
                shard[f"{block}.experts.{expert}.{name}.weight"] = rng.normal(size=(FFN, WIDTH)).astype(np.float32)
        shards.append(shard)
    config = mixtral_config(EXPERTS) | {"num_hidden_layers": LAYERS, "hidden_size": WIDTH}
    source = write_files(tmp_path / "source", config, *shards)
    layout = sniff_layout(source)
    save_plan(tmp_path / "plan.json", make_plan(layout, random_scores(layout), Budget.of(keep=5)))
    return source, tmp_path / "plan.json"


def start(source: Path, result: Path, plan: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", DAWDLER, str(source), str(result), str(plan)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def test_killed_runs_resume_to_the_same_tree(job: tuple[Path, Path], tmp_path: Path) -> None:
    source, plan = job
    apply_plan(source, tmp_path / "whole", plan)
    expected = tree_hash(tmp_path / "whole")
    result = tmp_path / "out"

    begin = time.monotonic()
    assert start(source, tmp_path / "timed", plan).wait() == 0
    whole_run = time.monotonic() - begin

    rng = random.Random(4)
    kills = 0
    while kills < 5:
        process = start(source, result, plan)
        time.sleep(rng.random() * whole_run / 4)
        process.send_signal(signal.SIGKILL)
        if process.wait() == 0:
            break
        kills += 1
        assert not result.exists() or tree_hash(result) == expected  # absent, or complete
    assert kills >= 3
    assert apply_plan(source, result, plan, resume=True, overwrite=True)
    assert tree_hash(result) == expected
    assert not (tmp_path / "out.partial").exists()


def test_finished_shards_are_not_written_again(job: tuple[Path, Path], tmp_path: Path) -> None:
    source, plan = job
    result, partial = tmp_path / "out", tmp_path / "out.partial" / "tree"
    process = start(source, result, plan)
    while len(list(partial.glob("model-*.safetensors"))) < 2:
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not result.exists()
    done = {path.name: path.stat().st_ino for path in partial.glob("model-*.safetensors")}
    assert apply_plan(source, result, plan, resume=True)
    kept = [name for name, inode in done.items() if (result / name).stat().st_ino == inode]
    assert len(kept) >= len(done) - 1  # the last one may have been renamed before it was noted


def test_another_plan_or_source_does_not_continue(job: tuple[Path, Path], tmp_path: Path) -> None:
    source, plan = job
    result, partial = tmp_path / "out", tmp_path / "out.partial" / "tree"
    process = start(source, result, plan)
    while not list(partial.glob("model-*.safetensors")):
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    layout = sniff_layout(source)
    other = make_plan(layout, random_scores(layout, seed=1), Budget.of(keep=5))
    with pytest.raises(ResumeMismatchError) as caught:
        apply_plan(source, result, other, resume=True)
    assert caught.value.exit_code == 6
    assert apply_plan(source, result, other)  # without --resume the new job starts over
