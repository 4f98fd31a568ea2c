"""coalition_residual on the CPU against its float64 definition and against expert outputs themselves."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from support.coalition_cases import DENOMINATORS, SHAPES, random_masks, random_table, relative_error
from xmac_kernels import dispatch
from xmac_kernels.coalition import CoalitionTable, coalition_residual
from xmac_kernels.coalition.reference import gates
from xmac_kernels.coalition.reference import residual as reference_residual

CPU_BACKENDS = ("numba", "torch")


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("denominator", DENOMINATORS)
@pytest.mark.parametrize(("tokens", "n", "k"), SHAPES)
def test_cpu_backends_follow_the_definition(tokens: int, n: int, k: int, denominator: str, backend: str):
    table, masks = random_table(tokens, n, k, denominator), random_masks(n)
    got = coalition_residual(table, masks, backend=backend)
    assert got.dtype == torch.float64
    assert relative_error(got, reference_residual(table, masks)) < 1e-12


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_ties_go_to_the_lower_index(backend: str):
    table, masks = random_table(50, 9, 3, "topk", ties=True), random_masks(9)
    assert relative_error(coalition_residual(table, masks, backend=backend), reference_residual(table, masks)) < 1e-12


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_the_residual_is_the_squared_change_of_the_layer_output(backend: str, denominator: str):
    generator = torch.Generator().manual_seed(3)
    outputs = torch.randn(20, 6, 5, generator=generator, dtype=torch.float64)
    logits = torch.randn(20, 6, generator=generator, dtype=torch.float64)
    gram = torch.einsum("tid,tjd->tij", outputs, outputs)
    table = CoalitionTable(logits, torch.sigmoid(logits), gram, 2, denominator)  # type: ignore[arg-type]
    mask = torch.tensor([True, False, True, True, False, True])
    y_full = torch.einsum("ti,tid->td", gates(table, torch.ones(6, dtype=torch.bool)), outputs)
    y = torch.einsum("ti,tid->td", gates(table, mask), outputs)
    got = coalition_residual(table, mask[None], backend=backend)
    assert got.item() == pytest.approx(float(((y - y_full) ** 2).sum()), rel=1e-12)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("denominator", ["topk", "none"])
def test_removing_an_expert_that_no_token_uses_loses_exactly_nothing(backend: str, denominator: str):
    base = random_table(30, 8, 2, denominator)
    choice = base.choice.clone()
    choice[:, 5] = -100.0
    table = CoalitionTable(choice, base.weight, base.gram, 2, base.denominator)
    masks = torch.ones(2, 8, dtype=torch.bool)
    masks[1, 5] = False
    assert coalition_residual(table, masks, backend=backend).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_nobody_left_loses_the_whole_output(denominator: str):
    table = random_table(30, 8, 2, denominator)
    full = gates(table, torch.ones(8, dtype=torch.bool))
    norm = torch.einsum("ti,tij,tj->", full, table.gram.double(), full)
    got = coalition_residual(table, torch.zeros(1, 8, dtype=torch.bool))
    assert got.item() == pytest.approx(norm.item(), rel=1e-12)


def test_a_row_depends_neither_on_other_rows_nor_on_threads():
    table, masks = random_table(1000, 8, 2, "topk"), random_masks(8, count=20)
    together = coalition_residual(table, masks, backend="numba")
    alone = torch.cat([coalition_residual(table, mask[None], backend="numba") for mask in masks])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        threaded = coalition_residual(table, masks, backend="numba")
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(together, alone)
    assert torch.equal(together, threaded)


def test_wrong_shapes_are_refused():
    table = random_table(4, 8, 2, "topk")
    with pytest.raises(ValueError, match="masks must be bool"):
        coalition_residual(table, torch.ones(2, 7, dtype=torch.bool))
    with pytest.raises(ValueError, match="masks must be bool"):
        coalition_residual(table, torch.ones(2, 8))
    with pytest.raises(ValueError, match="gram"):
        CoalitionTable(table.choice, table.weight, table.gram[:, :7], 2, "topk")
    with pytest.raises(ValueError, match="top_k"):
        CoalitionTable(table.choice, table.weight, table.gram, 9, "topk")


def test_the_argument_beats_the_environment_which_beats_the_automatic_choice(monkeypatch: pytest.MonkeyPatch):
    table, masks = random_table(4, 8, 2, "topk"), random_masks(8)
    coalition_residual(table, masks)
    assert dispatch.last_used["coalition_residual"] == "numba"
    monkeypatch.setenv("XMAC_BACKEND", "torch")
    coalition_residual(table, masks)
    assert dispatch.last_used["coalition_residual"] == "torch"
    coalition_residual(table, masks, backend="numba")
    assert dispatch.last_used["coalition_residual"] == "numba"


def test_an_unknown_backend_is_an_error_not_a_fallback(monkeypatch: pytest.MonkeyPatch):
    table, masks = random_table(4, 8, 2, "topk"), random_masks(8)
    with pytest.raises(ValueError, match="no backend 'numpy'"):
        coalition_residual(table, masks, backend="numpy")
    monkeypatch.setenv("XMAC_BACKEND", "cuda")
    with pytest.raises(ValueError, match="no backend 'cuda'"):
        coalition_residual(table, masks)


def test_a_failing_backend_raises_unless_fallback_was_asked_for(monkeypatch: pytest.MonkeyPatch):
    def broken() -> str:
        raise RuntimeError("compiler exploded")

    calls = {"numba": broken, "torch": lambda: "torch"}
    monkeypatch.delenv("XMAC_BACKEND", raising=False)
    with pytest.raises(RuntimeError, match="exploded"):
        dispatch.run("made_up", calls, device_type="cpu")
    monkeypatch.setenv("XMAC_BACKEND", "auto-fallback")
    assert dispatch.run("made_up", calls, device_type="cpu") == "torch"
    assert dispatch.last_used["made_up"] == "torch"


def test_the_automatic_choice_passes_over_backends_that_cannot_take_the_shapes():
    calls = {"triton": lambda: "triton", "torch": lambda: "torch"}
    assert dispatch.run("made_up", calls, device_type="cuda", unfit={"triton": "too large"}) == "torch"
    with pytest.raises(ValueError, match="too large"):
        dispatch.run("made_up", calls, device_type="cuda", backend="triton", unfit={"triton": "too large"})


def test_importing_the_package_imports_no_compiler():
    code = (
        "import sys, xmac_kernels, xmac_kernels.coalition, xmac_kernels.dispatch, xmac_kernels.launch;"
        "print([m for m in ('triton', 'numba') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
