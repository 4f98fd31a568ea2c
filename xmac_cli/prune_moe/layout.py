"""Find the routed experts in the files of a checkpoint, from tensor names and shapes alone.

The same family occurs with one tensor per expert and with all experts in one tensor, so names decide and `model_type`
only supplies the row of `families.py`. Accounting: every tensor of a MoE block is claimed by exactly one rule; one that
looks like it belongs to the router or to the experts and is claimed by none stops the run. Shapes never decide alone:
a hidden size that equals the number of experts E must not matter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from xmac_cli.checkpoint.directory import Checkpoint
from xmac_cli.checkpoint.header import TensorInfo
from xmac_cli.checkpoint.parameters import parameter_count, quantization_section
from xmac_cli.cli.errors import InputError, UnsupportedModelError
from xmac_cli.prune_moe.families import (
    COUNT_KEYS,
    FAMILIES,
    GROUP_KEYS,
    MTP_PREFIX,
    PER_EXPERT,
    REFUSED,
    TOP_K_KEYS,
    TOPK_GROUP_KEYS,
    AxisRule,
    Family,
    config_holders,
    config_value,
    find_family,
    null_move_is_exact,
)

_ROUTER_LIKE = re.compile(r"(?:gate|router)(?:\.|$)|(?:\w+\.)*(?:e_score_correction_bias|expert_bias)$")
_EXPERT_LIKE = re.compile(r"(?:^|\.)experts?(?:[._]|$)")
_LAYER = re.compile(r"(?<![^.])(?:layers|blocks|h)\.(\d+)\.")
_ADD_A_RULE = "a family is added by a row in xmac_cli/prune_moe/families.py and a test that cuts a tiny model of it"


@dataclass(frozen=True)
class Claim:
    """What one tensor of a MoE block is.

    Args:
        kind: "expert" belongs to one expert; "slice" has `rows` entries of `axis` per expert; "keep" is untouched.
        expert: the expert id of an "expert" tensor.
        rest: the name of an "expert" tensor behind the expert id.
        axis: axis of size E * rows of a "slice" tensor.
        rows: entries of that axis per expert.
        role: what a "slice" tensor is: part of the "experts", the "router" weights, or a selection "bias".
    """

    kind: Literal["expert", "slice", "keep"]
    expert: int = -1
    rest: str = ""
    axis: int = 0
    rows: int = 1
    role: Literal["", "experts", "router", "bias"] = ""


@dataclass(frozen=True)
class MoELayer:
    """One MoE block of the checkpoint.

    Args:
        name: name of the block in the files, such as `model.layers.3.mlp`.
        layer: index of the decoder layer (of the next-token layer for `mtp`).
        storage: how the experts are stored.
        claims: every tensor of the block by name.
        expert_bytes: stored bytes of each expert with its share of sliced tensors, [E].
        expert_parameters: parameters of each expert with its share of sliced tensors, [E].
        mtp: belongs to a next-token-prediction head that transformers does not run.
    """

    name: str
    layer: int
    storage: Literal["per-expert", "fused", "flattened"]
    claims: Mapping[str, Claim] = field(repr=False)
    expert_bytes: tuple[int, ...] = field(repr=False)
    expert_parameters: tuple[int, ...] = field(repr=False)
    mtp: bool = False

    @property
    def num_experts(self) -> int:
        """Number E of routed experts stored in the block."""
        return len(self.expert_bytes)


@dataclass(frozen=True)
class Layout:
    """The mixture-of-experts structure of a checkpoint.

    Args:
        checkpoint: the opened checkpoint.
        family: naming and routing rules.
        model_type: `model_type` of config.json.
        num_experts: E, the same in every layer.
        top_k: experts per token.
        n_group: groups the router limits its choice to; 1 = none.
        topk_group: groups a token may use.
        layers: MoE blocks of the decoder, by layer index.
        mtp_layers: MoE blocks of next-token layers.
        mtp_tensors: names of all tensors of next-token layers, MoE or not.
        parameters: parameters of the whole checkpoint.
    """

    checkpoint: Checkpoint = field(repr=False)
    family: Family
    model_type: str
    num_experts: int
    top_k: int
    n_group: int
    topk_group: int
    layers: tuple[MoELayer, ...]
    mtp_layers: tuple[MoELayer, ...]
    mtp_tensors: frozenset[str] = field(repr=False)
    parameters: int

    @property
    def storage(self) -> str:
        """How the experts of the decoder are stored: "per-expert", "fused", "flattened", or several of them."""
        return " + ".join(sorted({layer.storage for layer in self.layers}))

    @property
    def null_move_exact(self) -> bool:
        """Whether dropping an expert that no token selects changes nothing (see `null_move_is_exact`)."""
        return null_move_is_exact(self.family, self.checkpoint.config, self.n_group)

    def claim(self, tensor: str) -> tuple[MoELayer, Claim] | None:
        """The block and claim of a tensor, or None for a tensor outside of MoE blocks."""
        return self._claims.get(tensor)

    @cached_property
    def _claims(self) -> dict[str, tuple[MoELayer, Claim]]:
        return {name: (layer, c) for layer in (*self.layers, *self.mtp_layers) for name, c in layer.claims.items()}


def sniff_layout(source: Path | str | Checkpoint) -> Layout:
    """Read the MoE structure of a checkpoint from its headers and config.

    Args:
        source: a checkpoint directory, or one that is already open.

    Raises:
        UnsupportedModelError: no rule covers the model type, or a tensor of a MoE block; the message names it.
        InputError: the files contradict each other or the config.
    """
    checkpoint = source if isinstance(source, Checkpoint) else Checkpoint.open(Path(source))
    model_type, family = _family_of(checkpoint.config)
    count = _configured_count(checkpoint.config)
    blocks = _group_by_block(checkpoint, family)
    if not blocks:
        raise UnsupportedModelError(f"no mixture-of-experts layer found in {checkpoint.path} (model type {model_type})")
    depth = config_value(checkpoint.config, ("num_hidden_layers", "n_layers", "num_layers"))
    section = quantization_section(checkpoint.config)
    layers = [
        _read_block(block, tensors, family, count, section, is_next_token_name(block, depth, tower_of(block)))
        for block, tensors in blocks.items()
    ]
    layers.sort(key=lambda layer: (layer.mtp, layer.layer, layer.name))
    main = tuple(layer for layer in layers if not layer.mtp)
    _check_main_layers(main, checkpoint, count)
    _check_strays(checkpoint, layers)
    tower = tower_of(main[0].name)
    n_group, topk_group = _groups(checkpoint.config, family, main[0].num_experts)
    return Layout(
        checkpoint=checkpoint,
        family=family,
        model_type=model_type,
        num_experts=main[0].num_experts,
        top_k=_top_k(checkpoint.config),
        n_group=n_group,
        topk_group=topk_group,
        layers=main,
        mtp_layers=tuple(layer for layer in layers if layer.mtp),
        mtp_tensors=frozenset(name for name in checkpoint.tensors if is_next_token_name(name, depth, tower)),
        parameters=sum(parameter_count(tensor, section) for tensor in checkpoint.tensors.values()),
    )


def _family_of(config: Mapping[str, Any]) -> tuple[str, Family]:
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise InputError("config.json has no model_type")
    for holder in config_holders(config):
        reason = REFUSED.get(str(holder.get("model_type")))
        if reason:
            raise UnsupportedModelError(f"model type {holder['model_type']} is refused: {reason}", _ADD_A_RULE)
    family = find_family(model_type)
    if family is None:
        raise UnsupportedModelError(
            f"no verified rule for model type {model_type}; {sum(len(f.model_types) for f in FAMILIES)} are covered",
            _ADD_A_RULE,
        )
    return model_type, family


def _configured_count(config: Mapping[str, Any]) -> int | None:
    found: dict[str, int] = {}
    for holder in config_holders(config):
        for key in COUNT_KEYS:
            value = holder.get(key)
            values = value if isinstance(value, list) else [value]
            for entry in values:
                if entry is None:
                    continue
                if type(entry) is not int:
                    raise InputError(f"config.json gives {key} as {entry!r}, which is no whole number")
                found[key] = entry
            if isinstance(value, list) and len(set(value)) > 1:
                raise UnsupportedModelError(f"config.json gives layers different expert counts: {key} = {value}")
    if len(set(found.values())) > 1:
        raise InputError(
            "config.json contradicts itself about the number of experts: "
            + ", ".join(f"{key} = {value}" for key, value in found.items())
        )
    return next(iter(found.values()), None)


def _group_by_block(checkpoint: Checkpoint, family: Family) -> dict[str, list[tuple[str, TensorInfo]]]:
    """Tensors by MoE block: {block: [(name behind the block, tensor)]}."""
    block = re.compile(
        rf"^(?P<block>(?:.*?\.)?(?:layers|blocks|h)\.\d+\.(?:[A-Za-z_]\w*\.)*?(?:{'|'.join(family.blocks)}))\.(?P<tail>.+)$"
    )
    grouped: dict[str, list[tuple[str, TensorInfo]]] = {}
    for name, tensor in checkpoint.tensors.items():
        match = block.match(name)
        if match:
            grouped.setdefault(match["block"], []).append((match["tail"], tensor))
    experts = [re.compile(p) for p in (PER_EXPERT, *(rule.pattern for rule in family.fused), *family.flattened)]
    return {
        name: tensors
        for name, tensors in grouped.items()
        if any(pattern.fullmatch(tail) for pattern in experts for tail, _ in tensors)
    }


def _read_block(
    name: str,
    tensors: list[tuple[str, TensorInfo]],
    family: Family,
    count: int | None,
    section: dict[str, Any] | None,
    mtp: bool,
) -> MoELayer:
    per_expert = [match for tail, _ in tensors if (match := re.fullmatch(PER_EXPERT, tail))]
    storage, num_experts = _storage(name, tensors, per_expert, family, count)
    claims = {tensor.name: _claim(tail, tensor, family, num_experts) for tail, tensor in tensors}
    expert_bytes, expert_parameters = [0] * num_experts, [0] * num_experts
    for _, tensor in tensors:
        claim = claims[tensor.name]
        owners = {"expert": [claim.expert], "slice": range(num_experts), "keep": []}[claim.kind]
        parameters = parameter_count(tensor, section) if owners else 0
        for expert in owners:
            expert_bytes[expert] += tensor.nbytes // len(owners)
            expert_parameters[expert] += parameters // len(owners)
    layer = int(_LAYER.findall(name + ".")[-1])
    return MoELayer(name, layer, storage, claims, tuple(expert_bytes), tuple(expert_parameters), mtp)


def _storage(
    name: str,
    tensors: list[tuple[str, TensorInfo]],
    per_expert: list[re.Match[str]],
    family: Family,
    count: int | None,
) -> tuple[Literal["per-expert", "fused", "flattened"], int]:
    fused = [
        (tail, tensor, rule)
        for tail, tensor in tensors
        for rule in family.fused
        if re.fullmatch(rule.pattern, tail) and len(tensor.shape) > rule.axis and tensor.numel > 1
    ]
    if per_expert and fused:
        raise InputError(f"{name} holds its experts twice: as single tensors and as {fused[0][0]}")
    if per_expert:
        return "per-expert", _numbered_experts(name, per_expert)
    if fused:
        _, tensor, rule = fused[0]
        return "fused", count if count is not None else tensor.shape[rule.axis]
    if count is None:
        raise InputError(f"config.json does not say how many experts are stacked in {name}")
    return "flattened", count


def _numbered_experts(name: str, matches: list[re.Match[str]]) -> int:
    parts: dict[int, set[str]] = {}
    for match in matches:
        parts.setdefault(int(match["expert"]), set()).add(match["rest"])
    missing = sorted(set(range(max(parts) + 1)) - parts.keys())
    if missing:
        raise InputError(f"{name} has no expert {missing[0]} although it has expert {max(parts)}")
    complete = set.union(*parts.values())
    for expert, found in sorted(parts.items()):
        if found != complete:
            raise InputError(f"{name}.experts.{expert} lacks {sorted(complete - found)[0]}, which other experts have")
    return len(parts)


def _claim(tail: str, tensor: TensorInfo, family: Family, num_experts: int) -> Claim:
    match = re.fullmatch(PER_EXPERT, tail)
    if match:
        return Claim("expert", expert=int(match["expert"]), rest=match["rest"])
    for rule in (*family.router, *family.fused):
        if re.fullmatch(rule.pattern, tail):
            return _sliced(tensor, rule, num_experts, "experts" if rule in family.fused else "router")
    if any(re.fullmatch(pattern, tail) for pattern in family.flattened):
        if not tensor.shape or tensor.shape[0] % num_experts:
            raise UnsupportedModelError(f"{tensor.name} {list(tensor.shape)} does not hold {num_experts} equal experts")
        return Claim("slice", rows=tensor.shape[0] // num_experts, role="experts")
    if any(re.fullmatch(pattern, tail) for pattern in family.shared):
        return Claim("keep")
    if num_experts in tensor.shape or _ROUTER_LIKE.match(tail) or _EXPERT_LIKE.search(tail):
        raise UnsupportedModelError(
            f"no rule claims {tensor.name} {list(tensor.shape)}, which may have one entry per expert ({family.name})",
            _ADD_A_RULE,
        )
    return Claim("keep")


def _sliced(tensor: TensorInfo, rule: AxisRule, num_experts: int, part: Literal["experts", "router"]) -> Claim:
    if tensor.numel == 1 and num_experts > 1:
        return Claim("keep")  # one scale for all experts
    if len(tensor.shape) <= rule.axis or tensor.shape[rule.axis] != num_experts:
        raise UnsupportedModelError(
            f"{tensor.name} has shape {list(tensor.shape)}; axis {rule.axis} should hold {num_experts} experts",
            "packed formats that do not keep the expert axis (such as bitsandbytes) cannot be cut",
        )
    return Claim("slice", axis=rule.axis, role="bias" if rule.bias else part)


def tower_of(name: str) -> str:
    """What stands in front of `layers.N` in a name: it tells the language model from a vision tower."""
    return _LAYER.split(name + ".", maxsplit=1)[0]


def is_next_token_name(name: str, depth: int | None, tower: str) -> bool:
    """Whether a tensor or block belongs to a next-token-prediction layer.

    Args:
        name: name of a tensor or block.
        depth: number of decoder layers; later ones of the same tower are next-token layers.
        tower: `tower_of` a decoder layer.
    """
    if re.search(MTP_PREFIX, name):
        return True
    match = _LAYER.search(name + ".")
    return match is not None and depth is not None and int(match[1]) >= depth and tower_of(name) == tower


def _check_main_layers(layers: tuple[MoELayer, ...], checkpoint: Checkpoint, count: int | None) -> None:
    if not layers:
        raise UnsupportedModelError(f"only next-token layers of {checkpoint.path} have experts")
    towers = {tower_of(layer.name) for layer in layers}
    if len(towers) > 1 or len({layer.layer for layer in layers}) != len(layers):
        raise UnsupportedModelError(
            f"experts in several parts of the model: {', '.join(sorted(towers)) or 'one layer'}"
        )
    for layer in layers:
        if layer.num_experts != (count if count is not None else layers[0].num_experts):
            raise InputError(
                f"{layer.name} holds {layer.num_experts} experts, but "
                + (f"config.json says {count}" if count is not None else f"{layers[0].name} {layers[0].num_experts}")
            )
        if not any(claim.role == "router" for claim in layer.claims.values()):
            raise UnsupportedModelError(f"{layer.name} has experts but no router that a rule knows")


def _check_strays(checkpoint: Checkpoint, layers: list[MoELayer]) -> None:
    claimed = {name for layer in layers for name in layer.claims}
    for name in checkpoint.tensors:
        if name not in claimed and re.search(r"\.experts\.|\.e_score_correction_bias$|\.router\.", name):
            raise UnsupportedModelError(f"no rule claims {name}, which lies outside of the MoE blocks", _ADD_A_RULE)


def _top_k(config: Mapping[str, Any]) -> int:
    value = config_value(config, TOP_K_KEYS)
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(entry, int) and entry > 0 for entry in values):
        raise InputError(f"config.json does not say how many experts a token uses ({', '.join(TOP_K_KEYS)})")
    return max(values)


def _groups(config: Mapping[str, Any], family: Family, num_experts: int) -> tuple[int, int]:
    n_group = config_value(config, GROUP_KEYS) if family.grouped else 1
    if family.grouped == "max" and config_value(config, ("topk_method",)) != "group_limited_greedy":
        n_group = 1
    if not isinstance(n_group, int) or n_group <= 1:
        return 1, 1
    topk_group = config_value(config, TOPK_GROUP_KEYS)
    if num_experts % n_group or not isinstance(topk_group, int) or not 1 <= topk_group <= n_group:
        raise InputError(f"config.json has impossible groups: n_group {n_group}, topk_group {topk_group}")
    return n_group, topk_group
