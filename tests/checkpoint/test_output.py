"""A whole checkpoint: right tensors, right names, right index, the files around it, and the same bytes every time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import checkpoint_job
from support.checkpoint_files import (
    CONFIG,
    entry,
    hub_snapshot,
    random_tensors,
    save_sharded,
    save_single,
    sha256,
    tree,
)

from xmac_cli.checkpoint.directory import Checkpoint
from xmac_cli.checkpoint.output import StagedOutput, name_shards, write_checkpoint
from xmac_cli.checkpoint.writer import PlannedTensor, ShardPlan
from xmac_cli.cli.errors import ConstraintError, InputError, ResumeMismatchError, UsageError, XmacError


def copy_plans(source: Checkpoint) -> list[ShardPlan]:
    return [
        ShardPlan(shard.path.name, tuple(map(PlannedTensor.copy_of, shard.tensors.values())), shard.metadata)
        for shard in source.shards
    ]


def write(source: Path, out: Path, plans: list[ShardPlan] | None = None, **options: Any) -> Path:
    checkpoint = Checkpoint.open(source)
    config = options.pop("config", checkpoint.config)
    with StagedOutput(out, overwrite=False, resume=options.pop("resume", False), job_key="k") as staged:
        complete = write_checkpoint(
            staged, plans or copy_plans(checkpoint), config=config, source=checkpoint, **options
        )
        assert complete
        staged.commit()
    return out


@pytest.fixture
def source(tmp_path: Path) -> Path:
    names = [[f"l.{shard}.e.{e}" for e in range(4)] + [f"l.{shard}.gate"] for shard in range(4)]
    root = save_sharded(tmp_path / "in", [random_tensors(part, n) for n, part in enumerate(names)])
    (root / "tokenizer.json").write_text('{"ü": 1}')
    (root / "pytorch_model.bin").write_text("pickle")
    (root / "code").mkdir()
    (root / "code" / "modeling.py").write_text("x = 1\n")
    return root


def test_an_unchanged_copy_is_byte_identical_and_leaves_duplicate_weights_behind(source: Path, tmp_path: Path) -> None:
    expected = tree(source)
    del expected["pytorch_model.bin"]
    index = json.loads(expected.pop("model.safetensors.index.json"))
    written = tree(write(source, tmp_path / "out"))
    assert json.loads(written.pop("model.safetensors.index.json")) == index
    assert written == expected
    assert set(Checkpoint.open(tmp_path / "out").tensors) == set(Checkpoint.open(source).tensors)


def test_surgery_loads_with_the_library_and_equals_torch_indexing(source: Path, tmp_path: Path) -> None:
    assert checkpoint_job.run(source, tmp_path / "out")
    out = Checkpoint.open(tmp_path / "out")
    assert [shard.path.name for shard in out.shards] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    original = {k: v for path in source.glob("*.safetensors") for k, v in load_file(path).items()}
    written = {k: v for path in (tmp_path / "out").glob("*.safetensors") for k, v in load_file(path).items()}
    stored = [list(shard.tensors) for shard in Checkpoint.open(source).shards]
    kept = {*stored[0], *(name for part in stored[1:-1] for name in part[::2])}
    kept |= {name for part in stored[1:-1] for name in part if name.endswith("gate")}
    assert set(written) == kept
    for name, tensor in written.items():
        assert torch.equal(tensor, original[name][: len(tensor)])
    total = sum(tensor.numel() * 2 for tensor in written.values())
    assert out.index is not None
    assert out.index["metadata"] == {"total_size": total}
    assert out.config == {**CONFIG, "pruned": True}
    assert list(out.config)[:4] == list(CONFIG), "the order of config keys is kept"


def test_a_single_file_stays_a_single_file(tmp_path: Path) -> None:
    source = save_single(tmp_path / "in", random_tensors(["a", "b"], 1))
    plans = copy_plans(Checkpoint.open(source))
    plans = [replace(plans[0], tensors=plans[0].tensors[1:])]
    out = write(source, tmp_path / "out", plans)
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors"}
    assert set(load_file(out / "model.safetensors")) == {plans[0].tensors[0].name}


def test_a_lone_file_of_another_name_becomes_model_safetensors(tmp_path: Path) -> None:
    source = save_single(tmp_path / "in", random_tensors(["a"], 1))
    (source / "model.safetensors").rename(source / "weights.safetensors")
    assert (write(source, tmp_path / "out") / "model.safetensors").exists()


def test_empty_shards_are_dropped_and_the_rest_renumbered(source: Path) -> None:
    checkpoint = Checkpoint.open(source)
    plans = copy_plans(checkpoint)
    plans[1] = replace(plans[1], tensors=())
    named = name_shards(plans, checkpoint)
    assert [plan.file_name for plan in named] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert named[1].tensors == plans[2].tensors
    only = name_shards([replace(plan, tensors=()) for plan in plans[:-1]] + plans[-1:], checkpoint)
    assert [plan.file_name for plan in only] == ["model-00001-of-00001.safetensors"]
    with pytest.raises(ConstraintError, match="no tensors"):
        name_shards([replace(plan, tensors=()) for plan in plans], checkpoint)


def test_a_hub_snapshot_becomes_plain_files(source: Path, tmp_path: Path) -> None:
    snapshot = hub_snapshot(tmp_path / "cache", tree(source))
    plain, from_cache = write(source, tmp_path / "a"), write(snapshot, tmp_path / "b")
    assert tree(plain) == tree(from_cache)
    assert not any(path.is_symlink() for path in from_cache.rglob("*"))


def test_linking_and_copying_give_the_same_tree(source: Path, tmp_path: Path) -> None:
    before = tree(source)
    assert checkpoint_job.run(source, tmp_path / "copied")
    assert checkpoint_job.run(source, tmp_path / "linked", link=True)
    assert tree(tmp_path / "copied") == tree(tmp_path / "linked")
    for path in (tmp_path / "linked").glob("*.safetensors"):
        path.unlink()
    assert tree(source) == before


def test_linked_snapshots_share_the_blob_and_not_the_symlink(source: Path, tmp_path: Path) -> None:
    snapshot = hub_snapshot(tmp_path / "cache", tree(source))
    out = write(snapshot, tmp_path / "out", link=True)
    assert not any(path.is_symlink() for path in out.rglob("*"))
    assert tree(out).keys() == tree(source).keys() - {"pytorch_model.bin"}


def test_every_record_is_the_sha256_of_its_file(source: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(source)
    with StagedOutput(tmp_path / "out", overwrite=False, resume=False, job_key="k") as staged:
        write_checkpoint(staged, copy_plans(checkpoint), config=checkpoint.config, source=checkpoint)
        assert len(staged.done) == 4
        for name, record in staged.done.items():
            assert record.sha256 == sha256(staged.path / name)
            assert record.size == (staged.path / name).stat().st_size


def fail_after(shards: int) -> Any:
    """A Progress whose task raises once that many bytes of shards are done."""

    class Task:
        def __init__(self) -> None:
            self.seen = 0

        def advance(self, amount: float = 1) -> None:
            self.seen += int(amount)
            if self.seen > shards * 1000:
                raise KeyboardInterrupt

        def __enter__(self) -> Task:
            return self

        def __exit__(self, *_: object) -> None:
            return

    class Interrupting:
        def task(self, description: str, total: float | None, unit: str = "") -> Task:
            return Task()

    return Interrupting()


def test_a_resumed_run_writes_only_what_is_missing(source: Path, tmp_path: Path) -> None:
    reference = tree(write(source, tmp_path / "reference"))
    with pytest.raises(KeyboardInterrupt):
        write(source, tmp_path / "out", progress=fail_after(3))
    assert not (tmp_path / "out").exists()
    done = {path.name: path.stat().st_ino for path in (tmp_path / "out.partial" / "tree").glob("*.safetensors")}
    assert 1 <= len(done) <= 3
    out = write(source, tmp_path / "out", resume=True)
    assert tree(out) == reference
    assert {name: (out / name).stat().st_ino for name in done} == done, "finished shards are not written again"


def test_a_source_that_changed_in_between_is_written_again(source: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write(source, tmp_path / "out", progress=fail_after(3))
    first = source / "model-00001-of-00004.safetensors"
    save_file(random_tensors(list(load_file(first)), 77), first, metadata={"format": "pt"})
    out = write(source, tmp_path / "out", resume=True)
    assert tree(out) == tree(write(source, tmp_path / "reference"))


def test_a_resumed_run_with_fewer_shards_leaves_no_stale_one(source: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write(source, tmp_path / "out", progress=fail_after(3))
    plans = copy_plans(Checkpoint.open(source))[2:]
    out = write(source, tmp_path / "out", plans, resume=True)
    assert len(list(out.glob("*.safetensors"))) == 2
    assert tree(out) == tree(write(source, tmp_path / "reference", plans))


def test_a_disk_that_is_too_small_is_found_before_the_first_byte(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 1 << 40, 1000))
    with pytest.raises(XmacError, match="GiB are needed"):
        write(source, tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


def test_a_plan_that_does_not_add_up_stops_before_the_first_byte(source: Path, tmp_path: Path) -> None:
    plans = copy_plans(Checkpoint.open(source))
    bad = replace(plans[-1].tensors[0], shape=(1,))
    plans[-1] = replace(plans[-1], tensors=(bad,))
    with pytest.raises(InputError, match="is planned with"):
        write(source, tmp_path / "out", plans)
    assert not (tmp_path / "out.partial").exists()


def test_attachments_travel_while_the_config_names_them(source: Path, tmp_path: Path) -> None:
    section = {"attachments": {"gate": {"folder": "attachments/gate", "depends_on": "x"}}}
    (source / "config.json").write_text(json.dumps({**CONFIG, "xmac": section}))
    folder = source / "attachments" / "gate"
    folder.mkdir(parents=True)
    save_file(random_tensors(["g"], 1), folder / "gate.safetensors")
    with_it = write(source, tmp_path / "with")
    assert (with_it / "attachments/gate/gate.safetensors").read_bytes() == (folder / "gate.safetensors").read_bytes()
    without = write(source, tmp_path / "without", config=dict(CONFIG))
    assert not (without / "attachments").exists()


def test_an_attachment_with_a_link_outside_is_refused(source: Path, tmp_path: Path) -> None:
    section = {"attachments": {"gate": {"folder": "gate", "depends_on": "x"}}}
    (source / "config.json").write_text(json.dumps({**CONFIG, "xmac": section}))
    (source / "gate").mkdir()
    (tmp_path / "secret").write_text("s")
    (source / "gate" / "weights").symlink_to(tmp_path / "secret")
    with pytest.raises(InputError, match="leads outside"):
        write(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


SHARES = 3


def test_shares_in_any_order_make_the_same_output(source: Path, tmp_path: Path) -> None:
    assert checkpoint_job.run(source, tmp_path / "reference")
    out = tmp_path / "out"
    assert not checkpoint_job.run(source, out, shares=(2, SHARES))
    assert not checkpoint_job.run(source, out, shares=(3, SHARES))
    assert not out.exists()
    assert checkpoint_job.run(source, out, shares=(1, SHARES)), "the last share publishes"
    assert tree(out) == tree(tmp_path / "reference")
    assert not (tmp_path / "out.partial").exists()


def test_shares_at_the_same_time_publish_exactly_once(source: Path, tmp_path: Path) -> None:
    assert checkpoint_job.run(source, tmp_path / "reference")
    for attempt in range(5):
        out = tmp_path / f"out{attempt}"
        published: list[bool] = []
        begin = threading.Barrier(SHARES)

        def work(share: int, out: Path = out, published: list[bool] = published, begin: Any = begin) -> None:
            begin.wait()
            published.append(checkpoint_job.run(source, out, shares=(share, SHARES)))

        threads = [threading.Thread(target=work, args=(share,)) for share in range(1, SHARES + 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert sorted(published) == [False, False, True]
        assert tree(out) == tree(tmp_path / "reference")


def test_every_share_must_have_run_even_one_that_had_nothing_to_do(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for share in range(1, 9):
        assert not checkpoint_job.run(source, out, shares=(share, 9))
        assert not checkpoint_job.run(source, out, shares=(share, 9))
    assert checkpoint_job.run(source, out, shares=(9, 9))


def test_shares_of_another_job_or_number_do_not_mix(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    checkpoint_job.run(source, out, shares=(1, 3))
    with pytest.raises(ResumeMismatchError, match="3 shares, not 2"):
        checkpoint_job.run(source, out, shares=(2, 2))
    with pytest.raises(ResumeMismatchError, match="other inputs"):
        checkpoint_job.run(source, out, shares=(2, 3), key="another")


def test_one_process_can_finish_what_shares_began(source: Path, tmp_path: Path) -> None:
    assert checkpoint_job.run(source, tmp_path / "reference")
    checkpoint_job.run(source, tmp_path / "out", shares=(1, 3))
    assert checkpoint_job.run(source, tmp_path / "out", resume=True)
    assert tree(tmp_path / "out") == tree(tmp_path / "reference")


def test_the_same_share_cannot_run_twice_at_once_and_outsiders_keep_out(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with StagedOutput(out, overwrite=False, resume=False, job_key="job", shares=(1, 2)):
        with pytest.raises(UsageError, match="another process makes share 1/2"):
            checkpoint_job.run(source, out, shares=(1, 2))
        with pytest.raises(UsageError, match="another process is writing"):
            checkpoint_job.run(source, out)
        assert not checkpoint_job.run(source, out, shares=(2, 2))
    assert checkpoint_job.run(source, out, shares=(1, 2))


def test_a_share_needs_an_output_staged_for_it(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="staged for it"):
        write(source, tmp_path / "out", shards=(1, 2))


def test_memory_stays_small_whatever_the_shard_size(tmp_path: Path) -> None:
    """A shard of 1 GiB passes through a process that may not use more than 1 GiB of address space."""
    root = tmp_path / "in"
    root.mkdir()
    (root / "config.json").write_text("{}")
    size = 1 << 30
    text = json.dumps({"a": entry("U8", [size], 0, size), "b": entry("U8", [8], size, size + 8)}).encode()
    with (root / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.seek(8 + len(text) + size)
        file.write(b"12345678")
    code = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "from pathlib import Path\n"
        "from support import checkpoint_job\n"
        "assert checkpoint_job.run(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "print(Path('/proc/self/status').read_text())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(root), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout.split("VmHWM:")[1].split()[0]) << 10
    assert peak < 60 << 20
    out = tmp_path / "out" / "model.safetensors"
    assert out.stat().st_size >= size
    assert out.stat().st_blocks * 512 < 1 << 20, "holes stay holes"
