"""What each family of mixture-of-experts checkpoints calls its tensors and config keys: one row per family.

A row is only here if a test cuts a tiny model of the family and finds the logits of the masked original. Everything
else is refused (`REFUSED`, or no row at all): a wrong guess would silently produce a broken model.
Names in a row are what follows the MoE block, `…layers.N.<block>.`; E = number of routed experts.
Source: the files of the families on the Hugging Face hub and transformers' modelling code and conversion table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Routing = Literal["softmax", "sigmoid", "topk_softmax", "topk_sigmoid", "sparsemixer"]


@dataclass(frozen=True)
class AxisRule:
    """A tensor that has one slice per routed expert.

    Args:
        pattern: regular expression for the whole name after the block.
        axis: the axis of size E.
        bias: a selection bias: it decides which experts are chosen, so a very negative entry disables a slot.
    """

    pattern: str
    axis: int = 0
    bias: bool = False


@dataclass(frozen=True)
class Family:
    """Naming, config keys and routing of one family.

    Args:
        model_types: `model_type` values of config.json that use this row.
        blocks: names of the MoE module in a decoder layer.
        router: tensors of the router that have an axis of size E.
        count_key: the config key of E that the model class reads.
        routing: softmax or sigmoid over all logits and then top-k; or top-k of the logits and then softmax or sigmoid;
            or Phi's sparsemixer.
        renormalise: gates of the chosen experts are divided by their sum: "always", "never", or the config key that
            decides.
        grouped: the router first picks groups of experts when the config asks for more than one group:
            "top2" scores a group by its two best experts, "max" by its best.
        fused: tensors that hold all experts, with the axis of size E. Quantised companions (`_scales`, `.weight_packed`
            and so on) share the prefix.
        flattened: tensors [E * f, d] that hold all experts one below the other.
        shared: tensors of the block that belong to no routed expert, whatever their shape.
        layout_note: one sentence for the documentation.
    """

    model_types: tuple[str, ...]
    blocks: tuple[str, ...]
    router: tuple[AxisRule, ...]
    count_key: str
    routing: Routing
    renormalise: str = "always"
    grouped: Literal["", "top2", "max"] = ""
    fused: tuple[AxisRule, ...] = (AxisRule(r"experts\.(?:gate_up_proj|gate_proj|up_proj|down_proj)(?:[._].+)?"),)
    flattened: tuple[str, ...] = ()
    shared: tuple[str, ...] = (r"shared?_experts?(?:_gate)?\..+", r"shared_mlp\..+")
    layout_note: str = ""

    @property
    def name(self) -> str:
        """Name of the family: its first model type."""
        return self.model_types[0]

    @property
    def selection_bias(self) -> bool:
        """Whether routers of the family have a bias that decides which experts are chosen."""
        return any(rule.bias for rule in self.router)

    @property
    def paddable(self) -> bool:
        """Whether an empty slot can be disabled exactly.

        A selection bias keeps the slot from being chosen. But where scores are a softmax over all logits (ERNIE), the
        empty slot's logit of 0 would still shrink every other score before the bias is added, and change the choice.
        """
        return self.selection_bias and self.routing != "softmax"


PER_EXPERT = r"experts\.(?P<expert>\d+)\.(?P<rest>.+)"

_GATE = (AxisRule(r"gate\.weight"),)
_GATE_BIAS = (AxisRule(r"gate\.weight"), AxisRule(r"gate\.(?:e_score_correction_bias|expert_bias)", bias=True))
_BLOCK_BIAS = (*_GATE_BIAS, AxisRule(r"(?:e_score_correction_bias|expert_bias)", bias=True))
_MIXTRAL_BLOCKS = ("block_sparse_moe", "mlp")
_MLP = ("mlp",)

FAMILIES: tuple[Family, ...] = (
    Family(("mixtral", "minimax"), _MIXTRAL_BLOCKS, _GATE, "num_local_experts", "softmax"),
    Family(("minimax_m2",), _MIXTRAL_BLOCKS, _BLOCK_BIAS, "num_local_experts", "sigmoid"),
    Family(
        ("phimoe",),
        _MIXTRAL_BLOCKS,
        (AxisRule(r"(?:gate|router)\.weight"),),
        "num_local_experts",
        "sparsemixer",
        "never",
        layout_note="transformers renames `gate` to `router`",
    ),
    Family(("qwen2_moe",), _MLP, _GATE, "num_experts", "softmax", "norm_topk_prob"),
    Family(("qwen3_moe", "mellum"), _MLP, _GATE, "num_local_experts", "softmax", "norm_topk_prob"),
    Family(("qwen3_next",), _MLP, _GATE, "num_experts", "softmax", "norm_topk_prob"),
    Family(
        ("qwen3_5_moe", "qwen3_5_moe_text"),
        _MLP,
        _GATE,
        "num_experts",
        "softmax",
        layout_note="fused on the hub; text model below `model.language_model`",
    ),
    Family(
        ("qwen3_vl_moe",),
        _MLP,
        _GATE,
        "num_local_experts",
        "softmax",
        layout_note="fused and transposed: [E, d, 2f] and [E, f, d]",
    ),
    Family(("olmoe", "flex_olmo"), _MLP, _GATE, "num_experts", "softmax", "norm_topk_prob"),
    Family(("deepseek_v2",), _MLP, _GATE, "n_routed_experts", "softmax", "never", grouped="max"),
    Family(
        (
            "deepseek_v3",
            "deepseek_v32",
            "glm4_moe",
            "glm4_moe_lite",
            "glm4v_moe",
            "glm_moe_dsa",
            "kimi_k2",
            "kimi_k25",
            "dots1",
            "solar_open",
            "mimo_v2_flash",
            "sarvam_mla",
            "sarvam_moe",
            "axk1",
            "axk2",
            "hy_v4",
        ),
        _MLP,
        _GATE_BIAS,
        "n_routed_experts",
        "sigmoid",
        "norm_topk_prob",
        grouped="top2",
    ),
    Family(("exaone_moe",), _MLP, _BLOCK_BIAS, "num_experts", "sigmoid", "norm_topk_prob", grouped="top2"),
    Family(
        ("kimi_linear", "bailing_hybrid"),
        _MIXTRAL_BLOCKS,
        _GATE_BIAS,
        "num_experts",
        "sigmoid",
        "moe_renormalize",
        grouped="top2",
    ),
    Family(
        ("hy_v3", "afmoe"),
        _MLP,
        (*_BLOCK_BIAS, AxisRule(r"router\.gate\.weight")),
        "num_experts",
        "sigmoid",
        layout_note="`router.gate` on the hub",
    ),
    Family(
        ("laguna",),
        _MLP,
        (*_GATE_BIAS, AxisRule(r"experts\.e_score_correction_bias", bias=True)),
        "num_experts",
        "sigmoid",
        layout_note="the selection bias sits below `experts` on the hub",
    ),
    Family(("lfm2_moe",), ("feed_forward",), _BLOCK_BIAS, "num_experts", "sigmoid", "norm_topk_prob"),
    Family(
        ("nemotron_h",),
        ("mixer",),
        _GATE_BIAS,
        "n_routed_experts",
        "sigmoid",
        "norm_topk_prob",
        grouped="top2",
        layout_note="experts have no gate projection",
    ),
    Family(
        ("ernie4_5_moe",),
        _MLP,
        (*_GATE, AxisRule(r"(?:gate\.)?moe_statics\.e_score_correction_bias", axis=1, bias=True)),
        "moe_num_experts",
        "softmax",
        layout_note="selection bias [1, E]",
    ),
    Family(("hunyuan_v1_moe",), _MLP, (AxisRule(r"gate\.wg\.weight"),), "num_experts", "softmax"),
    Family(
        ("cohere2_moe",),
        _MLP,
        _GATE,
        "num_experts",
        "topk_softmax",
        layout_note="sigmoid gates when the config says so",
    ),
    Family(
        ("gpt_oss",),
        _MLP,
        (AxisRule(r"router\.weight"), AxisRule(r"router\.bias", bias=True)),
        "num_local_experts",
        "topk_softmax",
        layout_note="fused [E, d, 2f] with biases, or mxfp4 blocks and scales",
    ),
    Family(
        ("llama4", "llama4_text"),
        ("feed_forward",),
        (AxisRule(r"router\.weight"),),
        "num_local_experts",
        "topk_sigmoid",
        "never",
        layout_note="fused [E, d, 2f]; the gate scales the input of the expert",
    ),
    Family(
        ("granitemoe", "granitemoeshared", "granitemoehybrid", "granitemoe_swa"),
        ("block_sparse_moe",),
        (AxisRule(r"router\.(?:layer\.)?weight"),),
        "num_local_experts",
        "topk_softmax",
        fused=(AxisRule(r"(?:input_linear|output_linear|experts\.gate_up_proj|experts\.down_proj)(?:[._].+)?"),),
        layout_note="fused `input_linear` and `output_linear`",
    ),
    Family(
        ("aria", "aria_text"),
        _MLP,
        (AxisRule(r"router\.weight"),),
        "moe_num_experts",
        "topk_softmax",
        fused=(AxisRule(r"experts\.(?:fc1|fc2|gate_up_proj|down_proj)(?:[._].+)?"),),
        layout_note="fused [E, d, 2f] `fc1` and `fc2`",
    ),
    Family(("jamba",), ("feed_forward",), (AxisRule(r"router\.weight"),), "num_experts", "softmax", "never"),
    Family(
        ("dbrx",),
        ("ffn",),
        (AxisRule(r"router\.layer\.weight"),),
        "moe_num_experts",
        "softmax",
        "moe_normalize_expert_weights",
        fused=(),
        flattened=(r"experts\.mlp\.(?:w1|v1|w2)",),
        layout_note="experts stacked in [E * f, d]; count in `ffn_config`",
    ),
)

REFUSED: dict[str, str] = {
    "deepseek_v4": "its hash layers map token ids to expert ids (`tid2eid`)",
    "ernie4_5_vl_moe": "its text and vision experts share one numbering",
    "gemma4": "its router has a per-expert scale outside of the expert tensors",
    "gemma4_text": "its router has a per-expert scale outside of the expert tensors",
    "diffusion_gemma": "its router has a per-expert scale outside of the expert tensors",
    "longcat_flash": "identity experts are appended to the rows of its router",
    "zaya": "its router has an extra identity row and passes a state from layer to layer",
    "jetmoe": "its attention heads are experts too",
    "switch_transformers": "encoder-decoder models with capacity routing have no masked equivalent",
    "nllb_moe": "encoder-decoder models with capacity routing have no masked equivalent",
    "doge": "its experts are product keys, not modules",
    "qwen3_omni_moe": "its thinker and its talker each have their own experts under one numbering",
    "dots3_note": "its vision encoder has routed experts of its own",
}

COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
COUNT_LIST_KEYS = ("moe_capacity",)
TOP_K_KEYS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "moe_top_k",
    "top_k_experts",
)
GROUP_KEYS = ("n_group", "num_expert_group")
TOPK_GROUP_KEYS = ("topk_group",)
MTP_COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
MTP_PREFIX = r"(?:^|\.)mtp(?:_layers|_block)?\."
HOLDERS = ("text_config", "llm_config", "language_config", "ffn_config", "thinker_config")

_BY_MODEL_TYPE = {model_type: family for family in FAMILIES for model_type in family.model_types}


def find_family(model_type: str) -> Family | None:
    """The row of a `model_type`, or None."""
    return _BY_MODEL_TYPE.get(model_type)


def config_holders(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The config and its nested configs of the language model, innermost last."""
    found: list[Mapping[str, Any]] = [config]
    for key in HOLDERS:
        nested = config.get(key)
        if isinstance(nested, Mapping):
            found.extend(config_holders(nested))
    return found


def config_value(config: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    """The first value that is not null of any of the keys, the innermost language model config first."""
    for holder in reversed(config_holders(config)):
        for key in keys:
            if holder.get(key) is not None:
                return holder[key]
    return None


def null_move_is_exact(family: Family, config: Mapping[str, Any], n_group: int) -> bool:
    """Whether removing an expert that no token selects leaves every output unchanged.

    True when the gate of a chosen expert depends on the logits of the chosen experts only, and no group choice can
    change: gates are renormalised, or are a function of their own logit.
    """
    if n_group > 1 or family.routing == "sparsemixer":
        return False
    if family.routing == "softmax" and family.selection_bias:
        # ERNIE: a removal lifts the other probabilities against their biases, so the choice can change.
        return False
    if family.routing != "softmax" or family.renormalise == "always":
        return True
    return family.renormalise != "never" and bool(config_value(config, (family.renormalise,)))
