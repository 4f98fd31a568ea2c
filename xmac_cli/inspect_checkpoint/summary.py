"""Everything `xmac inspect` says, gathered from an opened checkpoint without reading a single weight."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

from xmac_cli.checkpoint.auxiliary import attachment_folders
from xmac_cli.checkpoint.directory import Checkpoint
from xmac_cli.checkpoint.fingerprint import fast_fingerprint
from xmac_cli.checkpoint.header import dtype_bits
from xmac_cli.checkpoint.lineage import read_xmac_json
from xmac_cli.checkpoint.parameters import parameter_count, quantization_method, quantization_section
from xmac_cli.inspect_checkpoint.family import Family, read_family
from xmac_cli.inspect_checkpoint.moe_shape import MoeShape, moe_shape
from xmac_cli.inspect_checkpoint.parts import PARTS, PartClassifier, expert_place


@dataclass(frozen=True)
class PartSize:
    """One part of the model.

    Args:
        part: one of PARTS.
        tensors: number of tensors.
        parameters: what they stand for (see quantization.py).
        bytes: what they take on disk.
        bytes_by_dtype: the same, by safetensors dtype.
    """

    part: str
    tensors: int
    parameters: int
    bytes: int
    bytes_by_dtype: dict[str, int]


@dataclass(frozen=True)
class Summary:
    """What is in a checkpoint.

    Args:
        name: directory name or hub id.
        fingerprint: fast fingerprint.
        family: from config.json.
        quantization: quant_method, or None.
        shards: number of safetensors files.
        file_bytes: their size.
        parts: parts that occur, in the order of PARTS.
        moe: shape of the mixture, or None.
        attachments: {name: {folder, depends_on, fits}}.
        lineage: steps from xmac.json, empty for an original checkpoint.
        auxiliary_files: files that travel with the model.
        ignored_files: files that no verb copies.
        warnings: one sentence each.
    """

    name: str
    fingerprint: str
    family: Family
    quantization: str | None
    shards: int
    file_bytes: int
    parts: tuple[PartSize, ...]
    moe: MoeShape | None
    attachments: dict[str, dict[str, Any]]
    lineage: tuple[dict[str, Any], ...]
    auxiliary_files: tuple[str, ...]
    ignored_files: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def parameters(self) -> int:
        """Parameters of all parts."""
        return sum(part.parameters for part in self.parts)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.bytes for part in self.parts)


def summarize(checkpoint: Checkpoint) -> Summary:
    """Describe a checkpoint from its headers, config and xmac.json.

    Args:
        checkpoint: an opened checkpoint.

    Raises:
        InputError: xmac.json is broken.
    """
    family = read_family(checkpoint.config)
    section = quantization_section(checkpoint.config)
    parameters = {name: parameter_count(info, section) for name, info in checkpoint.tensors.items()}
    places = {name: expert_place(name, len(info.shape)) for name, info in checkpoint.tensors.items()}
    classifier = PartClassifier(places, family.num_layers)
    parts = {name: classifier.part(name) for name in places}
    shape = moe_shape(checkpoint.tensors, places, parameters, parts, family)
    fingerprint = fast_fingerprint(checkpoint)
    record = read_xmac_json(checkpoint.path)
    return Summary(
        name=checkpoint.name,
        fingerprint=fingerprint,
        family=family,
        quantization=quantization_method(checkpoint.config),
        shards=len(checkpoint.shards),
        file_bytes=sum(shard.size for shard in checkpoint.shards),
        parts=_part_sizes(checkpoint, parameters, parts),
        moe=shape,
        attachments=_attachments(checkpoint, fingerprint),
        lineage=tuple(record["lineage"]) if record else (),
        auxiliary_files=tuple(path.as_posix() for path in checkpoint.auxiliary_files),
        ignored_files=tuple(path.as_posix() for path in checkpoint.ignored_files),
        warnings=tuple(_warnings(checkpoint, family, shape, parts)),
    )


def _part_sizes(checkpoint: Checkpoint, parameters: dict[str, int], parts: dict[str, str]) -> tuple[PartSize, ...]:
    tensors: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    sizes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name, info in checkpoint.tensors.items():
        part = parts[name]
        tensors[part] += 1
        counts[part] += parameters[name]
        sizes[part][info.dtype] += info.nbytes
    return tuple(
        PartSize(part, tensors[part], counts[part], sum(sizes[part].values()), dict(sorted(sizes[part].items())))
        for part in PARTS
        if tensors[part]
    )


def _attachments(checkpoint: Checkpoint, fingerprint: str) -> dict[str, dict[str, Any]]:
    found = {}
    for name, folder in attachment_folders(checkpoint.path, checkpoint.config).items():
        wanted = checkpoint.config["xmac"]["attachments"][name].get("depends_on")
        present = (checkpoint.path / folder).is_dir()
        found[name] = {"folder": folder, "depends_on": wanted, "fits": present and wanted == fingerprint}
    return found


def _warnings(checkpoint: Checkpoint, family: Family, shape: MoeShape | None, parts: dict[str, str]) -> list[str]:
    warnings = []
    metadata = (checkpoint.index or {}).get("metadata")
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    if stated is not None and stated != checkpoint.total_bytes:
        warnings.append(f"the index states {stated:,} bytes, the tensors have {checkpoint.total_bytes:,}")
    unknown = sorted({info.dtype for info in checkpoint.tensors.values() if dtype_bits(info.dtype) is None})
    if unknown:
        warnings.append(f"dtypes this version does not know: {', '.join(unknown)}; sizes are as stored")
    other = [name for name, part in parts.items() if part == "other"]
    if other:
        warnings.append(f"{len(other)} tensors belong to no part this version knows, the first is {other[0]}")
    if shape is not None:
        if family.num_experts is not None and shape.experts_per_layer != (family.num_experts,):
            counts = ", ".join(map(str, shape.experts_per_layer))
            warnings.append(f"config.json speaks of {family.num_experts} experts, the layers hold {counts}")
        gaps = [layer for layer in shape.layers if layer.gaps]
        if gaps:
            warnings.append(f"{gaps[0].block} lacks expert {gaps[0].gaps[0]} ({len(gaps)} such layers)")
    return warnings
