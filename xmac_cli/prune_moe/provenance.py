"""What a pruned checkpoint says about itself: xmac_prune.json for programs and a section of the model card for people.

Provenance is kept out of config.json, because strict config classes refuse keys they do not know. Repeated pruning is
recorded as a list of steps, and `original_experts` always leads back to the numbering of the first model.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from xmac_cli.checkpoint.files import read_json_object
from xmac_cli.checkpoint.writer import write_durably
from xmac_cli.prune_moe.allocation import place_in_slots
from xmac_cli.prune_moe.layout import Layout
from xmac_cli.prune_moe.plan_file import Plan
from xmac_cli.prune_moe.pruned_config import numbering_of
from xmac_cli.prune_moe.quantization_names import renumber_names

PROVENANCE_FILE = "xmac_prune.json"
PROVENANCE_SCHEMA = "xmac/prune-moe/1"
_CARD = "README.md"
_QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
_BEGIN, _END = "<!-- xmac prune-moe: begin -->", "<!-- xmac prune-moe: end -->"


def write_provenance(directory: Path, layout: Layout, plan: Plan) -> None:
    """Add provenance to a written checkpoint and renumber the experts that its quantisation files name.

    Args:
        directory: the complete tree, auxiliary files included.
        layout: of the source.
        plan: that was applied.
    """
    document = _document(layout, plan)
    write_durably(directory / PROVENANCE_FILE, (json.dumps(document, indent=1) + "\n").encode("utf-8"))
    card = directory / _CARD
    text = card.read_text(encoding="utf-8") if card.exists() else ""
    write_durably(card, _with_section(text, document, plan).encode("utf-8"))
    for name in _QUANTIZATION_FILES:
        path = directory / name
        if path.exists():
            before = read_json_object(path)
            after = renumber_names(before, numbering_of(layout, plan))
            if after != before:
                write_durably(path, (json.dumps(after, indent=2) + "\n").encode("utf-8"))


def _document(layout: Layout, plan: Plan) -> dict[str, Any]:
    earlier = layout.checkpoint.path / PROVENANCE_FILE
    previous = read_json_object(earlier) if earlier.exists() else {}
    ancestors = previous.get("original_experts", {})
    original: dict[str, list[int | None]] = {}
    for layer in plan.layers:
        before = ancestors.get(str(layer.layer)) or list(range(plan.n_before))
        slots = place_in_slots(layer.keep, plan.n_after, plan.n_before, plan.groups[0])
        original[str(layer.layer)] = [None if expert is None else before[expert] for expert in slots]
    step = plan.as_json()
    step["plan_sha256"] = plan.sha256()
    return {
        "schema": PROVENANCE_SCHEMA,
        "steps": [*previous.get("steps", []), step],
        "original_experts": original,
    }


def _with_section(text: str, document: dict[str, Any], plan: Plan) -> str:
    rows = [
        "| source | criterion | allocation | routed experts per layer | removed | parameters |",
        "|---|---|---|---|---|---|",
    ]
    for step in document["steps"]:
        rows.append(
            f"| {step['source']['name']} | {step['criterion']} | {step['allocation']} | "
            f"{step['n_before']} → {step['n_after']} | {step['ratio']['actual']:.1%} | "
            f"{step['parameters']['before'] / 1e9:.3g} B → {step['parameters']['after'] / 1e9:.3g} B |"
        )
    padded = plan.n_after * len(plan.layers) - sum(len(layer.keep) for layer in plan.layers)
    section = "\n".join(
        [
            _BEGIN,
            "## Pruned experts",
            "",
            "Routed experts were removed with `xmac prune-moe`. The model computes what its source computes when the "
            "router logits of the removed experts are −∞; no other weight was changed.",
            "",
            *rows,
            "",
            *([f"{padded} of the stored experts are empty slots that are never chosen.", ""] if padded else []),
            f"Which expert of the source sits where is recorded in `{PROVENANCE_FILE}`.",
            _END,
        ]
    )
    pattern = re.compile(re.escape(_BEGIN) + ".*?" + re.escape(_END), re.DOTALL)
    if pattern.search(text):
        return pattern.sub(lambda _: section, text)
    return (text.rstrip("\n") + "\n\n" if text.strip() else "") + section + "\n"
