"""Expert numbers inside quantisation configs, renumbered with the experts.

Quantised checkpoints list module names that were left alone or treated differently (`modules_to_not_convert`,
`ignore`, GPTQ's `dynamic`, modelopt's `exclude_modules`); some name single experts. A name of a dropped expert goes, a
kept one is renumbered, names without expert numbers stay. A name that means an expert of every layer at once can only
be kept when all layers keep the same experts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from xmac_cli.cli.errors import UnsupportedModelError
from xmac_cli.prune_moe.families import MTP_PREFIX

# {old expert id: new id} by ("" or "mtp", layer index).
Numbering = Mapping[tuple[str, int], Mapping[int, int]]

_EXPERT = re.compile(r"(?P<head>experts\\?\.)(?P<expert>\d+)(?=\\?\.|\$|$)")
_PICKED = re.compile(r"experts\\?\.(?:\((?!\\d|\?:\\d|\[0-9\]|\.)|\[(?!0-9\])|\d+[-|])")
_LAYER = re.compile(r"(?:layers|blocks|h)\\?\.(\d+)\\?\.")
_GONE = object()


def renumber_names(value: Any, numbering: Numbering) -> Any:
    """Rewrite every name in a nested structure.

    Args:
        value: a `quantization_config`, or any JSON value.
        numbering: new ids of the experts that stay, by layer; "mtp" marks layers below an `mtp.` prefix.

    Returns:
        The same structure with expert ids renumbered and entries of dropped experts removed.

    Raises:
        UnsupportedModelError: an entry names experts in a way that cannot be rewritten.
    """
    result = _rewrite(value, numbering)
    return None if result is _GONE else result


def _rewrite(value: Any, numbering: Numbering) -> Any:
    if isinstance(value, dict):
        pairs = [(_rename(key, numbering), _rewrite(entry, numbering)) for key, entry in value.items()]
        return {key: entry for key, entry in pairs if key is not _GONE and entry is not _GONE}
    if isinstance(value, list):
        entries = [_rewrite(entry, numbering) for entry in value]
        return [entry for entry in entries if entry is not _GONE]
    return _rename(value, numbering) if isinstance(value, str) else value


def _rename(name: Any, numbering: Numbering) -> Any:
    if not isinstance(name, str):
        return name
    if _PICKED.search(name):
        raise UnsupportedModelError(
            f"the quantisation config picks experts by the pattern {name!r}, which cannot be renumbered",
            "replace it by one entry per expert",
        )
    match = _EXPERT.search(name)
    if match is None:
        return name
    layer = _LAYER.search(name[: match.start()])
    if layer is None:
        tables = list(numbering.values())
        if any(table != tables[0] for table in tables):
            raise UnsupportedModelError(
                f"the quantisation config names an expert of every layer at once, {name!r}, but layers keep different "
                "experts",
                "replace it by one entry per layer",
            )
        table = tables[0]
    else:
        part = "mtp" if re.search(MTP_PREFIX, name.replace("\\", "")) else ""
        if (part, int(layer[1])) not in numbering:
            return name
        table = numbering[part, int(layer[1])]
    expert = int(match["expert"])
    if expert not in table:
        return _GONE
    return f"{name[: match.start()]}{match['head']}{table[expert]}{name[match.end() :]}"
