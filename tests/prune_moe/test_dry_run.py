"""The dry run reads headers only, and what it announces is what apply then does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.prune_cases import mixtral_config, random_scores, read_all, write_files
from support.tiny_moe import build_tiny, save_tiny

from xmac_cli.checkpoint.header import encode_header
from xmac_cli.prune_moe.budget import Budget
from xmac_cli.prune_moe.dry_run import Scoring, active_parameters, dry_run, scoring_cost
from xmac_cli.prune_moe.layout import sniff_layout
from xmac_cli.prune_moe.plan import make_plan, placeholder_scores
from xmac_cli.prune_moe.surgery import apply_plan


def big_checkpoint(directory: Path, hidden: int = 4096, width: int = 2048, experts: int = 64) -> Path:
    """A checkpoint of 3 GiB that takes no disk: the data of its file is one hole."""
    write_files(directory, mixtral_config(experts, hidden_size=hidden), {"unused": np.zeros(1, np.float32)})
    tensors = []
    for layer in (0, 1):
        block = f"model.layers.{layer}.block_sparse_moe"
        tensors.append((f"{block}.gate.weight", "BF16", (experts, hidden), 2 * experts * hidden))
        for expert in range(experts):
            for name, shape in (("w1", (width, hidden)), ("w2", (hidden, width)), ("w3", (width, hidden))):
                tensors.append((f"{block}.experts.{expert}.{name}.weight", "BF16", shape, 2 * hidden * width))
    header = encode_header(tensors, {"format": "pt"})
    with (directory / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(tensor[3] for tensor in tensors))
    return directory


def bytes_read() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(lines[0].removeprefix("rchar: "))


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux accounting of reads")
@pytest.mark.parametrize("allocation", ["uniform", "global"])
def test_less_than_a_thousandth_is_read(allocation: str, tmp_path: Path) -> None:
    source = big_checkpoint(tmp_path / "big")
    before = bytes_read()
    layout = sniff_layout(source)
    plan = make_plan(layout, placeholder_scores(layout), Budget.of(ratio=0.5), allocation=allocation, headers_only=True)
    report = dry_run(layout, plan, Scoring())
    assert bytes_read() - before < layout.checkpoint.total_bytes / 1000
    assert layout.checkpoint.total_bytes > 6 * 2**30
    assert report.result["experts"] == {"before": 64, "after": 32}
    json.dumps(report.result)


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_announced_sizes_and_keys_are_what_apply_does(model_type: str, tmp_path: Path) -> None:
    source = save_tiny(build_tiny(model_type), tmp_path / "a")
    layout = sniff_layout(source)
    plan = make_plan(layout, random_scores(layout), Budget.of(ratio=0.5))
    result = dry_run(layout, plan).result
    apply_plan(source, tmp_path / "b", plan)
    written = read_all(tmp_path / "b")
    assert result["disk_bytes"] == (tmp_path / "b" / "model.safetensors").stat().st_size
    assert sum(result["bytes_by_dtype"]["after"].values()) == sum(tensor.nbytes for tensor in written.values())
    tensors = result["tensors"]
    assert tensors["copied"] + tensors["renamed"] + tensors["sliced"] + tensors["padded"] == len(written)
    after = json.loads((tmp_path / "b" / "config.json").read_text())
    assert result["config_changes"]
    for change in result["config_changes"]:
        assert after[change["key"]] == change["after"] == 4


def test_padded_slots_are_counted(tmp_path: Path) -> None:
    layout = sniff_layout(save_tiny(build_tiny("minimax_m2"), tmp_path / "a"))
    plan = make_plan(layout, random_scores(layout), Budget.of(ratio=0.5), allocation="global")
    tensors = dry_run(layout, plan).result["tensors"]
    empty = sum(plan.n_after - len(layer.keep) for layer in plan.layers)
    assert tensors["padded"] == 3 * empty


def test_active_parameters_are_those_that_act_on_a_token(tmp_path: Path) -> None:
    layout = sniff_layout(save_tiny(build_tiny("mixtral"), tmp_path / "a"))
    expert = 3 * 32 * 40 + 32  # with its router row
    assert active_parameters(layout) == layout.parameters - 3 * 6 * expert


def test_scoring_cost_follows_the_formulas(tmp_path: Path) -> None:
    layout = sniff_layout(save_tiny(build_tiny("mixtral"), tmp_path / "a"))
    one_pass = 2 * active_parameters(layout) * 1000

    def cost(**options: object) -> dict[str, float]:
        return scoring_cost(layout, Scoring(tokens=1000, **options), 6)  # type: ignore[arg-type]

    assert cost(value="ppl", truncate=0.0)["passes"] == 20 * 24
    assert cost(value="ppl")["passes"] == pytest.approx(0.4 * 20 * 24)
    assert cost(value="ppl", truncate=0.0)["flops"] == 20 * 24 * one_pass
    assert cost(criterion="frequency")["flops"] == one_pass
    assert cost(criterion="loo")["passes"] == 25
    assert cost(criterion="naee")["coalitions"] == 3 * 28
    assert cost(criterion="random")["flops"] == 0
    recon = cost(value="recon")
    assert recon["passes"] == 1
    assert recon["flops"] < cost(value="ppl")["flops"]


def test_every_row_of_the_tables_is_filled(tmp_path: Path) -> None:
    layout = sniff_layout(save_tiny(build_tiny("deepseek_v3"), tmp_path / "a"))
    plan = make_plan(layout, random_scores(layout), Budget.of(ratio=0.25))
    report = dry_run(layout, plan, Scoring())
    overview = dict(report.tables[0].rows)
    assert overview["experts per layer"] == "8 → 6"
    assert overview["groups"] == "2, 1 per token"
    assert overview["config keys"] == "n_routed_experts"
    assert report.warnings == plan.warnings
    assert all(None not in row for table in report.tables for row in table.rows)
