"""A small trained MoE and its texts, made by the installed command itself."""

import os

import pytest
from support.command_line import Trained, xmac


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    cache = folder / "cache"
    os.environ["XMAC_CACHE"] = str(cache)
    try:
        arguments = ("--size", "tiny", "--steps", "60", "--data-dir", folder / "data", "--quiet")
        xmac("demo-model", "moe", "-o", folder / "moe", *arguments)
    finally:
        del os.environ["XMAC_CACHE"]
    calib = [f"--calib={path}" for path in sorted((folder / "data" / "calibration").glob("*.jsonl"))]
    sizes = ("--calib-samples=12", "--calib-seqlen=64")
    return Trained(folder / "moe", (*calib, *sizes), tuple(sorted((folder / "data" / "held-out").glob("*.jsonl"))))
