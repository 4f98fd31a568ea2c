"""Loading is strict: what does not fit is an error with a sentence, never a model with random parts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from xmac_cli.cli.errors import InputError, UnsupportedModelError, UsageError
from xmac_cli.models.demo_cache import DemoMoe
from xmac_cli.models.loading import choose_experts, load_model, load_tokenizer, resolve_device


@pytest.fixture
def copy(tiny_demo: DemoMoe, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_demo.model, tmp_path / "model"))


def rewrite(path: Path, change: object) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)  # type: ignore[operator]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def edit_config(path: Path, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text())
    config.update(changes)
    (path / "config.json").write_text(json.dumps(config))


def test_loaded_weights_are_those_of_the_file(copy: Path) -> None:
    model = load_model(copy, device="cpu")
    assert not model.training
    stored = load_file(copy / "model.safetensors")
    fused = model.state_dict()["model.layers.1.mlp.experts.down_proj"]
    for expert in range(model.config.num_experts):
        assert torch.equal(fused[expert], stored[f"model.layers.1.mlp.experts.{expert}.down_proj.weight"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_the_dtype_is_what_was_asked_for(copy: Path, dtype: str) -> None:
    model = load_model(copy, device="cpu", dtype=dtype)
    assert model.dtype == getattr(torch, dtype)
    assert model(input_ids=torch.arange(8)[None]).logits.isfinite().all()


def test_experts_implementations_agree_and_batched_is_not_offered(copy: Path) -> None:
    ids = torch.arange(40)[None]
    outputs = []
    for experts in ("eager", "grouped_mm"):
        model = load_model(copy, device="cpu", experts=experts)
        assert model.config._experts_implementation == experts
        with torch.no_grad():
            outputs.append(model(input_ids=ids).logits)
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-4, rtol=1e-4)
    with pytest.raises(UsageError, match="batched_mm"):
        choose_experts(model, "batched_mm")


def test_a_missing_tensor_is_an_error_with_its_name(copy: Path) -> None:
    rewrite(copy, lambda tensors: tensors.pop("model.layers.0.self_attn.q_proj.weight"))
    with pytest.raises(InputError, match=r"lacks tensors.*q_proj"):
        load_model(copy, device="cpu")


def test_an_unexpected_tensor_is_an_error_with_its_name(copy: Path) -> None:
    rewrite(copy, lambda tensors: tensors.update({"model.extra.weight": torch.zeros(3)}))
    with pytest.raises(InputError, match=r"does not have: model\.extra\.weight"):
        load_model(copy, device="cpu")


def test_a_config_that_says_other_shapes_is_an_error(copy: Path) -> None:
    edit_config(copy, num_experts=6)
    with pytest.raises(InputError):
        load_model(copy, device="cpu")


def test_pickled_weights_are_not_read(copy: Path) -> None:
    torch.save(load_file(copy / "model.safetensors"), copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    with pytest.raises(InputError):
        load_model(copy, device="cpu")


def test_truncated_weights_are_an_input_error(copy: Path) -> None:
    data = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match="cannot load"):
        load_model(copy, device="cpu")


def test_an_unknown_architecture_is_unsupported(copy: Path) -> None:
    edit_config(copy, model_type="no_such_model", architectures=["NoSuchModel"])
    with pytest.raises(UnsupportedModelError, match="architecture"):
        load_model(copy, device="cpu")


def test_shipped_code_does_not_run_without_the_flag(copy: Path, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    (copy / "code.py").write_text(f"open({str(proof)!r}, 'w').close()\nclass Config: pass\nclass Model: pass\n")
    edit_config(
        copy, model_type="no_such_model", auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    )
    with pytest.raises(UsageError, match="needs Python code") as caught:
        load_model(copy, device="cpu")
    assert "--trust-remote-code" in (caught.value.hint or "")
    assert not proof.exists()


def test_a_directory_without_a_config_is_named(tmp_path: Path) -> None:
    for load in (load_model, load_tokenizer):
        with pytest.raises(InputError, match=r"no config\.json"):
            load(tmp_path)


def test_a_checkpoint_without_tokenizer_is_an_input_error(copy: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / name).unlink()
    with pytest.raises(InputError):
        load_tokenizer(copy)


@pytest.mark.parametrize("device", ["cuda:99", "toaster"])
def test_devices_that_do_not_exist_are_usage_errors(device: str) -> None:
    with pytest.raises(UsageError):
        resolve_device(device)


def test_an_unknown_dtype_is_a_usage_error(copy: Path) -> None:
    with pytest.raises(UsageError, match="int3"):
        load_model(copy, dtype="int3")
