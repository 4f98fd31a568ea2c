"""A shard written from ranges is the file that the plan says, byte for byte, and loads with the safetensors library."""

from __future__ import annotations

import json
import os
import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.checkpoint_files import entry, random_tensors, raw_file, sha256

from xmac_cli.checkpoint.copying import clone_or_link
from xmac_cli.checkpoint.header import read_header
from xmac_cli.checkpoint.tensors import tensor_bytes
from xmac_cli.checkpoint.writer import (
    ByteRange,
    PlannedTensor,
    ShardPlan,
    coalesce,
    unchanged_source,
    write_index,
    write_shard,
)
from xmac_cli.cli.errors import InputError

META = {"format": "pt"}


def whole(path: Path, name: str = "out.safetensors") -> ShardPlan:
    """The plan that copies every tensor of a file."""
    header = read_header(path)
    return ShardPlan(name, tuple(PlannedTensor.copy_of(info) for info in header.tensors.values()), header.metadata)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tensors: dict[str, torch.Tensor] = dict(random_tensors([f"e.{i}.w" for i in range(6)], 1))
    tensors |= {"gate": torch.randn(6, 5), "step": torch.tensor(3), "scale": torch.rand(3).to(torch.float8_e4m3fn)}
    (tmp_path / "in").mkdir()
    save_file(tensors, tmp_path / "in" / "model.safetensors", metadata={"format": "pt", "who": "test"})
    return tmp_path / "in" / "model.safetensors"


def test_kept_renamed_and_sliced_tensors_load_with_the_library(source: Path, tmp_path: Path) -> None:
    original = load_file(source)
    infos = read_header(source).tensors
    gate = infos["gate"]
    rows = [0, 1, 4]
    pieces = tuple(ByteRange(source, gate.start + row * 20, 20) for row in rows)
    plan = ShardPlan(
        "out.safetensors",
        (
            PlannedTensor("gate", "F32", (3, 5), pieces),
            PlannedTensor.copy_of(infos["e.4.w"], "e.2.w"),
            PlannedTensor.copy_of(infos["e.0.w"]),
            PlannedTensor("new", "BF16", (2,), (tensor_bytes(torch.tensor([1.5, -2.0], dtype=torch.bfloat16)),)),
            PlannedTensor.copy_of(infos["scale"]),
        ),
        META,
    )
    counted: list[int] = []
    record = write_shard(plan, tmp_path, on_bytes=counted.append)
    out = tmp_path / "out.safetensors"
    loaded = load_file(out)
    assert torch.equal(loaded["gate"], original["gate"][rows])
    assert torch.equal(loaded["e.2.w"], original["e.4.w"])
    assert torch.equal(loaded["e.0.w"], original["e.0.w"])
    assert torch.equal(loaded["scale"].view(torch.uint8), original["scale"].view(torch.uint8))
    assert loaded["new"].tolist() == [1.5, -2.0]
    assert record.size == plan.size == out.stat().st_size == sum(counted)
    assert record.sha256 == sha256(out)
    assert read_header(out).data_start % 8 == 0
    with safe_open(out, framework="pt") as file:
        assert file.metadata() == META
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["out.safetensors"]


def test_an_unchanged_shard_is_the_same_file(source: Path, tmp_path: Path) -> None:
    record = write_shard(whole(source), tmp_path)
    assert (tmp_path / "out.safetensors").read_bytes() == source.read_bytes()
    assert record.sha256 == sha256(source)


def test_unchanged_means_names_order_offsets_and_metadata(source: Path) -> None:
    plan = whole(source)
    assert unchanged_source(plan) == source
    renamed = replace(plan.tensors[0], name="other")
    assert unchanged_source(replace(plan, tensors=(renamed, *plan.tensors[1:]))) is None
    assert unchanged_source(replace(plan, tensors=plan.tensors[1:])) is None
    assert unchanged_source(replace(plan, tensors=plan.tensors[::-1])) is None
    assert unchanged_source(replace(plan, metadata=META)) is None
    first = plan.tensors[0]
    flat = replace(first, shape=(first.numel,))
    assert unchanged_source(replace(plan, tensors=(flat, *plan.tensors[1:]))) is None


