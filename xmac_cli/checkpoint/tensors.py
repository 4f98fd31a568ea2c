"""Small tensors through memory: safetensors bytes <-> torch, bit for bit.

Routers and norms are read this way; experts never are (see copying.py). F4 holds two elements a byte: torch stores the
pair as one element, so a stored shape [..., 2n] is a torch shape [..., n] of `float4_e2m1fn_x2`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from xmac_cli.checkpoint.files import open_regular
from xmac_cli.checkpoint.header import TensorInfo
from xmac_cli.cli.errors import InputError, UnsupportedModelError

if TYPE_CHECKING:
    import torch

_TORCH_NAMES = {
    "BOOL": "bool",
    "F4": "float4_e2m1fn_x2",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}


def torch_dtype(dtype: str) -> torch.dtype:
    """Return the torch dtype of a safetensors dtype string.

    Raises:
        UnsupportedModelError: the installed torch has no such dtype.
    """
    import torch

    found = getattr(torch, _TORCH_NAMES.get(dtype, ""), None)
    if found is None:
        raise UnsupportedModelError(f"torch {torch.__version__} has no dtype for safetensors' {dtype}")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """Return the safetensors dtype string of a torch dtype.

    Raises:
        UnsupportedModelError: safetensors has no such dtype.
    """
    name = str(dtype).removeprefix("torch.")
    for stored, torch_name in _TORCH_NAMES.items():
        if torch_name == name:
            return stored
    raise UnsupportedModelError(f"safetensors has no dtype for torch's {name}")


def read_tensor(info: TensorInfo) -> torch.Tensor:
    """Load one tensor.

    Args:
        info: from a header; its whole data is read into memory.

    Returns:
        A CPU tensor that owns its memory, shape `info.shape` (last axis halved for F4).

    Raises:
        InputError: the file is shorter than its header said.
        UnsupportedModelError: torch has no such dtype.
    """
    import torch

    dtype = torch_dtype(info.dtype)
    shape = list(info.shape)
    if info.dtype == "F4":
        if not shape or shape[-1] % 2:
            raise UnsupportedModelError(f"torch cannot hold F4 tensor {info.name!r} of shape {shape}")
        shape[-1] //= 2
    if not info.nbytes:
        return torch.empty(shape, dtype=dtype)
    buffer = bytearray(info.nbytes)
    _read_into(info, memoryview(buffer))
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).reshape(shape)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor as safetensors stores them: row-major, little-endian.

    Args:
        tensor: any device, any strides, any dtype that safetensors knows.
    """
    import torch

    dtype_name(tensor.dtype)
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _read_into(info: TensorInfo, view: memoryview) -> None:
    descriptor = open_regular(info.file)
    try:
        done = 0
        while done < len(view):
            count = os.preadv(descriptor, [view[done : done + (1 << 26)]], info.start + done)
            if count == 0:
                raise InputError(f"{info.file} ends inside tensor {info.name!r}; it was cut after it was opened")
            done += count
    finally:
        os.close(descriptor)
