"""Small tensors through memory keep every bit, for every dtype torch and safetensors share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoint_files import entry, raw_file

from xmac_cli.checkpoint.header import TensorInfo, encode_header, read_header
from xmac_cli.checkpoint.tensors import dtype_name, read_tensor, tensor_bytes, torch_dtype
from xmac_cli.cli.errors import InputError, UnsupportedModelError

NAMES = ["bool", "uint8", "int8", "float8_e5m2", "float8_e4m3fn", "float8_e8m0fnu", "float8_e4m3fnuz"]
NAMES += ["float8_e5m2fnuz", "int16", "uint16", "float16", "bfloat16", "int32", "uint32", "float32", "complex64"]
NAMES += ["float64", "int64", "uint64", "float4_e2m1fn_x2"]


@pytest.mark.parametrize("name", NAMES)
def test_every_bit_survives_the_round_trip(tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name)
    width = torch.empty(0, dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(0, 2 if name == "bool" else 256, (3, 5 * width), dtype=torch.uint8, generator=generator)
    tensor = bits.view(dtype)
    path = tmp_path / "x.safetensors"
    save_file({"t": tensor}, path)
    info = read_header(path).tensors["t"]
    read = read_tensor(info)
    assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(read.view(torch.uint8), bits)
    assert tensor_bytes(tensor) == bits.numpy().tobytes() == path.read_bytes()[info.start : info.end]
    assert dtype_name(tensor.dtype) == info.dtype
    assert torch_dtype(info.dtype) == dtype


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 4)])
def test_scalars_empty_and_deep_shapes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    save_file({"t": tensor}, tmp_path / "x.safetensors")
    read = read_tensor(read_header(tmp_path / "x.safetensors").tensors["t"])
    assert read.shape == tensor.shape
    assert torch.equal(read, tensor)


def test_strided_and_differentiable_tensors_are_stored_row_major() -> None:
    tensor = torch.arange(12, dtype=torch.int16).reshape(3, 4)
    assert tensor_bytes(tensor.t()) == tensor.t().contiguous().numpy().tobytes()
    assert tensor_bytes(torch.ones(2, requires_grad=True)) == b"\0\0\x80?" * 2
    assert tensor_bytes(torch.zeros(0)) == b""


def test_planned_bytes_load_with_the_library(tmp_path: Path) -> None:
    tensor = torch.randn(4, 6).to(torch.bfloat16)
    head = encode_header([("w", dtype_name(tensor.dtype), tuple(tensor.shape), 48)], {"format": "pt"})
    (tmp_path / "x.safetensors").write_bytes(head + tensor_bytes(tensor))
    assert torch.equal(load_file(tmp_path / "x.safetensors")["w"], tensor)


def test_a_tensor_that_was_read_can_be_changed_without_touching_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"t": torch.zeros(4)}, path)
    before = path.read_bytes()
    read_tensor(read_header(path).tensors["t"]).fill_(1)
    assert path.read_bytes() == before


def test_dtypes_without_a_counterpart_are_unsupported(tmp_path: Path) -> None:
    path = raw_file(
        tmp_path / "x.safetensors", {"a": entry("F6_E2M3", [4], 0, 3), "b": entry("NEW", [1], 3, 5)}, bytes(5)
    )
    for info in read_header(path).tensors.values():
        with pytest.raises(UnsupportedModelError, match="no dtype"):
            read_tensor(info)
    with pytest.raises(UnsupportedModelError, match="no dtype"):
        tensor_bytes(torch.zeros(1, dtype=torch.complex128))


def test_a_file_cut_after_it_was_opened_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(10))
    with pytest.raises(InputError, match="ends inside tensor 't'"):
        read_tensor(TensorInfo("t", "U8", (20,), tmp_path / "x", 0, 20))
