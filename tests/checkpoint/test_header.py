"""The rules of the safetensors format, one by one, and agreement with the safetensors library."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.torch import load_file, save_file
from support.checkpoint_files import entry, raw_file

from xmac_cli.checkpoint.header import dtype_bits, encode_header, read_header
from xmac_cli.cli.errors import InputError

ONE = entry("U8", [1], 0, 1)


def library_accepts(path: Path) -> bool:
    try:
        with safe_open(path, framework="pt"):
            return True
    except SafetensorError:
        return False


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "x.safetensors"


def test_reads_what_the_library_wrote(file: Path) -> None:
    tensors = {
        "matrix": torch.arange(12, dtype=torch.float32).reshape(3, 4),
        "half": torch.ones(5, dtype=torch.bfloat16),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "empty": torch.zeros(0, 3),
        "flags": torch.tensor([True, False, True]),
    }
    save_file(tensors, file, metadata={"format": "pt", "note": "ünï"})
    header = read_header(file)
    assert header.metadata == {"format": "pt", "note": "ünï"}
    assert header.size == file.stat().st_size == header.data_start + header.data_bytes
    raw = file.read_bytes()
    reference = dict(deserialize(raw))
    assert set(header.tensors) == set(reference)
    for name, info in header.tensors.items():
        assert raw[info.start : info.end] == bytes(reference[name]["data"])
        assert list(info.shape) == reference[name]["shape"]
        assert info.dtype == reference[name]["dtype"]
        assert info.numel == tensors[name].numel()
        assert info.nbytes == tensors[name].numel() * tensors[name].element_size()


def test_tensors_come_in_the_order_of_the_data(file: Path) -> None:
    raw_file(file, {"late": entry("U8", [2], 1, 3), "early": ONE}, b"abc")
    assert list(read_header(file).tensors) == ["early", "late"]


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("BOOL", 8), ("F4", 4), ("F6_E2M3", 6), ("F6_E3M2", 6), ("U8", 8), ("I8", 8), ("F8_E5M2", 8), ("F8_E4M3", 8)]
    + [("F8_E8M0", 8), ("F8_E4M3FNUZ", 8), ("F8_E5M2FNUZ", 8), ("I16", 16), ("U16", 16), ("F16", 16), ("BF16", 16)]
    + [("I32", 32), ("U32", 32), ("F32", 32), ("C64", 64), ("F64", 64), ("I64", 64), ("U64", 64)],
)
def test_size_of_every_dtype_agrees_with_the_library(file: Path, dtype: str, bits: int) -> None:
    assert dtype_bits(dtype) == bits
    raw_file(file, {"a": entry(dtype, [8, 3], 0, 3 * bits)}, bytes(3 * bits))
    assert library_accepts(file)
    assert read_header(file).tensors["a"].nbytes == 3 * bits
    raw_file(file, {"a": entry(dtype, [8, 3], 0, 3 * bits + 1)}, bytes(3 * bits + 1))
    assert not library_accepts(file)
    with pytest.raises(InputError, match="takes"):
        read_header(file)


def test_our_dtype_list_is_the_library_s(file: Path) -> None:
    raw_file(file, {"a": entry("NOPE", [1], 0, 1)}, b"x")
    with pytest.raises(SafetensorError) as caught:
        safe_open(file, framework="pt").__enter__()
    names = [part for part in str(caught.value).split("`")[3::2] if part.isupper() or "_" in part]
    assert len(names) >= 20
    assert all(dtype_bits(name) is not None for name in names)


def test_an_unknown_dtype_is_accepted_as_bytes(file: Path) -> None:
    raw_file(file, {"a": entry("F3_NEW", [7, 9], 0, 24), "b": entry("U8", [4], 24, 28)}, bytes(28))
    info = read_header(file).tensors["a"]
    assert (info.dtype, info.shape, info.nbytes) == ("F3_NEW", (7, 9), 24)
    assert dtype_bits("F3_NEW") is None


BROKEN: dict[str, tuple[Any, bytes, str]] = {
    "no header at all": (b"", b"", "does not begin"),
    "header does not begin with a brace": (b" {}", b"", "does not begin"),
    "byte order mark": (b'\xef\xbb\xbf{"a":1}', b"", "does not begin"),
    "not JSON": (b'{"a":', b"", "not valid JSON"),
    "not UTF-8": (b'{"\xff":1}', b"", "not valid JSON"),
    "text after the object": (b"{}x", b"", "not valid JSON"),
    "NUL padding": (b"{}\0", b"", "not valid JSON"),
    "control character in a name": (b'{"a\n":1}', b"", "not valid JSON"),
    "half a surrogate pair": (b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x", "surrogate"),
    "the same tensor twice": (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"x",
        "twice",
    ),
    "dtype twice": (b'{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x", "twice"),
    "metadata key twice": (b'{"__metadata__":{"q":"1","q":"2"}}', b"", "twice"),
    "metadata twice": (b'{"__metadata__":{},"__metadata__":{}}', b"", "twice"),
    "metadata is a list": ({"__metadata__": []}, b"", "strings to strings"),
    "metadata value is a number": ({"__metadata__": {"a": 1}}, b"", "strings to strings"),
    "NaN": (b'{"__metadata__":NaN}', b"", "not valid JSON"),
    "entry is a list": ({"a": ["U8", [1], [0, 1]]}, b"x", "expected an object"),
    "entry is null": ({"a": None}, b"", "expected an object"),
    "no dtype": ({"a": {"shape": [1], "data_offsets": [0, 1]}}, b"x", "dtype"),
    "dtype is a number": ({"a": {"dtype": 8, "shape": [1], "data_offsets": [0, 1]}}, b"x", "dtype"),
    "no shape": ({"a": {"dtype": "U8", "data_offsets": [0, 1]}}, b"x", "shape"),
    "negative shape": ({"a": entry("U8", [-1], 0, 1)}, b"x", "shape"),
    "float shape": (b'{"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}}', b"x", "shape"),
    "boolean shape": (b'{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}', b"x", "shape"),
    "minus zero": (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[-0,1]}}', b"x", "-0"),
    "shape beyond 64 bits": ({"a": entry("U8", [2**64], 0, 1)}, b"x", "shape"),
    "more elements than 64 bits": ({"a": entry("U8", [2**40, 2**40], 0, 1)}, b"x", "elements"),
    "overflow hidden by a zero": ({"a": entry("U8", [2**63, 2**63, 0], 0, 0)}, b"", "elements"),
    "more bits than 64 bits": ({"a": entry("F64", [2**61], 0, 1)}, b"x", "whole number of bytes"),
    "half a byte": ({"a": entry("F4", [3], 0, 2)}, b"xx", "whole number of bytes"),
    "an integer of 5000 digits": (b'{"a":' + b"9" * 5000 + b"}", b"", "not valid JSON"),
    "three offsets": ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 1]}}, b"x", "two integers"),
    "ends before it begins": ({"a": entry("U8", [1], 1, 0)}, b"x", "ends before"),
    "wrong size": ({"a": entry("U8", [2], 0, 1)}, b"x", "takes 2 bytes"),
    "hole at the start": ({"a": entry("U8", [1], 1, 2)}, b"xx", "hole"),
    "hole in the middle": ({"a": ONE, "b": entry("U8", [1], 2, 3)}, b"xxx", "hole"),
    "overlap": ({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, b"xxx", "overlaps"),
    "same bytes twice": ({"a": ONE, "b": ONE}, b"x", "overlaps"),
    "empty tensor inside another": ({"a": entry("U8", [0], 1, 1), "b": entry("U8", [2], 0, 2)}, b"xx", "overlaps"),
    "truncated data": ({"a": entry("U8", [4], 0, 4)}, b"xxx", "1 are missing"),
    "bytes after the data": ({"a": entry("U8", [4], 0, 4)}, b"xxxxx", "follow the last tensor"),
    "bytes without tensors": ({}, b"x", "follow the last tensor"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_header_is_refused_with_its_reason(file: Path, case: str) -> None:
    header, data, reason = BROKEN[case]
    raw_file(file, header, data)
    with pytest.raises(InputError, match=reason) as caught:
        read_header(file)
    assert str(file) in caught.value.message


def test_whatever_the_library_refuses_of_these_we_refuse(file: Path) -> None:
    """We refuse more (repeated keys, leading space), never less."""
    only_ours = {case for case, (header, data, _) in BROKEN.items() if library_accepts(raw_file(file, header, data))}
    assert only_ours == {
        "the same tensor twice",
        "metadata key twice",
        "header does not begin with a brace",
        "entry is a list",
    }


@pytest.mark.parametrize("depth", [200, 100_000])
def test_deep_nesting_is_an_input_error(file: Path, depth: int) -> None:
    raw_file(file, b'{"a":' + b"[" * depth + b"]" * depth + b"}")
    with pytest.raises(InputError):
        read_header(file)
    raw_file(file, b'{"a":' * depth + b"1" + b"}" * depth)
    with pytest.raises(InputError):
        read_header(file)


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 100_000_001, 100_000_000, 10_000])
def test_an_absurd_header_length_allocates_nothing(file: Path, length: int) -> None:
    raw_file(file, b"{}", length=length)
    tracemalloc.start()
    with pytest.raises(InputError, match=r"exceeds|ends after"):
        read_header(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.parametrize("size", range(8))
def test_a_file_shorter_than_its_length_field_is_refused(file: Path, size: int) -> None:
    file.write_bytes(b"\x02" + bytes(size)[1:] if size else b"")
    with pytest.raises(InputError, match="at least 8"):
        read_header(file)


def test_pipes_directories_and_absent_files_are_refused_without_waiting(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path, tmp_path / "absent", Path("/dev/zero")):
        with pytest.raises(InputError):
            read_header(path)


def test_metadata_null_and_padding_are_allowed(file: Path) -> None:
    raw_file(file, b'{"__metadata__":null,"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"more":0.5}}  \n\t ', b"x")
    header = read_header(file)
    assert header.metadata == {}
    assert list(header.tensors) == ["a"]


def test_an_encoded_header_is_what_the_library_reads(file: Path) -> None:
    planned = [("x.ü", "BF16", (2, 3), 12), ("s", "F32", (), 4), ("e", "I64", (0,), 0), ("p", "F4", (6,), 3)]
    data = bytes(range(19))
    head = encode_header(planned, {"format": "pt", "k": "v"})
    assert len(head) % 8 == 0
    assert struct.unpack("<Q", head[:8])[0] == len(head) - 8
    reference = dict(deserialize(head + data))
    assert [bytes(reference[name]["data"]) for name, *_ in planned] == [data[:12], data[12:16], b"", data[16:]]
    assert [reference[name]["shape"] for name, *_ in planned] == [[2, 3], [], [0], [6]]
    file.write_bytes(head + data)
    assert read_header(file).metadata == {"format": "pt", "k": "v"}


def test_a_name_cannot_be_written_twice() -> None:
    for names in (["a", "a"], ["__metadata__"]):
        with pytest.raises(InputError, match="reserved or used twice"):
            encode_header([(name, "U8", (1,), 1) for name in names], {})


def test_a_header_without_metadata_has_no_metadata_key() -> None:
    head = encode_header([("a", "U8", (1,), 1)], {})
    assert "__metadata__" not in json.loads(head[8:])


def test_the_library_loads_a_file_whose_header_we_planned(file: Path) -> None:
    tensor = torch.randn(4, 4)
    head = encode_header([("w", "F32", (4, 4), 64)], {"format": "pt"})
    file.write_bytes(head + tensor.numpy().tobytes())
    assert torch.equal(load_file(file)["w"], tensor)
