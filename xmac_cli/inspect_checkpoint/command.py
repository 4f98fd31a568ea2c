"""`xmac inspect`: report and tables; what is told comes from summary.py."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from xmac_cli.cli.errors import UsageError
from xmac_cli.cli.verb import Job, Verb
from xmac_cli.report.schema import Report, Table

if TYPE_CHECKING:
    from xmac_cli.inspect_checkpoint.moe_shape import MoeShape
    from xmac_cli.inspect_checkpoint.summary import Summary


@dataclass(frozen=True)
class InspectCheckpoint(Verb):
    """What is in a checkpoint: family, parameters by part and dtype, MoE shape, attachments, lineage.

    Reads config, index, safetensors headers and xmac.json, and no weights, so it answers at once for any size.
    """

    name: ClassVar[str] = "inspect"
    reads: ClassVar[str | None] = "directory"  # opened here, once; "checkpoint" would have it opened before, too
    writes: ClassVar[str | None] = None

    def execute(self, job: Job) -> Report:
        return self.plan(job.checkpoint)

    def plan(self, source: Path | None) -> Report:
        from xmac_cli.checkpoint.directory import Checkpoint
        from xmac_cli.inspect_checkpoint.summary import summarize

        if source is None:
            raise UsageError("INPUT is missing", "give a checkpoint directory")
        summary = summarize(Checkpoint.open(source))
        return Report(_result(summary), tables=_tables(summary), warnings=summary.warnings)


def _result(summary: Summary) -> dict[str, Any]:
    return {
        "name": summary.name,
        "fingerprint": summary.fingerprint,
        "family": asdict(summary.family),
        "quantization": summary.quantization,
        "shards": summary.shards,
        "file_bytes": summary.file_bytes,
        "tensor_bytes": summary.tensor_bytes,
        "parameters": summary.parameters,
        "parts": [asdict(part) for part in summary.parts],
        "moe": _moe_result(summary.moe),
        "attachments": summary.attachments,
        "lineage": list(summary.lineage),
        "auxiliary_files": list(summary.auxiliary_files),
        "ignored_files": list(summary.ignored_files),
    }


def _moe_result(shape: MoeShape | None) -> dict[str, Any] | None:
    if shape is None:
        return None
    return {
        "num_layers": len(shape.layers),
        "experts_per_layer": list(shape.experts_per_layer),
        "top_k": shape.top_k,
        "total_parameters": shape.total_parameters,
        "active_parameters": shape.active_parameters,
        "layers": [asdict(layer) for layer in shape.layers],
    }


def _tables(summary: Summary) -> list[Table]:
    tables = [_overview(summary), _parts(summary)]
    if summary.moe is not None:
        tables.append(_moe(summary.moe))
    if summary.attachments:
        rows = [[name, a["folder"], "yes" if a["fits"] else "NO"] for name, a in summary.attachments.items()]
        tables.append(Table("Attachments", ["name", "folder", "fits this checkpoint"], rows))
    if summary.lineage:
        tables.append(_lineage(summary))
    return tables


def _overview(summary: Summary) -> Table:
    family = summary.family
    rows: list[list[object]] = [
        ["family", f"{family.model_type} ({', '.join(family.architectures) or 'no architecture named'})"],
        ["parameters", f"{summary.parameters:,}"],
        ["weights", f"{_gib(summary.file_bytes)} in {summary.shards} file{'s' if summary.shards > 1 else ''}"],
        ["quantization", summary.quantization or "none"],
    ]
    if family.num_layers is not None:
        rows.append(["layers", family.num_layers])
    rows += [[name, f"{value:,}"] for name, value in family.facts.items()]
    rows.append(["output head", "tied to the embedding" if family.tied else "its own"])
    rows.append(["fingerprint", summary.fingerprint])
    if summary.ignored_files:
        rows.append(["not part of the model", ", ".join(summary.ignored_files[:5])])
    return Table(summary.name, ["", ""], rows)


def _parts(summary: Summary) -> Table:
    rows: list[list[object]] = []
    for part in summary.parts:
        share = part.parameters / summary.parameters if summary.parameters else 0.0
        dtypes = ", ".join(part.bytes_by_dtype)
        rows.append([part.part, part.tensors, f"{part.parameters:,}", f"{share:.1%}", _gib(part.bytes), dtypes])
    return Table("Parameters by part", ["part", "tensors", "parameters", "share", "size", "dtypes"], rows)


def _moe(shape: MoeShape) -> Table:
    counts = ", ".join(map(str, shape.experts_per_layer))
    active = "unknown, config.json names no top-k"
    if shape.active_parameters is not None and shape.total_parameters:
        share = shape.active_parameters / shape.total_parameters
        active = f"{shape.active_parameters:,} of {shape.total_parameters:,} ({share:.1%})"
    rows: list[list[object]] = [
        ["MoE layers", len(shape.layers)],
        ["routed experts per layer", counts],
        ["used per token (top-k)", "unknown" if shape.top_k is None else str(shape.top_k)],
        ["active parameters", active],
        ["experts stored", "all in one tensor" if shape.layers[0].fused else "one by one"],
    ]
    note = "Active: everything a token passes through, embedding and head included."
    return Table("Mixture of experts", ["", ""], rows, note=note)


def _lineage(summary: Summary) -> Table:
    rows: list[list[object]] = []
    for number, step in enumerate(summary.lineage, 1):
        source = step.get("input")
        name = source.get("name") if isinstance(source, dict) else None
        rows.append([number, step.get("verb"), step.get("version"), name, step.get("seconds")])
    return Table("Lineage", ["step", "verb", "version", "input", "seconds"], rows)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**28 else f"{size / 2**20:.2f} MiB"
