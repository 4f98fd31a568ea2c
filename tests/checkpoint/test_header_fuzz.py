"""Mutated headers: the reader answers with InputError or with a result that the safetensors library confirms."""

from __future__ import annotations

import json
import random
import signal
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from xmac_cli.checkpoint.header import ShardHeader, dtype_bits, read_header
from xmac_cli.cli.errors import InputError

MUTANTS = 3_600


@pytest.fixture
def alarm() -> Iterator[None]:
    """A hang fails the test instead of blocking the suite."""

    def ring(*_: object) -> None:
        raise TimeoutError("the header reader hangs")

    previous = signal.signal(signal.SIGALRM, ring)
    signal.alarm(100)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


def read_or_none(path: Path) -> ShardHeader | None:
    try:
        return read_header(path)
    except InputError:
        return None


def library_view(raw: bytes) -> dict[str, Any] | None:
    try:
        return dict(deserialize(raw))
    except SafetensorError:
        return None


def check_against_library(path: Path, raw: bytes) -> ShardHeader | None:
    """Whatever we accept, the library accepts and sees alike, apart from dtypes that it does not know."""
    path.write_bytes(raw)
    header = read_or_none(path)
    if header is None or any(dtype_bits(info.dtype) is None for info in header.tensors.values()):
        return header
    reference = library_view(raw)
    assert reference is not None, "we accept a file that the library refuses"
    assert set(reference) == set(header.tensors)
    for name, info in header.tensors.items():
        assert list(info.shape) == reference[name]["shape"]
        assert raw[info.start : info.end] == bytes(reference[name]["data"])
    return header


def valid_file() -> bytes:
    tensors = {"__metadata__": {"format": "pt", "k": "ü"}}
    offset = 0
    shapes = (("F32", (4, 6), 96), ("BF16", (3, 5), 30), ("F8_E4M3", (16,), 16), ("U8", (0, 2), 0), ("F4", (2, 8), 8))
    for number, (dtype, shape, nbytes) in enumerate(shapes):
        name = f"model.layers.{number}.weight"
        tensors[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}  # type: ignore
        offset += nbytes
    text = json.dumps(tensors, ensure_ascii=False).encode()
    return struct.pack("<Q", len(text)) + text + bytes(range(offset))


SPLICES = [b'{"a":', b"[[[[[", b"-1", b"1e999", b"18446744073709551616", b'"__metadata__"', b"null", b"\\ud800", b"\0"]
SPLICES += [b"9" * 400, b"true", b"{}", b"[]", b",", b'"', b"}", b"data_offsets", b"shape", b"-0", b"0.5", b"F64"]


def mutate(raw: bytes, dice: random.Random) -> bytes:
    """One to three random injuries: flipped bits, cut, padded, another length, spliced or moved JSON."""
    body = bytearray(raw)
    for _ in range(dice.randint(1, 3)):
        kind = dice.randrange(8)
        place = dice.randrange(max(len(body), 1))
        if kind == 0 and body:
            body[place] ^= 1 << dice.randrange(8)
        elif kind == 1:
            del body[place:]
        elif kind == 2:
            body += dice.randbytes(dice.randint(1, 40))
        elif kind == 3:
            body[:8] = struct.pack("<Q", dice.choice([0, 1, len(body), 2**31, 2**63, 2**64 - 1, dice.randrange(600)]))
        elif kind == 4:
            splice = dice.choice(SPLICES)
            body[place:place] = splice
            if dice.random() < 0.7:  # keep the length field right, so that the JSON itself is reached
                body[:8] = struct.pack("<Q", int.from_bytes(body[:8], "little") + len(splice) & (2**64 - 1))
        elif kind == 5:
            del body[place : place + dice.randint(1, 30)]
        elif kind == 6:
            other = dice.randrange(max(len(body), 1))
            body[place : place + 8] = body[other : other + 8]
        else:
            digits = [i for i, byte in enumerate(body[8:600], 8) if 48 <= byte < 58]
            if digits:
                body[dice.choice(digits)] = dice.choice(b"0123456789-.e")
    return bytes(body)


def test_thousands_of_mutants_give_input_error_or_a_confirmed_result(tmp_path: Path, alarm: None) -> None:
    dice = random.Random(20_250_801)
    raw = valid_file()
    path = tmp_path / "x.safetensors"
    assert check_against_library(path, raw) is not None
    accepted = 0
    tracemalloc.start()
    for _ in range(MUTANTS):
        accepted += check_against_library(path, mutate(raw, dice)) is not None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000, "files of about a kilobyte must not make the reader allocate megabytes"
    assert 20 < accepted < MUTANTS // 2, "the mutations are too weak or too strong to say anything"


SIZES = st.one_of(
    st.integers(0, 9), st.sampled_from([-1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30]), st.floats()
)
DTYPES = st.sampled_from(["F4", "F6_E2M3", "U8", "BF16", "F32", "I64", "F8_E8M0", "X9", ""])
ENTRY = st.fixed_dictionaries(
    {"dtype": DTYPES, "shape": st.lists(SIZES, max_size=4), "data_offsets": st.lists(SIZES, min_size=1, max_size=3)}
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    header=st.dictionaries(st.text(max_size=4) | st.just("__metadata__"), ENTRY | JSON, max_size=4),
    data=st.binary(max_size=40),
    length_error=st.sampled_from([0, 0, 0, 0, 1, -1, 2**40]),
)
@example(header={"a": {"dtype": "U8", "shape": [2**63, 2, 0], "data_offsets": [0, 0]}}, data=b"", length_error=0)
def test_any_json_header_gives_input_error_or_a_confirmed_result(
    tmp_path: Path, header: dict[str, Any], data: bytes, length_error: int
) -> None:
    text = json.dumps(header).encode()
    length = max(len(text) + length_error, 0)
    check_against_library(tmp_path / "x.safetensors", struct.pack("<Q", length) + text + data)


WIDTHS = {"F4": 0.5, "U8": 1, "BF16": 2, "F32": 4, "I64": 8, "F8_E8M0": 1}


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tensors=st.dictionaries(
        st.text(max_size=6).filter(lambda name: name != "__metadata__"),
        st.tuples(
            st.sampled_from(sorted(WIDTHS)), st.lists(st.integers(0, 4).map(lambda n: 2 * n), min_size=1, max_size=3)
        ),
        max_size=6,
    ),
    metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
    padding=st.integers(0, 9),
    order=st.randoms(use_true_random=False),
)
def test_every_well_formed_file_is_accepted(
    tmp_path: Path, tensors: dict[str, Any], metadata: dict[str, str], padding: int, order: random.Random
) -> None:
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    names = list(tensors)
    order.shuffle(names)
    for name in names:
        dtype, shape = tensors[name]
        count = 1
        for size in shape:
            count *= size
        nbytes = int(count * WIDTHS[dtype])
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header).encode() + b" " * padding
    raw = struct.pack("<Q", len(text)) + text + bytes(i % 251 for i in range(offset))
    read = check_against_library(tmp_path / "x.safetensors", raw)
    assert read is not None
    assert set(read.tensors) == set(tensors)
    assert read.metadata == metadata


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(max_size=60))
def test_any_bytes_give_input_error_or_a_confirmed_result(tmp_path: Path, raw: bytes) -> None:
    check_against_library(tmp_path / "x.safetensors", raw)
