"""`xmac verify` leaves with 0 for what is as recorded and with 5, and a list, for what is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.checkpoint_files import random_tensors, save_single
from support.command_line import XMAC

from xmac_cli.checkpoint.lineage import write_xmac_json
from xmac_cli.cli.errors import VerificationError
from xmac_cli.verify_checkpoint.command import VerifyCheckpoint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    root = save_single(tmp_path / "m", random_tensors(["lm_head.weight"], 1))
    write_xmac_json(root, {"verb": "x", "version": "1"}, {}, [])
    return root


def xmac(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [*XMAC, "verify", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_a_sound_directory_passes_and_a_chain_goes_on(model: Path) -> None:
    done = xmac(str(model))
    assert (done.returncode, done.stdout) == (0, f"{model}\n")
    body = json.loads(xmac(str(model), "--json", "--quiet").stdout)
    assert body["result"]["hashed_files"] == 2
    assert body["result"]["recorded"] is True


def test_a_truncated_shard_is_a_difference_and_not_a_failure_to_start(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    done = xmac(str(model))
    assert done.returncode == 5
    assert done.stdout == ""
    assert "1 are missing" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_python_call_raises_the_same(model: Path) -> None:
    report = VerifyCheckpoint().run(model)
    assert report.result["hashed_bytes"] == sum(
        (model / n).stat().st_size for n in ("config.json", "model.safetensors")
    )
    (model / "modeling_evil.py").write_text("x")
    with pytest.raises(VerificationError, match=r"modeling_evil\.py is not listed"):
        VerifyCheckpoint().run(model)


def test_a_dry_run_says_how_much_would_be_read(model: Path) -> None:
    report = VerifyCheckpoint().plan(model)
    assert report.result == {"files": 2, "bytes": VerifyCheckpoint().run(model).result["hashed_bytes"]}


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    assert xmac(str(tmp_path)).returncode == 1
    assert xmac(str(tmp_path / "absent")).returncode == 2
