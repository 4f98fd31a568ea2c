"""plan.json: which experts of each layer survive; the file between `plan` and `apply`.

A person may edit it: `keep` decides, and `drop` (if it is there) must be the rest. Everything is checked again against
the checkpoint before a byte is written. Equal plans have equal bytes; one layer is one line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from xmac_cli.checkpoint.files import read_json_object
from xmac_cli.cli.errors import InputError

PLAN_SCHEMA = "xmac/prune-plan/1"
Export = Literal["plain", "pad", "bounded", "plan-only"]
MtpPolicy = Literal["slice", "drop", "keep"]
_EXPORTS = ("plain", "pad", "bounded", "plan-only")
_POLICIES = ("slice", "drop", "keep")
_MOST_EXPERTS = 100_000  # a mistyped count must not fill the memory before it is compared with the checkpoint


@dataclass(frozen=True)
class PlanLayer:
    """What stays in one MoE block.

    Args:
        name: name of the block in the files.
        layer: index of the decoder layer.
        keep: ascending ids that stay.
        drop: ascending ids that go.
    """

    name: str
    layer: int
    keep: tuple[int, ...]
    drop: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        """The JSON form."""
        return {"name": self.name, "layer": self.layer, "keep": list(self.keep), "drop": list(self.drop)}


@dataclass(frozen=True)
class Amounts:
    """Parameters and bytes of the tensors, before and after; `real_parameters` leaves out padded slots."""

    parameters_before: int
    parameters_after: int
    real_parameters: int
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class Plan:
    """A complete decision about one checkpoint.

    Args:
        source: {"name", "config_sha256", "index_sha256"} of the checkpoint the plan was made for.
        family: name of the row in families.py.
        model_type: `model_type` of config.json.
        top_k: experts per token.
        groups: (n_group, topk_group).
        n_before: experts per layer in the source.
        n_after: stored experts per layer in the result.
        allocation: "uniform" or "global".
        export: how counts that differ by layer are stored.
        requested: what was asked for, such as {"ratio": 0.25}.
        criterion: what the scores mean.
        scores: {"file", "sha256"} of the score file, or None.
        layers: decoder MoE blocks.
        mtp: policy for next-token layers.
        mtp_layers: next-token MoE blocks, for the policy "slice".
        amounts: sizes.
        warnings: one sentence each.
    """

    source: Mapping[str, str]
    family: str
    model_type: str
    top_k: int
    groups: tuple[int, int]
    n_before: int
    n_after: int
    allocation: str
    export: Export
    requested: Mapping[str, float | int]
    criterion: str
    scores: Mapping[str, str] | None
    layers: tuple[PlanLayer, ...]
    mtp: MtpPolicy
    mtp_layers: tuple[PlanLayer, ...]
    amounts: Amounts
    warnings: tuple[str, ...] = field(default=())

    @property
    def removed(self) -> int:
        """Experts removed from decoder layers."""
        return sum(len(layer.drop) for layer in self.layers)

    @property
    def actual_ratio(self) -> float:
        """Share of the decoder's routed experts that goes."""
        return self.removed / (self.n_before * len(self.layers))

    def sha256(self) -> str:
        """Hash of the plan's bytes: what `--resume` compares."""
        return hashlib.sha256(self.to_text().encode("utf-8")).hexdigest()

    def as_json(self) -> dict[str, Any]:
        """The JSON form, in the order of the file."""
        return {
            "schema": PLAN_SCHEMA,
            "source": dict(self.source),
            "family": self.family,
            "model_type": self.model_type,
            "top_k": self.top_k,
            "groups": {"n_group": self.groups[0], "topk_group": self.groups[1]},
            "n_before": self.n_before,
            "n_after": self.n_after,
            "allocation": self.allocation,
            "export": self.export,
            "ratio": {"requested": dict(self.requested), "actual": round(self.actual_ratio, 12)},
            "criterion": self.criterion,
            "scores": dict(self.scores) if self.scores else None,
            "parameters": {
                "before": self.amounts.parameters_before,
                "after": self.amounts.parameters_after,
                "after_without_padding": self.amounts.real_parameters,
            },
            "bytes": {"before": self.amounts.bytes_before, "after": self.amounts.bytes_after},
            "mtp": {"policy": self.mtp, "layers": [layer.as_json() for layer in self.mtp_layers]},
            "warnings": list(self.warnings),
            "layers": [layer.as_json() for layer in self.layers],
        }

    def to_text(self) -> str:
        """The bytes of plan.json: one key per line, one layer per line."""
        lines = []
        for key, value in self.as_json().items():
            if key == "layers":
                rows = ",\n".join(f"  {json.dumps(row)}" for row in value)
                lines.append(f' "layers": [\n{rows}\n ]')
            else:
                lines.append(f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}")
        return "{\n" + ",\n".join(lines) + "\n}\n"


