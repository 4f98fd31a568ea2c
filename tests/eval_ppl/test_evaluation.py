"""Perplexity of files equals sums done by hand in float64, and says what it was made from."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.data_tokenizers import character_tokenizer, ids_of

from xmac_cli.cli.errors import InputError, UsageError
from xmac_cli.eval_ppl.command import EvalPpl
from xmac_cli.models.loading import load_model

TEXTS = {
    "first": ["the quick brown fox", "jumps over\nthe lazy dog.", "a", "once upon a time there was nothing at all"],
    "second": ["zzz zzz zzz", "yes and no and yes and no"],
}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    paths = {}
    for name, texts in TEXTS.items():
        paths[name] = tmp_path / f"{name}.jsonl"
        paths[name].write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return paths


def reference(model: Any, ids: list[int], window: int, stride: int) -> np.ndarray:
    """Every window run alone in float64, softmax written out in numpy."""
    losses = {}
    start = 0
    while True:
        end = min(start + window, len(ids))
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids[start:end]])).logits[0].numpy()
        for position in range(1, end - start):
            row = logits[position - 1]
            probability = np.exp(row[ids[start + position]]) / np.exp(row).sum()
            losses.setdefault(start + position, -math.log(probability))
        if end == len(ids):
            break
        start += stride
    return np.array([losses[token] for token in range(1, len(ids))])


@pytest.mark.parametrize(("window", "stride"), [(8, 3), (16, 8), (64, 32)])
def test_domain_and_total_equal_sums_done_by_hand(
    checkpoint: Path, files: dict[str, Path], window: int, stride: int
) -> None:
    verb = EvalPpl(data=tuple(files.values()), window=window, stride=stride)
    report = verb.run(checkpoint, device="cpu").result
    model = load_model(checkpoint, device="cpu")
    everything = []
    for entry in report["domains"]:
        losses = [reference(model, ids_of(text), window, stride) for text in TEXTS[entry["name"]] if len(text) > 1]
        flat = np.concatenate(losses)
        everything.append(flat)
        assert entry["documents"] == len(losses)
        assert entry["tokens"] == len(flat)
        assert entry["nll"] == pytest.approx(flat.mean(), abs=1e-10)
        assert entry["perplexity"] == pytest.approx(math.exp(flat.mean()), rel=1e-10)
        assert entry["perplexity_interval"][0] <= entry["perplexity"] <= entry["perplexity_interval"][1]
    flat = np.concatenate(everything)
    assert report["total"]["tokens"] == len(flat)
    assert report["total"]["perplexity"] == pytest.approx(math.exp(flat.mean()), rel=1e-10)


def test_bits_per_byte_count_exactly_the_bytes_that_were_scored(checkpoint: Path, files: dict[str, Path]) -> None:
    without = EvalPpl(data=(files["first"],)).run(checkpoint, device="cpu").result["total"]
    opened = EvalPpl(data=(files["first"],), bos="always").run(checkpoint, device="cpu").result["total"]
    texts = [text for text in TEXTS["first"] if len(text) > 1]
    assert without["bytes"] == sum(len(text.encode()) - 1 for text in texts)
    assert opened["bytes"] == sum(len(text.encode()) for text in TEXTS["first"]) == opened["tokens"]
    for row in (without, opened):
        assert row["bits_per_byte"] == pytest.approx(row["nll"] * row["tokens"] / math.log(2) / row["bytes"], rel=1e-12)


def test_an_opening_token_makes_the_first_token_count(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    model = load_model(checkpoint, device="cpu")
    for bos, ids in (("always", [2, *ids_of("abc")]), ("never", ids_of("abc")), ("auto", ids_of("abc"))):
        verb = EvalPpl(data=(tmp_path / "a.txt",), bos=bos)
        total = verb.run(checkpoint, device="cpu").result["total"]
        expected = reference(model, ids, 99, 50)
        assert (total["tokens"], total["nll"]) == (len(ids) - 1, pytest.approx(expected.mean(), abs=1e-10))


def test_tokens_made_earlier_have_no_bytes(checkpoint: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"input_ids": torch.tensor([ids_of("abcabc"), ids_of("xyzxyz")])}, tmp_path / "a.safetensors")
    total = EvalPpl(data=(tmp_path / "a.safetensors",)).run(checkpoint, device="cpu").result["total"]
    assert (total["documents"], total["tokens"]) == (2, 10)
    assert total["bytes"] is None and total["bits_per_byte"] is None


def test_the_report_names_what_was_read(checkpoint: Path, files: dict[str, Path]) -> None:
    report = EvalPpl(data=(files["second"],), per_document=True).run(checkpoint, device="cpu").result
    (entry,) = report["domains"]
    assert entry["sha256"] == hashlib.sha256(files["second"].read_bytes()).hexdigest()
    documents = entry["per_document"]
    assert [d["location"] for d in documents] == [f"{files['second']}:{line}" for line in (1, 2)]
    assert sum(d["nll"] for d in documents) / entry["tokens"] == pytest.approx(entry["nll"])
    assert (report["window"], report["stride"]) == (128, 64)


def test_the_same_seed_gives_the_same_report(checkpoint: Path, files: dict[str, Path]) -> None:
    verb = EvalPpl(data=tuple(files.values()), bootstrap=5)
    first, again, other = (verb.run(checkpoint, device="cpu", seed=seed).result for seed in (1, 1, 2))
    assert first == again
    assert first["total"]["perplexity_interval"] != other["total"]["perplexity_interval"]
    assert first["total"]["perplexity"] == other["total"]["perplexity"]


def test_batch_size_does_not_matter(checkpoint: Path, files: dict[str, Path]) -> None:
    values = [
        EvalPpl(data=(files["first"],), window=8, stride=4, batch_size=size).run(checkpoint, device="cpu").result
        for size in (1, 7)
    ]
    assert values[0]["total"]["nll"] == pytest.approx(values[1]["total"]["nll"], rel=1e-12)


def test_the_first_documents_are_taken_when_limited(checkpoint: Path, files: dict[str, Path]) -> None:
    limited = EvalPpl(data=(files["first"],), max_documents=2).run(checkpoint, device="cpu").result["total"]
    assert limited["tokens"] == sum(len(text) - 1 for text in TEXTS["first"][:2])


def test_conversations_are_rendered(checkpoint: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}|{% endfor %}"
    character_tokenizer(chat_template=template).save_pretrained(model)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}]}) + "\n")
    total = EvalPpl(data=(path,), chat_template=True).run(model, device="cpu").result["total"]
    assert total["tokens"] == len("<user>hello|") - 1
    with pytest.raises(InputError, match="holds messages"):
        EvalPpl(data=(path,)).run(model, device="cpu")


def test_the_dry_run_counts_documents_without_loading_the_model(checkpoint: Path, files: dict[str, Path]) -> None:
    result = EvalPpl(data=tuple(files.values())).plan(checkpoint).result
    assert [row["documents"] for row in result["files"]] == [4, 2]
    assert result["parameters"] == sum(p.numel() for p in load_model(checkpoint, device="cpu").parameters())


def test_what_cannot_work_is_refused_before_the_work(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(InputError, match="no document of at least two tokens"):
        EvalPpl(data=(tmp_path / "a.txt",)).run(checkpoint, device="cpu")
    with pytest.raises(UsageError, match="no data file"):
        EvalPpl().run(checkpoint, device="cpu")
    with pytest.raises(UsageError, match="stride"):
        EvalPpl(window=8, stride=8)
    with pytest.raises(UsageError, match="stride"):
        EvalPpl(data=(tmp_path / "a.txt",), stride=500).run(checkpoint, device="cpu")
