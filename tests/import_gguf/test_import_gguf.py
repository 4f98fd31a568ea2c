"""The verb around the conversion: refusals come before any output, and the dry run reads only the head."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import pytest
from support.gguf_files import character_level_bpe, write_gguf
from support.models_small import small_llama

from xmac_cli.checkpoint.verification import verify_directory
from xmac_cli.cli.errors import InputError, UsageError
from xmac_cli.import_gguf.command import ImportGguf


def test_a_broken_file_leaves_no_output(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 5, 5) + b"\0" * 100)
    with pytest.raises(InputError):
        ImportGguf().run(tmp_path / "a.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_dry_run_reads_only_the_head(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 7, 11))
    result = ImportGguf().plan(tmp_path / "a.gguf").result
    assert (result["version"], result["tensors"], result["metadata_entries"], result["bytes"]) == (3, 7, 11, 24)


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a file"):
        ImportGguf().run(tmp_path / "absent.gguf", tmp_path / "out")


def test_the_output_is_published_whole_with_the_hash_of_its_source(tmp_path: Path) -> None:
    tokenizer = character_level_bpe(tmp_path / "tokenizer.json")
    write_gguf(small_llama(seed=6, vocabulary=tokenizer), tmp_path / "tokenizer.json", tmp_path / "a.gguf")
    report = ImportGguf().run(tmp_path / "a.gguf", tmp_path / "out")
    assert report.result["sha256"] == hashlib.sha256((tmp_path / "a.gguf").read_bytes()).hexdigest()
    assert (report.result["dtype"], report.result["same_argmax"]) == ("bfloat16", True)
    assert report.result["max_logit_difference"] > 0
    assert not verify_directory(tmp_path / "out").differences
