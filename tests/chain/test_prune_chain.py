"""prune-moe in a shell: pipelines, stages, repetition, lineage, interruption; through the installed command."""

import json
import random
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support.checkpoint_files import tree
from support.command_line import XMAC, Trained, xmac

VOLATILE = {"xmac.json", "metrics.jsonl"}


def lasting(directory: Path) -> dict[str, bytes]:
    """Every file but those that hold times."""
    return {name: content for name, content in tree(directory).items() if Path(name).name not in VOLATILE}


def record(directory: Path) -> dict:
    return json.loads((directory / "xmac.json").read_text())


@pytest.fixture(scope="session")
def pruned(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of the experts removed in one command."""
    output = tmp_path_factory.mktemp("pruned") / "B"
    done = xmac("prune-moe", trained.model, "-o", output, "--ratio", 0.5, "-M", 30, *trained.calib, "--verify", "block")
    assert done.stdout == f"{output}\n"
    return output


def test_a_pipeline_hands_one_path_from_verb_to_verb(trained: Trained, tmp_path: Path) -> None:
    output = tmp_path / "B"
    run = shlex.join(XMAC)
    prune = shlex.join(map(str, ["prune-moe", trained.model, "-o", output, "--keep", 6, "-M", 4, *trained.calib]))
    data = shlex.join(f"--data={path}" for path in trained.held_out[:2])
    command = f"set -o pipefail; {run} {prune} | {run} verify - | {run} eval-ppl - {data} --max-documents 2"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{output}\n" and "perplexity" in done.stderr


def test_a_failure_upstream_stops_the_pipeline_with_one_sentence_each(trained: Trained, tmp_path: Path) -> None:
    run = shlex.join(XMAC)
    command = f"set -o pipefail; {run} prune-moe {trained.model} -o {tmp_path / 'B'} --keep 1 | {run} verify -"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode in (2, 4) and done.stdout == "" and not (tmp_path / "B").exists()
    assert "Traceback" not in done.stderr


def test_the_lineage_tells_the_whole_story(trained: Trained, pruned: Path) -> None:
    steps = record(pruned)["lineage"]
    assert [step["verb"] for step in steps] == ["demo-model", "prune-moe"]
    assert steps[1]["input"]["fingerprint"] == steps[0]["output_fingerprint"]
    assert steps[1]["options"]["ratio"] == 0.5 and steps[1]["options"]["permutations"] == 30
    result = record(pruned)["report"]["result"]
    assert result["verification"]["level"] == "block" and result["verification"]["largest_difference"] < 1e-5
    kept = [layer["keep"] for layer in result["plan"]["layers"]]
    assert all(len(ids) == 4 for ids in kept) and len({tuple(ids) for ids in kept}) > 1


def test_pruned_perplexity_is_the_masked_perplexity_of_the_original(trained: Trained, pruned: Path) -> None:
    from xmac_cli.models.loading import load_model, load_tokenizer
    from xmac_cli.prune_moe.compare import masked_perplexity, read_domains
    from xmac_cli.prune_moe.moe_blocks import moe_modules

    domains = read_domains(trained.held_out, load_tokenizer(trained.model), 600)
    kept = {layer["layer"]: layer["keep"] for layer in record(pruned)["report"]["result"]["plan"]["layers"]}
    found = []
    for path, masks in ((trained.model, kept), (pruned, {}), (trained.model, {})):
        model = load_model(path, device="cpu")
        found.append(masked_perplexity(model, moe_modules(model), masks, domains, 128))
    assert found[0].keys() == found[1].keys() and len(found[0]) == len(domains) + 1
    assert all(abs(found[0][name] / found[1][name] - 1) < 1e-5 for name in found[0])
    assert abs(found[0]["total"] / found[2]["total"] - 1) > 1e-3


def test_three_stages_make_the_same_bytes_as_one_command(trained: Trained, pruned: Path, tmp_path: Path) -> None:
    scores, plan, output = tmp_path / "S", tmp_path / "plan.json", tmp_path / "B"
    assert xmac("prune-moe", trained.model, "--stage", "score", "--scores-out", scores, "-M", 30, *trained.calib).stdout
    planned = xmac(
        "prune-moe", trained.model, "--stage", "plan", "--scores", scores, "--ratio", 0.5, "--plan-out", plan
    )
    assert planned.stdout == f"{plan}\n"
    xmac("prune-moe", trained.model, output, "--stage", "apply", "--plan", plan, "--verify", "logits")
    assert (output / "model.safetensors").read_bytes() == (pruned / "model.safetensors").read_bytes()
    assert (output / "config.json").read_bytes() == (pruned / "config.json").read_bytes()


def test_a_run_can_be_repeated_from_its_own_record(pruned: Path, tmp_path: Path) -> None:
    done = xmac("prune-moe", "--recipe", pruned / "xmac.json", "-o", tmp_path / "again", "--quiet")
    assert done.stderr == ""  # transformers has bars of its own
    assert lasting(tmp_path / "again") == lasting(pruned)
    assert record(tmp_path / "again")["report"]["result"] == record(pruned)["report"]["result"]


def test_dry_run_predicts_what_the_run_then_does(trained: Trained, pruned: Path, tmp_path: Path) -> None:
    done = xmac("prune-moe", trained.model, tmp_path / "B", "--ratio", 0.5, "--dry-run", "--json", *trained.calib)
    foreseen = json.loads(done.stdout)["result"]
    plan = record(pruned)["report"]["result"]["plan"]
    assert foreseen["experts"] == {"before": 8, "after": 4}
    assert foreseen["parameters"]["after"] == plan["parameters"]["after"]
    assert not list(tmp_path.iterdir())


def test_compare_judges_every_contender_and_writes_nothing(trained: Trained, tmp_path: Path) -> None:
    before = lasting(trained.model)
    data = [f"--eval-data={path}" for path in trained.held_out[:2]]
    contenders = ["--criteria=shapley:recon:20", "--criteria=frequency", "--criteria=naee", "--criteria=random"]
    done = xmac(
        "prune-moe", trained.model, "--stage", "compare", *trained.calib, *data, *contenders, "--ratios=0.5",
        "--eval-tokens=400", "--random-seeds=2", "--json", f"--report={tmp_path / 'report'}",
    )  # fmt: skip
    result = json.loads(done.stdout)["result"]
    judged = {(o["criterion"], o["allocation"]) for o in result["outcomes"]}
    assert judged == {
        *((name, a) for name in ("shapley:recon:20", "frequency", "random") for a in ("uniform", "global")),
        ("naee", "uniform"),
    }
    assert all(o["perplexity"] > 1 and set(o["domains"]) == set(result["full"]) - {"total"} for o in result["outcomes"])
    assert {v["verdict"] for v in result["verdicts"]} <= {"wins", "ties", "loses"}
    assert (tmp_path / "report" / "report.html").exists() and lasting(trained.model) == before


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--ratio", "0.5"], 2, "calibration"),
        (["--ratio", "0.5", "--keep", "4"], 2, "exactly one"),
        ([], 2, "exactly one"),
        (["--keep", "1"], 4, "2"),
        (["--ratio", "0.5", "--protect", "77:0"], 2, "77"),
        (["--ratio", "0.5", "--export", "pad", "--allocation", "global"], 4, "selection bias"),
        (["--stage", "apply"], 2, "--plan"),
        (["--ratio", "0.5", "--preset", "paper", "--value", "kl"], 2, "paper"),
    ],
)
def test_what_cannot_be_done_is_answered_before_the_model_is_loaded(
    trained: Trained, tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    start = time.monotonic()
    done = xmac("prune-moe", trained.model, tmp_path / "B", *arguments, code=code)
    assert words in done.stderr and done.stdout == "" and not list(tmp_path.glob("B"))
    assert time.monotonic() - start < 60


@pytest.mark.slow
def test_killed_at_ten_random_moments_and_resumed_it_ends_the_same(trained: Trained, tmp_path: Path) -> None:
    output = tmp_path / "B"
    arguments = ["prune-moe", trained.model, "-o", output, "--ratio", 0.5, "--value", "nll", "-M", 6, "--truncate", 0]
    command = [*XMAC, *map(str, arguments), *trained.calib, "--quiet", "--threads", "1"]
    start = time.monotonic()
    subprocess.run([*command[:-2], "-o", str(tmp_path / "whole"), "--threads", "1"], check=True, capture_output=True)
    whole = time.monotonic() - start
    moments = random.Random(7)
    for _ in range(10):
        process = subprocess.Popen([*command, "--resume"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(moments.uniform(0.1, 0.9) * whole)
            break  # resumed work had so little left that it finished first
        except subprocess.TimeoutExpired:
            assert not output.exists()
            process.send_signal(signal.SIGKILL)
            process.wait()
    if not output.exists():
        subprocess.run([*command, "--resume"], check=True, capture_output=True)
    assert lasting(output) == lasting(tmp_path / "whole")
    assert record(output)["report"]["result"] == record(tmp_path / "whole")["report"]["result"]
    assert not (tmp_path / "B.partial").exists()
