"""The Triton kernel of coalition_residual compiles for real GPUs within their limits; no GPU needed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.kernel_aot import SHARED_LIMIT
from support.kernel_table import compile_coalition
from xmac_kernels.launch import launch_config

pytest.importorskip("triton")

pytestmark = [
    pytest.mark.kernels_aot,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter cannot compile"),
]


@pytest.fixture(autouse=True)
def cache_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(
    ("arch", "n", "k", "mode"),
    [(arch, *shape) for arch in (80, 86, 90, 100) for shape in ((8, 2, 0), (64, 8, 1))]
    + [(80, 256, 8, 0), (90, 16, 2, 2)],
)
def test_the_kernel_compiles_without_spills(arch: int, n: int, k: int, mode: int):
    built = compile_coalition(arch, n, k, mode)
    assert built.shared <= SHARED_LIMIT[arch]
    assert built.spills == 0
    assert built.registers <= 128
    if n % 16 == 0:  # rows of the order and the weights are whole vectors
        assert built.count("LDG.E.128") > 0


def test_the_launch_table_covers_every_shape_the_operation_accepts():
    from xmac_kernels.coalition.op import MAX_TRITON_EXPERTS, MAX_TRITON_TOP_K
    from xmac_kernels.coalition.triton_gpu import LAUNCH_TABLE

    for arch in (75, 80, 89, 90, 120):
        for n in (1, 8, 100, MAX_TRITON_EXPERTS):
            assert launch_config(LAUNCH_TABLE, arch, n, MAX_TRITON_TOP_K).block_tokens >= 1
    with pytest.raises(ValueError, match="no launch configuration"):
        launch_config(LAUNCH_TABLE, 90, MAX_TRITON_EXPERTS + 1, 1)
