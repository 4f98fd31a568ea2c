"""Calibration batches: exact blocks, no padding counted, the same seed gives the same tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from support.data_tokenizers import CHARACTERS, character_tokenizer, ids_of

from xmac_cli.cli.errors import InputError, UsageError
from xmac_cli.data.calibration import CalibrationOptions, apportion, load_calibration, token_sha256

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}|{% endfor %}"


def jsonl(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def texts(path: Path, *rows: str) -> Path:
    return jsonl(path, [{"text": row} for row in rows])


def test_packing_joins_documents_with_end_of_text_and_cuts_blocks(tmp_path: Path) -> None:
    path = texts(tmp_path / "a.jsonl", "abcd", "efg")
    batch = load_calibration([path], character_tokenizer(), samples=9, seqlen=3)
    streams = [[*ids_of("abcd"), 0, *ids_of("efg"), 0], [*ids_of("efg"), 0, *ids_of("abcd"), 0]]
    blocks = [[stream[i : i + 3] for i in (0, 3, 6)] for stream in streams]
    assert batch.input_ids.tolist() in blocks
    assert batch.attention_mask.all()
    assert batch.input_ids.dtype == torch.int64
    assert batch.attention_mask.dtype == torch.bool
    assert batch.tokens == 9
    assert "3 rows of 3 tokens; 9 were asked for" in batch.warnings[0]


def test_documents_are_padded_on_the_right_and_cut_at_the_length(tmp_path: Path) -> None:
    path = texts(tmp_path / "a.jsonl", "ab", "cdefgh", "x")
    batch = load_calibration([path], character_tokenizer(), samples=3, seqlen=4, packing="document")
    rows = {tuple(ids[mask].tolist()) for ids, mask in zip(batch.input_ids, batch.attention_mask)}
    assert rows == {tuple(ids_of("ab")), tuple(ids_of("cdef"))}
    assert batch.tokens == 6
    assert (batch.input_ids[~batch.attention_mask] == 1).all()
    mask = batch.attention_mask.int()
    assert (mask.diff(dim=1) <= 0).all()


def test_the_tokenizers_own_opening_token_is_kept(tmp_path: Path) -> None:
    path = texts(tmp_path / "a.jsonl", "ab")
    batch = load_calibration([path], character_tokenizer(bos=True), samples=1, seqlen=4)
    assert batch.input_ids.tolist() == [[2, *ids_of("ab"), 0]]


def test_weights_share_the_rows_between_files(tmp_path: Path) -> None:
    paths = [texts(tmp_path / f"{letter}.jsonl", *[letter * 20] * 30) for letter in "ab"]
    batch = load_calibration(paths, character_tokenizer(), samples=8, seqlen=7, weights=(3, 1))
    assert [source.samples for source in batch.sources] == [6, 2]
    assert [source.tokens for source in batch.sources] == [42, 14]
    letters = [set(row.tolist()) - {0} for row in batch.input_ids]
    assert letters == [set(ids_of("a"))] * 6 + [set(ids_of("b"))] * 2


def test_a_file_with_weight_zero_gives_nothing(tmp_path: Path) -> None:
    paths = [texts(tmp_path / f"{letter}.jsonl", letter * 20) for letter in "ab"]
    batch = load_calibration(paths, character_tokenizer(), samples=2, seqlen=5, weights=(0, 1))
    assert [source.samples for source in batch.sources] == [0, 2]


def test_same_seed_same_tokens_other_seed_other_tokens(tmp_path: Path) -> None:
    rows = [CHARACTERS[i % 26] * 3 + CHARACTERS[i // 26] for i in range(200)]
    path = texts(tmp_path / "a.jsonl", *rows)
    first, again, other = (
        CalibrationOptions(samples=4, seqlen=16, seed=seed).load([path], character_tokenizer()) for seed in (1, 1, 2)
    )
    assert torch.equal(first.input_ids, again.input_ids)
    assert first.token_sha256 == again.token_sha256
    assert first.token_sha256 != other.token_sha256
    assert first.sources[0].sha256 == other.sources[0].sha256


def test_blocks_come_from_more_documents_than_the_first_ones_would_fill(tmp_path: Path) -> None:
    path = texts(tmp_path / "a.jsonl", *[letter * 99 for letter in CHARACTERS[:20]])
    batch = load_calibration([path], character_tokenizer(), samples=10, seqlen=10)
    kinds = {int(token) for token in batch.input_ids.unique() if token > 2}
    assert len(kinds) > 3


def test_messages_go_through_the_chat_template(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "bot", "content": "yo"}]}
    path = jsonl(tmp_path / "a.jsonl", [row])
    tokenizer = character_tokenizer(chat_template=TEMPLATE)
    batch = load_calibration([path], tokenizer, samples=1, seqlen=99, packing="document", chat_template=True)
    assert batch.input_ids.tolist() == [ids_of("<user>hi|<bot>yo|")]


def test_plain_text_becomes_a_user_message_under_the_chat_template(tmp_path: Path) -> None:
    path = texts(tmp_path / "a.jsonl", "hi")
    tokenizer = character_tokenizer(chat_template=TEMPLATE)
    batch = load_calibration([path], tokenizer, samples=1, seqlen=99, packing="document", chat_template=True)
    assert batch.input_ids.tolist() == [ids_of("<user>hi|")]


def test_messages_without_the_chat_template_are_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "hi"}]}])
    with pytest.raises(InputError, match=r"a\.jsonl:1 holds messages"):
        load_calibration([path], character_tokenizer(), samples=1, seqlen=4)
    with pytest.raises(InputError, match="no chat template"):
        load_calibration([path], character_tokenizer(), samples=1, seqlen=4, chat_template=True)


def test_a_template_that_refuses_is_an_input_error(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": "hi"}]}])
    tokenizer = character_tokenizer(chat_template="{{ raise_exception('only bots may speak') }}")
    with pytest.raises(InputError, match="only bots may speak"):
        load_calibration([path], tokenizer, samples=1, seqlen=4, chat_template=True)


def test_a_saved_batch_reads_back_as_the_same_tokens(tmp_path: Path) -> None:
    path = texts(tmp_path / "a.jsonl", "ab", "cdefgh")
    tokenizer = character_tokenizer()
    batch = load_calibration([path], tokenizer, samples=2, seqlen=8, packing="document")
    tensors = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask.to(torch.uint8)}
    save_file(tensors, tmp_path / "tokens.safetensors")
    again = load_calibration([tmp_path / "tokens.safetensors"], tokenizer, samples=2, seqlen=8, packing="document")
    rows = [{tuple(i[m].tolist()) for i, m in zip(b.input_ids, b.attention_mask)} for b in (batch, again)]
    assert rows[0] == rows[1]


def test_token_ids_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    save_file({"input_ids": torch.tensor([[5, 9999]])}, tmp_path / "a.safetensors")
    with pytest.raises(InputError, match="9999, beyond the vocabulary"):
        load_calibration([tmp_path / "a.safetensors"], character_tokenizer(), samples=1, seqlen=2)


def test_too_little_text_is_refused_with_a_hint(tmp_path: Path) -> None:
    path = texts(tmp_path / "a.jsonl", "abc")
    with pytest.raises(InputError, match="less than one row of 64 tokens"):
        load_calibration([path], character_tokenizer(), samples=1, seqlen=64)


@pytest.mark.parametrize(
    "options",
    [
        {"samples": 0, "seqlen": 8},
        {"samples": 1, "seqlen": 1},
        {"samples": 1, "seqlen": 8, "weights": (1.0, 2.0)},
        {"samples": 1, "seqlen": 8, "weights": (-1.0,)},
        {"samples": 1, "seqlen": 8, "weights": (0.0,)},
        {"samples": 1, "seqlen": 8, "weights": (float("nan"),)},
        {"samples": 1, "seqlen": 8, "packing": "other"},
    ],
)
def test_options_that_make_no_sense_are_usage_errors(tmp_path: Path, options: dict[str, object]) -> None:
    path = texts(tmp_path / "a.jsonl", "abcdefghijkl")
    with pytest.raises(UsageError):
        load_calibration([path], character_tokenizer(), **options)


def test_the_hash_depends_on_ids_mask_and_shape() -> None:
    ids = torch.arange(6).reshape(2, 3)
    mask = torch.ones(2, 3, dtype=torch.bool)
    other = mask.clone()
    other[0, 0] = False
    hashes = {
        token_sha256(ids, mask),
        token_sha256(ids + 1, mask),
        token_sha256(ids, other),
        token_sha256(ids.reshape(3, 2), mask.reshape(3, 2)),
    }
    assert len(hashes) == 4


@given(
    total=st.integers(1, 500), weights=st.lists(st.floats(0, 10), min_size=1, max_size=6).filter(lambda w: sum(w) > 0)
)
def test_apportioned_counts_sum_up_and_miss_their_share_by_less_than_one(total: int, weights: list[float]) -> None:
    counts = apportion(total, weights)
    assert sum(counts) == total
    for count, weight in zip(counts, weights):
        assert abs(count - total * weight / sum(weights)) < 1 + 1e-6