def test_a_link_gives_the_same_bytes_and_hash_without_copying(source: Path, tmp_path: Path) -> None:
    counted: list[int] = []
    record = write_shard(whole(source), tmp_path, link=True, on_bytes=counted.append)
    out = tmp_path / "out.safetensors"
    assert out.read_bytes() == source.read_bytes()
    assert (record.size, record.sha256) == (source.stat().st_size, sha256(source))
    assert sum(counted) == record.size
    assert clone_or_link(source, tmp_path / "probe")
    assert out.samefile(source) == (tmp_path / "probe").samefile(source), "hard link exactly where no reflink exists"


def test_a_changed_shard_is_never_linked(source: Path, tmp_path: Path) -> None:
    plan = whole(source)
    write_shard(replace(plan, tensors=plan.tensors[:-1]), tmp_path, link=True)
    assert (tmp_path / "out.safetensors").stat().st_ino != source.stat().st_ino


def test_a_leftover_that_is_a_hard_link_to_the_source_is_never_written_into(source: Path, tmp_path: Path) -> None:
    before = source.read_bytes()
    assert clone_or_link(source, tmp_path / "out.safetensors.tmp")
    assert clone_or_link(source, tmp_path / "out.safetensors")
    plan = whole(source)
    write_shard(replace(plan, tensors=plan.tensors[1:]), tmp_path)
    assert source.read_bytes() == before
    assert set(load_file(tmp_path / "out.safetensors")) == {tensor.name for tensor in plan.tensors[1:]}


def test_neighbouring_ranges_become_one(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    pieces: list[ByteRange | bytes] = [b"he", b"ad", ByteRange(a, 0, 5), ByteRange(a, 5, 3), ByteRange(a, 9, 1)]
    pieces += [ByteRange(b, 10, 2), ByteRange(b, 0, 0), b"", ByteRange(b, 12, 2), b"x", b"y"]
    assert list(coalesce(pieces)) == [b"head", ByteRange(a, 0, 8), ByteRange(a, 9, 1), ByteRange(b, 10, 4), b"xy"]


def test_tensors_stay_aligned_for_their_dtype(source: Path, tmp_path: Path) -> None:
    infos = read_header(source).tensors
    wanted = [infos[name] for name in ("scale", "gate", "e.1.w", "step")]
    write_shard(ShardPlan("out.safetensors", tuple(map(PlannedTensor.copy_of, wanted)), META), tmp_path)
    header = read_header(tmp_path / "out.safetensors")
    widths = {"F8_E4M3": 1, "F32": 4, "BF16": 2, "I64": 8}
    assert all(info.start % widths[info.dtype] == 0 for info in header.tensors.values())
    assert list(header.tensors) == ["step", "gate", "e.1.w", "scale"]
    original = load_file(source)
    loaded = load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(loaded[n].view(torch.uint8), original[n].view(torch.uint8)) for n in ("gate", "e.1.w"))


def test_an_order_that_is_aligned_is_kept(source: Path, tmp_path: Path) -> None:
    infos = read_header(source).tensors
    names = ["e.5.w", "gate", "e.1.w", "scale"]
    tensors = tuple(PlannedTensor.copy_of(infos[name]) for name in names)
    write_shard(ShardPlan("out.safetensors", tensors, META), tmp_path)
    assert list(read_header(tmp_path / "out.safetensors").tensors) == names


def test_unknown_dtypes_are_copied_as_bytes(tmp_path: Path) -> None:
    data = random.Random(2).randbytes(27)
    path = raw_file(tmp_path / "in", {"q": entry("NF3", [8, 9], 0, 27)}, data)
    write_shard(whole(path), tmp_path)
    info = read_header(tmp_path / "out.safetensors").tensors["q"]
    assert (info.dtype, info.shape) == ("NF3", (8, 9))
    assert (tmp_path / "out.safetensors").read_bytes()[info.start : info.end] == data


def test_a_plan_that_does_not_add_up_is_refused_before_anything_is_written(source: Path, tmp_path: Path) -> None:
    plan = ShardPlan("out.safetensors", (PlannedTensor("a", "F32", (3,), (b"12345678",)),), META)
    with pytest.raises(InputError, match="planned with 8 bytes"):
        write_shard(plan, tmp_path)
    assert not list(tmp_path.glob("out*"))