def save_plan(path: Path, plan: Plan) -> None:
    """Write plan.json."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(plan.to_text(), encoding="utf-8")


def load_plan(path: Path) -> Plan:
    """Read plan.json; `xmac_cli.prune_moe.plan.check_plan` compares it with a checkpoint.

    Raises:
        InputError: the file is missing, not a plan, or contradicts itself; the message names the layer.
    """
    if not path.is_file():
        raise InputError(f"no plan at {path}", "write one with `xmac prune-moe SRC --stage plan`")
    document = read_json_object(path)
    if document.get("schema") != PLAN_SCHEMA:
        raise InputError(f"{path} does not carry the schema {PLAN_SCHEMA!r}")
    try:
        return _parse(document)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        detail = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise InputError(f"{path} is not a complete plan: {detail}") from error


def _parse(document: dict[str, Any]) -> Plan:
    n_before = int(document["n_before"])
    if not 0 < n_before <= _MOST_EXPERTS:
        raise ValueError(f"n_before is {n_before}")
    if document["export"] not in _EXPORTS or document["mtp"]["policy"] not in _POLICIES:
        raise ValueError(f"export must be one of {_EXPORTS}, mtp.policy one of {_POLICIES}")
    sizes, stored = document["parameters"], document["bytes"]
    return Plan(
        source=dict(document["source"]),
        family=str(document["family"]),
        model_type=str(document["model_type"]),
        top_k=int(document["top_k"]),
        groups=(int(document["groups"]["n_group"]), int(document["groups"]["topk_group"])),
        n_before=n_before,
        n_after=int(document["n_after"]),
        allocation=str(document["allocation"]),
        export=document["export"],
        requested=dict(document["ratio"]["requested"]),
        criterion=str(document["criterion"]),
        scores=dict(document["scores"]) if document["scores"] else None,
        layers=tuple(_parse_layer(row, n_before) for row in document["layers"]),
        mtp=document["mtp"]["policy"],
        mtp_layers=tuple(_parse_layer(row, n_before) for row in document["mtp"]["layers"]),
        amounts=Amounts(
            int(sizes["before"]),
            int(sizes["after"]),
            int(sizes["after_without_padding"]),
            int(stored["before"]),
            int(stored["after"]),
        ),
        warnings=tuple(map(str, document["warnings"])),
    )


def _parse_layer(row: dict[str, Any], n_before: int) -> PlanLayer:
    name, keep = str(row["name"]), row["keep"]
    if not isinstance(keep, list) or not all(type(expert) is int for expert in keep):
        raise ValueError(f"`keep` of {name} must be a list of expert ids")
    if keep != sorted(set(keep)) or (keep and not 0 <= keep[0] <= keep[-1] < n_before):
        raise ValueError(f"`keep` of {name} must hold different ids from 0 to {n_before - 1} in ascending order")
    drop = [expert for expert in range(n_before) if expert not in set(keep)]
    if row.get("drop", drop) != drop:
        raise ValueError(f"`drop` of {name} is not what `keep` leaves over; correct it, or remove it")
    return PlanLayer(name, int(row["layer"]), tuple(keep), tuple(drop))
