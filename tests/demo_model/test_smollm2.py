"""demo-model smollm2: the packaged model as a checkpoint that other verbs read."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.real_models import smollm2

from xmac_cli.demo_model.command import DemoModel
from xmac_cli.eval_ppl.command import EvalPpl


@pytest.mark.real_model
def test_smollm2_comes_from_its_package_and_answers(tmp_path: Path) -> None:
    smollm2()
    report = DemoModel(model="smollm2").run(output=tmp_path / "smol", link=True, dtype="float32")
    assert report.result["same_argmax"]
    (tmp_path / "a.txt").write_text("The capital of France is Paris, and the capital of Italy is Rome.")
    judged = EvalPpl(data=(tmp_path / "a.txt",)).run(tmp_path / "smol", device="cpu")
    assert judged.result["total"]["perplexity"] < 20
