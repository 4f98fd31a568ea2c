"""Files of documents: every format gives the same documents, and a bad row is named."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from xmac_cli.cli.errors import InputError, MissingExtraError
from xmac_cli.data.documents import read_documents

TEXTS = ["first document", "second\nwith two lines", "ünïcödé ✓"]


def write_jsonl(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_jsonl_gives_one_document_per_line(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "notes.jsonl", [{"text": text, "id": 1} for text in TEXTS])
    documents = read_documents(path)
    assert documents.name == "notes"
    assert list(documents.texts) == TEXTS
    assert documents.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_text_file_is_one_document_and_windows_line_ends_become_newlines(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\r\ntwo\n".encode())
    assert read_documents(path).texts == ("one\ntwo\n",)


def test_parquet_reads_like_jsonl(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": TEXTS, "other": [1, 2, 3]}), path)
    assert list(read_documents(path).texts) == TEXTS


def test_parquet_conversations(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    messages = [{"role": "user", "content": "hello"}]
    parquet.write_table(pyarrow.table({"messages": [messages]}), path)
    assert read_documents(path).documents[0].messages == tuple(messages)


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError) as caught:
        read_documents(tmp_path / "a.parquet")
    assert caught.value.hint == 'pip install "xmac[data]"'


def test_broken_parquet_is_an_input_error(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 this is no parquet file PAR1")
    with pytest.raises(InputError, match=r"a\.parquet"):
        read_documents(tmp_path / "a.parquet")


def test_token_file_drops_masked_positions(tmp_path: Path) -> None:
    ids = np.array([[5, 6, 7], [8, 9, 0]], dtype=np.int32)
    mask = np.array([[1, 1, 1], [1, 1, 0]], dtype=np.uint8)
    save_file({"input_ids": ids, "attention_mask": mask}, tmp_path / "a.safetensors")
    documents = read_documents(tmp_path / "a.safetensors").documents
    assert [document.token_ids for document in documents] == [(5, 6, 7), (8, 9)]


@pytest.mark.parametrize(
    ("rows", "where", "what"),
    [
        ('{"text": "a"}\n{"text": 3}\n', ":2", "int as 'text'"),
        ('{"text": "a"}\n\n{"txt": "b"}\n', ":3", "no field"),
        ('{"text": "a"\n', ":1", "not valid JSON"),
        ('["a"]\n', ":1", "list"),
        ('{"messages": []}\n', ":1", "at least one"),
        ('{"messages": [{"role": "user"}]}\n', ":1", "role"),
        ('{"text": "a", "messages": [{"role": "user", "content": "b"}]}\n', ":1", "both"),
        ('{"text": "\\ud800"}\n', ":1", "surrogate"),
        ('{"messages": [{"role": "user", "content": "\\udfff"}]}\n', ":1", "surrogate"),
        ("[" * 100_000 + "\n", ":1", "not valid JSON"),
        ("\n\n", "", "no document"),
    ],
)
def test_bad_rows_are_named_with_file_and_line(tmp_path: Path, rows: str, where: str, what: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(rows, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_documents(path)
    assert f"bad.jsonl{where}" in caught.value.message
    assert what in caught.value.message


def test_bytes_that_are_not_utf8_are_named_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(b"fine\nalso fine\nnot \xff fine\n")
    with pytest.raises(InputError, match=r"bad\.txt:3 is not UTF-8"):
        read_documents(path)


@pytest.mark.parametrize(
    "tensors",
    [
        {"tokens": np.zeros((2, 2), dtype=np.int64)},
        {"input_ids": np.zeros((2, 2), dtype=np.float32)},
        {"input_ids": np.zeros(4, dtype=np.int64)},
        {"input_ids": np.full((1, 2), -1, dtype=np.int64)},
        {"input_ids": np.zeros((2, 2), dtype=np.int64), "attention_mask": np.ones((2, 3), dtype=np.uint8)},
    ],
)
def test_bad_token_files_are_refused(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(InputError, match=r"a\.safetensors"):
        read_documents(tmp_path / "a.safetensors")


def test_truncated_token_file_is_an_input_error(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"input_ids": np.zeros((4, 4), dtype=np.int64)}, path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(InputError, match="not a readable safetensors file"):
        read_documents(path)


@pytest.mark.parametrize("name", ["a.pkl", "a.pt", "a.npy", "a.bin", "a"])
def test_formats_that_could_run_code_or_are_unknown_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(InputError, match="suffix"):
        read_documents(tmp_path / name)


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    for name in ("absent.jsonl", "folder.jsonl"):
        with pytest.raises(InputError, match="does not exist or is no regular file"):
            read_documents(tmp_path / name)
