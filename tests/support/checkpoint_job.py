"""A small surgery as a program of its own, so that tests can kill it, split it and run it several times at once.

It keeps every other tensor of each shard, leaves the first shard as it is, drops the last one, and replaces `gate`
tensors by their first rows. Run as a script it never imports torch.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from xmac_cli.checkpoint.directory import Checkpoint
from xmac_cli.checkpoint.lineage import write_xmac_json
from xmac_cli.checkpoint.output import StagedOutput, write_checkpoint
from xmac_cli.checkpoint.writer import ByteRange, PlannedTensor, ShardPlan


def surgery_plans(source: Checkpoint) -> list[ShardPlan]:
    """The plans of the surgery described above."""
    plans = []
    for number, shard in enumerate(source.shards):
        tensors = []
        for place, info in enumerate(shard.tensors.values()):
            if number == 0 or (place % 2 == 0 and number < len(source.shards) - 1):
                tensors.append(PlannedTensor.copy_of(info))
            elif info.name.endswith("gate") and number < len(source.shards) - 1:
                piece = ByteRange(info.file, info.start, info.nbytes // 2)
                tensors.append(PlannedTensor(info.name, info.dtype, (info.shape[0] // 2, *info.shape[1:]), (piece,)))
        plans.append(ShardPlan(shard.path.name, tuple(tensors), shard.metadata))
    return plans


def run(
    source: Path,
    destination: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    link: bool = False,
    key: str = "job",
    shares: tuple[int, int] | None = None,
) -> bool:
    """Do the surgery; True when `destination` is complete."""
    checkpoint = Checkpoint.open(source)
    config = {**checkpoint.config, "pruned": True}
    with StagedOutput(destination, overwrite=overwrite, resume=resume, job_key=key, shares=shares) as staged:
        if staged.finished:
            return True
        complete = write_checkpoint(staged, surgery_plans(checkpoint), config=config, source=checkpoint, link=link)
        if complete:
            step = {"verb": "test", "version": "0", "options": {}, "seed": 0, "input": None, "output_fingerprint": None}
            write_xmac_json(staged.path, step, {}, [], known=staged.done)
        return staged.commit()


def kill_at_event(number: int) -> None:
    """Die by SIGKILL at the given one of the interpreter's audit events (open, rename, mkdir, remove, flock, ...)."""
    seen = 0

    def hook(event: str, _: object) -> None:
        nonlocal seen
        if event.startswith(("os.", "shutil.", "fcntl.", "open")):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def count_events() -> list[int]:
    """Count the events that `kill_at_event` would count from now on."""
    seen = [0]

    def hook(event: str, _: object) -> None:
        seen[0] += event.startswith(("os.", "shutil.", "fcntl.", "open"))

    sys.addaudithook(hook)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=Path)
    parser.add_argument("destination", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument("--link", action="store_true")
    parser.add_argument("--share", default="")
    parser.add_argument("--kill-at", type=int, default=0)
    parser.add_argument("--start-at", type=float, default=0.0)
    args = parser.parse_args()
    shares = tuple(map(int, args.share.split("/"))) if args.share else None
    time.sleep(max(args.start_at - time.time(), 0.0))
    print("ready", flush=True)
    seen = count_events()
    if args.kill_at:
        kill_at_event(args.kill_at)
    flags = {"resume": args.resume, "overwrite": args.overwrite, "link": args.link}
    done = run(args.source, args.destination, shares=shares, **flags)  # type: ignore[arg-type]
    print(seen[0], "complete" if done else "share", flush=True)


if __name__ == "__main__":
    main()
