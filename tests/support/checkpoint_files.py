"""Checkpoints on disk for tests, made by the safetensors library or byte by byte, never by the code under test."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIG = {"architectures": ["TestModel"], "model_type": "test", "zebra": 1, "alpha": [0.0, 1e-06]}


def raw_file(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    """Write a safetensors file from its parts; `header` is JSON-able, or the exact bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: str, shape: Sequence[int], begin: int, end: int) -> dict[str, Any]:
    """One tensor of a header."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def random_tensors(names: Sequence[str], seed: int, rows: int = 8, columns: int = 16) -> dict[str, torch.Tensor]:
    """bfloat16 matrices, one per name."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(rows, columns, generator=generator).to(torch.bfloat16) for name in names}


def save_single(root: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] = CONFIG) -> Path:
    """A model in one file."""
    root.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), root / "model.safetensors", metadata={"format": "pt"})
    (root / "config.json").write_text(json.dumps(config))
    return root


def save_sharded(root: Path, shards: Sequence[Mapping[str, torch.Tensor]], config: Mapping[str, Any] = CONFIG) -> Path:
    """A model in several files with an index, as `save_pretrained` writes it."""
    root.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(dict(tensors), root / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))
    size = sum(t.numel() * t.element_size() for shard in shards for t in shard.values())
    save_index(root, weight_map, {"total_size": size})
    (root / "config.json").write_text(json.dumps(config))
    return root


def save_index(root: Path, weight_map: Mapping[str, Any], metadata: Mapping[str, Any] | None = None) -> None:
    """Write the index."""
    index = {"metadata": dict(metadata or {}), "weight_map": dict(weight_map)}
    (root / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def hub_snapshot(cache: Path, files: Mapping[str, bytes], repository: str = "models--org--name") -> Path:
    """Lay files out as the Hugging Face hub cache does; returns the snapshot directory."""
    blobs = cache / repository / "blobs"
    snapshot = cache / repository / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for name, content in files.items():
        blob = blobs / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def tree(root: Path) -> dict[str, bytes]:
    """Every file below `root` with its content."""
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def sha256(path: Path) -> str:
    """Digest of a file, in one piece."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
