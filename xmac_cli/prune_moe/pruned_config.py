"""config.json of the pruned model: the number of experts under every name it has, and nothing else.

A config may say the count several times (`num_experts` and `num_local_experts`, at the top and in `text_config`), and a
model class reads one of them; so all are changed. Key order and unknown keys stay.
"""

from __future__ import annotations

import copy
import re
from typing import Any

from xmac_cli.prune_moe.allocation import place_in_slots
from xmac_cli.prune_moe.families import (
    COUNT_KEYS,
    COUNT_LIST_KEYS,
    HOLDERS,
    MTP_COUNT_KEYS,
    MTP_PREFIX,
    config_holders,
    config_value,
)
from xmac_cli.prune_moe.layout import Layout
from xmac_cli.prune_moe.plan_file import Plan
from xmac_cli.prune_moe.quantization_names import renumber_names

QUANTIZATION_KEYS = ("quantization_config", "compression_config")


def pruned_config(config: dict[str, Any], layout: Layout, plan: Plan) -> dict[str, Any]:
    """The config of the result.

    Args:
        config: of the source; not modified.
        layout: of the source.
        plan: what stays.
    """
    result = copy.deepcopy(config)
    _visit(result, layout, plan)
    if config_value(config, COUNT_KEYS) is None and plan.n_after != plan.n_before:
        # The class default was in force; now the count has to be said.
        innermost: Any = config_holders(result)[-1]
        innermost[layout.family.count_key] = plan.n_after
    return result


def changed_keys(before: dict[str, Any], after: dict[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted key, old value, new value) of everything that differs."""
    changes: list[tuple[str, Any, Any]] = []
    for key in dict.fromkeys((*before, *after)):
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            changes += changed_keys(old, new, f"{prefix}{key}.")
        elif old != new:
            changes.append((prefix + key, old, new))
    return changes


def numbering_of(layout: Layout, plan: Plan) -> dict[tuple[str, int], dict[int, int]]:
    """New ids of the experts that stay, by layer; the form that `renumber_names` takes."""
    table: dict[tuple[str, int], dict[int, int]] = {}
    for block in layout.mtp_layers if plan.mtp == "drop" else ():
        table[_part(block.name), block.layer] = {}
    for layer in (*plan.mtp_layers, *plan.layers):
        slots = place_in_slots(layer.keep, plan.n_after, plan.n_before, plan.groups[0])
        table[_part(layer.name), layer.layer] = {e: slot for slot, e in enumerate(slots) if e is not None}
    return table


def _part(name: str) -> str:
    return "mtp" if re.search(MTP_PREFIX, name) else ""


def _visit(holder: dict[str, Any], layout: Layout, plan: Plan) -> None:
    for key in (*COUNT_KEYS, *COUNT_LIST_KEYS):
        value = holder.get(key)
        if isinstance(value, list):
            holder[key] = [plan.n_after if entry == plan.n_before else entry for entry in value]
        elif isinstance(value, int) and key in COUNT_KEYS:
            holder[key] = plan.n_after
    if plan.mtp == "drop":
        for key in MTP_COUNT_KEYS:
            if isinstance(holder.get(key), int):
                holder[key] = 0
    for key in QUANTIZATION_KEYS:
        if isinstance(holder.get(key), dict):
            holder[key] = renumber_names(holder[key], numbering_of(layout, plan))
    for key in HOLDERS:
        if isinstance(holder.get(key), dict):
            _visit(holder[key], layout, plan)
