"""The demo MoE: real architecture, the same bytes for the same seed, better than n-gram models."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from xmac_cli.cli.errors import UsageError
from xmac_cli.cli.progress import NullProgress
from xmac_cli.data.documents import read_documents
from xmac_cli.data.stdlib_corpus import load_stdlib_corpus
from xmac_cli.models import demo_moe
from xmac_cli.models.demo_cache import (
    DemoMoe,
    cache_directory,
    cached_demo_moe,
    find_demo_moe,
    write_calibration,
    write_heldout,
)
from xmac_cli.models.demo_moe import MixtureBatches, build_demo_moe
from xmac_cli.models.demo_recipe import RECIPES, demo_recipe
from xmac_cli.models.loading import load_model, load_tokenizer
from xmac_cli.models.perplexity import token_nll


def tree(directory: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(directory.iterdir())}


def test_it_is_a_qwen3_moe_that_routes_to_two_renormalised_experts(tiny_demo: DemoMoe) -> None:
    model = load_model(tiny_demo.model, device="cpu")
    config = model.config
    assert config.model_type == "qwen3_moe"
    assert config.num_hidden_layers >= 4
    assert config.num_experts >= 8
    assert (config.num_experts_per_tok, config.norm_topk_prob) == (2, True)
    assert sum(p.numel() for p in model.parameters()) == tiny_demo.report["parameters"]
    assert json.loads((tiny_demo.model / "config.json").read_text())["num_experts"] == config.num_experts


def test_the_full_size_has_five_to_ten_million_parameters() -> None:
    from xmac_cli.models.demo_moe import demo_model

    tokenizer = type("Tokens", (), {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1})
    recipe = demo_recipe("demo")
    count = sum(p.numel() for p in demo_model(recipe, tokenizer).parameters())
    assert 5e6 <= count <= 10e6
    assert recipe.layers >= 4 and recipe.experts >= 8 and recipe.top_k == 2


def test_the_tokenizer_spells_every_text_back(tiny_demo: DemoMoe) -> None:
    tokenizer = load_tokenizer(tiny_demo.model)
    for text in ("def f(x):\n    return x\n", "naïve 漢字 🙂\t\x00", " leading and trailing "):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id == 0
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n"


def test_reported_perplexity_is_that_of_the_saved_files(tiny_demo: DemoMoe) -> None:
    """Loaded anew, one document at a time, without windows of the training code."""
    model, tokenizer = load_model(tiny_demo.model, device="cpu"), load_tokenizer(tiny_demo.model)
    length = demo_recipe("tiny").seqlen
    for domain in ("docs", "names"):
        losses = []
        for text in read_documents(tiny_demo.heldout[domain]).texts:
            ids = [0, *tokenizer(text)["input_ids"]]
            losses.append(token_nll(model, [ids], window=length, stride=length // 2, batch_size=1)[0])
        perplexity = float(torch.cat(losses).mean().exp())
        assert tiny_demo.report["domains"][domain]["model"] == pytest.approx(perplexity, rel=1e-4)


def test_even_the_tiny_size_beats_the_unigram_model_in_every_domain(tiny_demo: DemoMoe) -> None:
    assert tiny_demo.report["perplexity"]["model"] < 0.75 * tiny_demo.report["perplexity"]["unigram"]
    for row in tiny_demo.report["domains"].values():
        assert row["model"] < row["unigram"]


def test_experts_carry_information_about_the_domain(tiny_demo: DemoMoe) -> None:
    for layer in tiny_demo.report["specialisation"]:
        assert layer["domain_information_bits"] > 0.1
        assert layer["most_used"] < demo_recipe("tiny").experts / 2


def test_sources_are_listed_with_hashes(tiny_demo: DemoMoe) -> None:
    sources = json.loads((tiny_demo.model / "demo_sources.json").read_text())
    assert sources["fingerprint"] == load_stdlib_corpus("tiny").fingerprint == tiny_demo.report["corpus_fingerprint"]
    assert {file["split"] for file in sources["files"]} == {"train", "heldout"}
    assert all(len(file["sha256"]) == 64 for file in sources["files"])


def test_same_seed_same_bytes_even_when_interrupted_and_other_seed_other_weights(tmp_path: Path) -> None:
    recipe = replace(demo_recipe("tiny"), steps=12)
    corpus = load_stdlib_corpus("tiny")
    for name, seed in (("a", 3), ("c", 4)):
        build_demo_moe(tmp_path / name, corpus, recipe, seed, NullProgress())
    script = (
        "import sys; from dataclasses import replace; from pathlib import Path\n"
        "from xmac_cli.cli.progress import NullProgress\n"
        "from xmac_cli.data.stdlib_corpus import load_stdlib_corpus\n"
        "from xmac_cli.models.demo_moe import build_demo_moe\n"
        "from xmac_cli.models.demo_recipe import demo_recipe\n"
        "import torch; torch.set_num_threads(int(sys.argv[2]))\n"
        "recipe = replace(demo_recipe('tiny'), steps=12)\n"
        "build_demo_moe(Path(sys.argv[1]), load_stdlib_corpus('tiny'), recipe, 3, NullProgress())\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, str(tmp_path / "b"), str(torch.get_num_threads())]
    subprocess.run(command, check=True, env=environment)
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    assert tree(tmp_path / "a")["model.safetensors"] != tree(tmp_path / "c")["model.safetensors"]


def test_the_cache_builds_once_and_keeps_data_files_beside_the_model(tiny_demo: DemoMoe, tmp_path: Path) -> None:
    cache = tiny_demo.model.parent.parent
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*.safetensors")}
    again = cached_demo_moe(cache, size="tiny")
    assert again == tiny_demo
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.safetensors")} == before
    corpus = load_stdlib_corpus("tiny")
    for domain, path in tiny_demo.heldout.items():
        assert read_documents(path).texts == corpus.heldout[domain]
    assert (
        set(write_heldout(tmp_path / "h", "tiny"))
        == set(write_calibration(tmp_path / "c", "tiny"))
        == set(again.heldout)
    )
    calibration = set(read_documents(tmp_path / "c" / "code.jsonl").texts)
    assert calibration <= set(corpus.train["code"])


def test_a_build_that_was_stopped_continues_from_its_last_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(Exception):
        pass

    class Stopping(NullProgress):
        def metric(self, values: dict[str, float]) -> None:  # type: ignore[override]
            if values["step"] >= 10:
                raise Stop

    class Listening(NullProgress):
        notes: list[str] = []

        def note(self, text: str) -> None:
            self.notes.append(text)

    monkeypatch.setattr(demo_moe, "SAVE_EVERY", 8)
    recipe = replace(demo_recipe("tiny"), steps=12, seqlen=16)
    corpus = load_stdlib_corpus("tiny")
    with pytest.raises(Stop):
        build_demo_moe(tmp_path / "a", corpus, recipe, 0, Stopping(), tmp_path / "work")
    build_demo_moe(tmp_path / "a", corpus, recipe, 0, Listening(), tmp_path / "work")
    assert "training continues at step 8" in Listening.notes
    build_demo_moe(tmp_path / "b", corpus, recipe, 0, NullProgress())
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XMAC_CACHE", str(tmp_path / "own"))
    assert cache_directory() == tmp_path / "own"
    monkeypatch.delenv("XMAC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "xmac"


def test_the_key_depends_on_recipe_seed_and_text() -> None:
    recipe = RECIPES["tiny"]
    keys = {recipe.key(0, "a"), recipe.key(1, "a"), recipe.key(0, "b"), replace(recipe, lr=1.0).key(0, "a")}
    assert len(keys) == 4


def test_unknown_sizes_and_step_counts_are_usage_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="giant"):
        cached_demo_moe(tmp_path, size="giant")
    with pytest.raises(UsageError, match="positive"):
        cached_demo_moe(tmp_path, size="tiny", steps=0)


def test_batches_keep_the_mixture_exactly_and_depend_only_on_their_number() -> None:
    streams = [np.full(100, value, dtype=np.int64) for value in (1, 2, 3)]
    batches = MixtureBatches(streams, (0.5, 0.3, 0.2), rows=4, seqlen=9, seed=0)
    assert batches(5).shape == (4, 10)
    assert torch.equal(batches(5), batches(5))
    first = torch.cat([batches(index)[:, 0] for index in range(500)])
    for value, share in ((1, 0.5), (2, 0.3), (3, 0.2)):
        assert abs(int((first == value).sum()) - 2000 * share) <= 3


def test_the_full_size_beats_unigram_and_bigram_clearly() -> None:
    demo = find_demo_moe()
    if demo is None:
        pytest.skip("the full demo MoE is not in the cache; `xmac demo-model moe -o DIR` trains it in minutes")
    report = demo.report
    assert report["perplexity"]["model"] < 0.5 * report["perplexity"]["bigram"]
    assert report["perplexity"]["model"] < 0.1 * report["perplexity"]["unigram"]
    for row in report["domains"].values():
        assert row["model"] < 0.75 * row["bigram"]
    assert all(layer["domain_information_bits"] > 0.1 for layer in report["specialisation"])