def test_a_source_that_shrinks_stops_the_write_and_leaves_no_shard(source: Path, tmp_path: Path) -> None:
    plan = whole(source)
    plan = replace(plan, tensors=plan.tensors[:2] + plan.tensors[-1:])
    threads = threading.active_count()
    os.truncate(source, source.stat().st_size - 500)
    with pytest.raises(InputError, match="was cut"):
        write_shard(plan, tmp_path)
    assert not (tmp_path / "out.safetensors").exists()
    assert threading.active_count() == threads, "the hashing thread must not stay behind"


def test_an_empty_shard_and_empty_tensors_can_be_written(tmp_path: Path) -> None:
    record = write_shard(ShardPlan("none.safetensors", (), META), tmp_path)
    assert load_file(tmp_path / "none.safetensors") == {}
    assert record.sha256 == sha256(tmp_path / "none.safetensors")
    write_shard(ShardPlan("zero.safetensors", (PlannedTensor("z", "F32", (0, 4), ()),), META), tmp_path)
    assert load_file(tmp_path / "zero.safetensors")["z"].shape == (0, 4)


def test_the_index_has_recomputed_totals_and_keeps_other_metadata(tmp_path: Path) -> None:
    plans = [
        ShardPlan("model-00001-of-00002.safetensors", (PlannedTensor("b", "BF16", (3, 2), (bytes(12),)),), META),
        ShardPlan("model-00002-of-00002.safetensors", (PlannedTensor("a", "F4", (4,), (bytes(2),)),), META),
    ]
    original = {"metadata": {"total_size": 999, "total_parameters": 1, "note": "x"}, "weight_map": {"old": "y"}}
    write_index(tmp_path, plans, original)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 14, "total_parameters": 10, "note": "x"}
    assert index["weight_map"] == {"a": plans[1].file_name, "b": plans[0].file_name}
    write_index(tmp_path, plans, None)
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text())["metadata"] == {"total_size": 14}


DTYPES: list[tuple[str, torch.dtype]] = [
    ("U8", torch.uint8),
    ("BF16", torch.bfloat16),
    ("F32", torch.float32),
    ("I64", torch.int64),
    ("F8_E4M3", torch.float8_e4m3fn),
]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_selection_of_row_slices_equals_torch_s(tmp_path: Path, data: st.DataObject) -> None:
    """Slices of axis 0, in any order, from any dtypes: the library loads what torch indexing gives."""
    tensors: dict[str, torch.Tensor] = {}
    for number in range(data.draw(st.integers(1, 4))):
        _, dtype = data.draw(st.sampled_from(DTYPES))
        shape = (data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4)))
        width = torch.empty(0, dtype=dtype).element_size()
        bits = torch.randint(0, 256, (shape[0], shape[1] * width), dtype=torch.uint8)
        tensors[f"t{number}"] = bits.view(dtype)
    path = tmp_path / "source.safetensors"
    save_file(tensors, path)
    planned: list[PlannedTensor] = []
    expected: dict[str, Any] = {}
    for name, info in read_header(path).tensors.items():
        rows = data.draw(st.lists(st.integers(0, info.shape[0] - 1), max_size=6))
        size = info.nbytes // info.shape[0]
        pieces = tuple(ByteRange(path, info.start + row * size, size) for row in rows)
        planned.append(PlannedTensor(name, info.dtype, (len(rows), *info.shape[1:]), pieces))
        expected[name] = tensors[name].view(torch.uint8)[rows]
    order = data.draw(st.permutations(planned))
    record = write_shard(ShardPlan("out.safetensors", tuple(order), META), tmp_path)
    loaded = load_file(tmp_path / "out.safetensors")
    assert set(loaded) == set(expected)
    for name, bits in expected.items():
        assert torch.equal(loaded[name].view(torch.uint8) if loaded[name].numel() else bits, bits)
        assert loaded[name].shape == (len(bits), tensors[name].shape[1])
    assert record.sha256 == sha256(tmp_path / "out.safetensors")
