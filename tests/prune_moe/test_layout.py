"""The layout is read from names and shapes; what no rule claims, or what contradicts itself, stops the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.prune_cases import mixtral_config, mixtral_tensors, write_files

from xmac_cli.cli.errors import InputError, UnsupportedModelError
from xmac_cli.prune_moe.families import REFUSED, find_family, null_move_is_exact
from xmac_cli.prune_moe.layout import Layout, sniff_layout

BLOCK = "model.layers.1.block_sparse_moe"


def sniff(tmp_path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Layout:
    return sniff_layout(write_files(tmp_path / "model", config, tensors))


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype=dtype)


def test_per_expert_files_are_understood(tmp_path: Path) -> None:
    layout = sniff(tmp_path, mixtral_config(), mixtral_tensors())
    assert (layout.family.name, layout.storage, layout.num_experts, layout.top_k) == ("mixtral", "per-expert", 4, 2)
    assert [layer.name for layer in layout.layers] == ["model.layers.0.block_sparse_moe", BLOCK]
    # three 3 x 6 matrices and one router row of 6 each
    assert layout.layers[0].expert_parameters == (60,) * 4
    assert layout.layers[0].expert_bytes == (240,) * 4
    assert layout.parameters == 60 + 2 * 4 * 60


def test_fused_files_of_the_same_family_are_understood(tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.mlp.gate.weight": zeros(4, 6),
        "model.layers.0.mlp.experts.gate_up_proj": zeros(4, 6, 6),
        "model.layers.0.mlp.experts.down_proj": zeros(4, 6, 3),
    }
    layout = sniff(tmp_path, mixtral_config(), tensors)
    assert layout.storage == "fused"
    assert layout.layers[0].expert_parameters == (60,) * 4


@pytest.mark.parametrize("hidden", [4, 6])
def test_names_decide_when_the_hidden_size_equals_the_expert_count(tmp_path: Path, hidden: int) -> None:
    tensors = {
        "model.layers.0.mlp.gate.weight": zeros(4, hidden),
        "model.layers.0.mlp.shared_expert.down_proj.weight": zeros(hidden, 5),
        "model.layers.0.mlp.shared_expert_gate.weight": zeros(1, hidden),
        "model.layers.0.mlp.experts.gate_up_proj": zeros(4, 6, hidden),
        "model.layers.0.mlp.experts.down_proj": zeros(4, hidden, 3),
    }
    layout = sniff(tmp_path, {"model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2}, tensors)
    kinds = {name.rpartition("mlp.")[2]: claim.kind for name, claim in layout.layers[0].claims.items()}
    assert kinds == {
        "gate.weight": "slice",
        "experts.gate_up_proj": "slice",
        "experts.down_proj": "slice",
        "shared_expert.down_proj.weight": "keep",
        "shared_expert_gate.weight": "keep",
    }


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{BLOCK}.per_expert_scale", (4,)),
        (f"{BLOCK}.temperature", (2, 4)),
        (f"{BLOCK}.gate.qweight", (6, 1)),
        (f"{BLOCK}.gate.extra", (7,)),
        (f"{BLOCK}.router.weight", (9, 6)),
        (f"{BLOCK}.experts.counts", (7,)),
        ("model.layers.1.experts.0.w1.weight", (3, 6)),
        ("model.layers.1.router.proj.weight", (9, 6)),
    ],
)
def test_a_tensor_that_no_rule_claims_is_named(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedModelError, match=name.replace(".", r"\.")) as caught:
        sniff(tmp_path, mixtral_config(), mixtral_tensors() | {name: zeros(*shape)})
    assert caught.value.exit_code == 3


def test_a_norm_in_the_block_is_left_alone(tmp_path: Path) -> None:
    layout = sniff(tmp_path, mixtral_config(), mixtral_tensors() | {f"{BLOCK}.norm.weight": zeros(6)})
    assert layout.layers[1].claims[f"{BLOCK}.norm.weight"].kind == "keep"


@pytest.mark.parametrize("model_type", sorted(REFUSED))
def test_refused_families_say_why(tmp_path: Path, model_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match="is refused: ") as caught:
        sniff(tmp_path, mixtral_config() | {"model_type": model_type}, mixtral_tensors())
    assert caught.value.exit_code == 3
    assert REFUSED[model_type] in caught.value.message


def test_a_refused_language_model_inside_another_model_is_refused(tmp_path: Path) -> None:
    config = mixtral_config() | {"text_config": {"model_type": "deepseek_v4"}}
    with pytest.raises(UnsupportedModelError, match="hash layers"):
        sniff(tmp_path, config, mixtral_tensors())


def test_an_unknown_model_type_is_refused_although_its_names_look_familiar(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="no verified rule for model type brand_new"):
        sniff(tmp_path, mixtral_config() | {"model_type": "brand_new"}, mixtral_tensors())


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="no mixture-of-experts layer"):
        sniff(tmp_path, mixtral_config(), {"model.layers.0.mlp.gate_proj.weight": zeros(3, 6)})


def test_experts_without_a_router_are_refused(tmp_path: Path) -> None:
    tensors = {name: t for name, t in mixtral_tensors().items() if "gate" not in name}
    with pytest.raises(UnsupportedModelError, match="no router"):
        sniff(tmp_path, mixtral_config(), tensors)


def test_packed_experts_without_an_expert_axis_are_refused(tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.mlp.gate.weight": zeros(4, 6),
        "model.layers.0.mlp.experts.gate_up_proj": zeros(72, 1, dtype=np.uint8),
        "model.layers.0.mlp.experts.down_proj": zeros(36, 1, dtype=np.uint8),
    }
    with pytest.raises(UnsupportedModelError, match="axis 0 should hold 4 experts") as caught:
        sniff(tmp_path, mixtral_config(), tensors)
    assert "bitsandbytes" in (caught.value.hint or "")


def test_a_missing_expert_tensor_is_named(tmp_path: Path) -> None:
    tensors = mixtral_tensors()
    del tensors[f"{BLOCK}.experts.2.w3.weight"]
    with pytest.raises(InputError, match=r"experts\.2 lacks w3\.weight"):
        sniff(tmp_path, mixtral_config(), tensors)


def test_a_hole_in_the_numbering_is_named(tmp_path: Path) -> None:
    tensors = {name: t for name, t in mixtral_tensors().items() if ".experts.1." not in name}
    with pytest.raises(InputError, match="no expert 1 although it has expert 3"):
        sniff(tmp_path, mixtral_config(), tensors)


def test_experts_stored_twice_are_refused(tmp_path: Path) -> None:
    extra = {f"{BLOCK}.experts.gate_up_proj": zeros(4, 6, 6)}
    with pytest.raises(InputError, match="twice"):
        sniff(tmp_path, mixtral_config(), mixtral_tensors() | extra)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_local_experts": 5}, "holds 4 experts, but config.json says 5"),
        ({"num_experts": 8}, "contradicts itself"),
        ({"num_experts_per_tok": None}, "how many experts a token uses"),
        ({"model_type": None}, "no model_type"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sniff(tmp_path, mixtral_config() | keys, mixtral_tensors())


def test_a_config_without_a_count_is_read_from_the_files(tmp_path: Path) -> None:
    assert sniff(tmp_path, mixtral_config(num_local_experts=None), mixtral_tensors()).num_experts == 4


@pytest.mark.parametrize("count", ["4", 4.0, True, {"experts": 4}, [4, "4"]])
def test_a_count_that_is_no_whole_number_is_refused_from_the_headers(tmp_path: Path, count: Any) -> None:
    with pytest.raises(InputError, match="whole number"):
        sniff(tmp_path, mixtral_config() | {"num_local_experts": count}, mixtral_tensors())


def test_counts_and_top_k_given_per_layer(tmp_path: Path) -> None:
    config = {"model_type": "hunyuan_v1_moe", "num_experts": [4, 4], "moe_topk": [2, 1], "num_hidden_layers": 2}
    tensors = {
        name.replace("block_sparse_moe", "mlp").replace("gate.weight", "gate.wg.weight"): t
        for name, t in mixtral_tensors().items()
    }
    assert sniff(tmp_path, config, tensors).top_k == 2


def test_trailing_layers_and_mtp_prefixes_are_next_token_layers(tmp_path: Path) -> None:
    tensors = mixtral_tensors(layers=(0, 1, 2)) | {"model.layers.2.eh_proj.weight": zeros(6, 12)}
    tensors |= {
        name.replace("model.layers.0", "mtp.layers.0"): t for name, t in tensors.items() if "model.layers.0" in name
    }
    layout = sniff(tmp_path, mixtral_config(), tensors)
    assert [layer.layer for layer in layout.layers] == [0, 1]
    assert [layer.name for layer in layout.mtp_layers] == [
        "mtp.layers.0.block_sparse_moe",
        "model.layers.2.block_sparse_moe",
    ]
    assert "model.layers.2.eh_proj.weight" in layout.mtp_tensors
    assert "model.layers.1.block_sparse_moe.gate.weight" not in layout.mtp_tensors


def test_a_vision_tower_deeper_than_the_language_model_is_no_next_token_layer(tmp_path: Path) -> None:
    vision = {f"visual.blocks.{index}.mlp.fc1.weight": zeros(3, 6) for index in range(5)}
    assert sniff(tmp_path, mixtral_config(), mixtral_tensors() | vision).mtp_tensors == frozenset()


@pytest.mark.parametrize(
    ("model_type", "config", "n_group", "exact"),
    [
        ("mixtral", {}, 1, True),
        ("qwen3_moe", {"norm_topk_prob": True}, 1, True),
        ("qwen3_moe", {"norm_topk_prob": False}, 1, False),
        ("qwen2_moe", {}, 1, False),
        ("olmoe", {"norm_topk_prob": False}, 1, False),
        ("deepseek_v2", {"norm_topk_prob": True}, 1, False),
        ("deepseek_v3", {"norm_topk_prob": True}, 1, True),
        ("deepseek_v3", {"norm_topk_prob": True}, 8, False),
        ("gpt_oss", {}, 1, True),
        ("granitemoe", {}, 1, True),
        ("llama4", {}, 1, True),
        ("jamba", {}, 1, False),
        ("phimoe", {}, 1, False),
        ("dbrx", {"ffn_config": {"moe_normalize_expert_weights": 1}}, 1, True),
        ("dbrx", {"ffn_config": {"moe_normalize_expert_weights": None}}, 1, False),
        ("ernie4_5_moe", {}, 1, False),
    ],
)
def test_where_an_unused_expert_may_be_dropped_without_a_pass(
    model_type: str, config: dict[str, Any], n_group: int, exact: bool
) -> None:
    family = find_family(model_type)
    assert family is not None
    assert null_move_is_exact(family, config, n_group) is exact
