"""The contract of every verb, shown on the smallest verb that writes a checkpoint."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoint_files import tree
from support.copy_verb import CopyCheckpoint

from xmac_cli.cli.command import build_command
from xmac_cli.cli.errors import ConstraintError, InputError, ResumeMismatchError, UsageError


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"zeta": 1, "architectures": ["X"], "alpha": 2}))
    (path / "tokenizer.json").write_text("{}")
    (path / "pytorch_model.bin").write_bytes(b"never copied")
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    shards = [{"a": torch.arange(6.0).reshape(2, 3)}, {"b": torch.ones(4, dtype=torch.bfloat16)}]
    for name, tensors in zip(names, shards, strict=True):
        save_file(tensors, path / name, metadata={"format": "pt"})
    weight_map = {"a": names[0], "b": names[1]}
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 32}, "weight_map": weight_map})
    )
    return path


def test_output_is_a_self_contained_directory_with_its_lineage(source, tmp_path):
    before = tree(source)
    report = CopyCheckpoint().run(source, tmp_path / "out", seed=3)
    out = tmp_path / "out"
    assert report.output == out and not (tmp_path / "out.partial").exists()
    assert tree(source) == before
    assert {p.name for p in out.iterdir()} == {
        "config.json",
        "tokenizer.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "xmac.json",
        "metrics.jsonl",
    }
    assert torch.equal(load_file(out / "model-00001-of-00002.safetensors")["a"], torch.arange(6.0).reshape(2, 3))
    record = json.loads((out / "xmac.json").read_text())
    (step,) = record["lineage"]
    assert (step["verb"], step["seed"], step["options"]["times"]) == ("copy", 3, 1)
    assert step["input"]["name"] == "source" and step["input"]["fingerprint"]
    assert step["output_fingerprint"] and step["seconds"] >= 0 and step["peak_memory_bytes"] > 0
    assert record["report"]["result"] == {"tensors": 2}


def test_every_file_is_listed_with_its_own_hash(source, tmp_path):
    import hashlib

    CopyCheckpoint().run(source, tmp_path / "out")
    files = json.loads((tmp_path / "out" / "xmac.json").read_text())["files"]
    on_disk = {k: v for k, v in tree(tmp_path / "out").items() if k != "xmac.json"}
    assert {name: entry["sha256"] for name, entry in files.items()} == {
        name: hashlib.sha256(data).hexdigest() for name, data in on_disk.items()
    }


def test_a_chain_carries_the_lineage_along(source, tmp_path):
    CopyCheckpoint().run(source, tmp_path / "b")
    CopyCheckpoint(times=2).run(tmp_path / "b", tmp_path / "c")
    lineage = json.loads((tmp_path / "c" / "xmac.json").read_text())["lineage"]
    assert [step["options"]["times"] for step in lineage] == [1, 2]
    assert lineage[1]["input"]["fingerprint"] == lineage[0]["output_fingerprint"]


def test_same_input_and_options_give_the_same_tensors_and_result(source, tmp_path):
    for name in ("one", "two"):
        CopyCheckpoint().run(source, tmp_path / name)
    ignored = {"xmac.json", "metrics.jsonl"}
    one, two = ({k: v for k, v in tree(tmp_path / n).items() if k not in ignored} for n in ("one", "two"))
    assert one == two
    results = [json.loads((tmp_path / n / "xmac.json").read_text())["report"]["result"] for n in ("one", "two")]
    assert results[0] == results[1]


def test_an_existing_output_is_refused_and_left_alone(source, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious.txt").write_text("keep me")
    with pytest.raises(UsageError, match="exists"):
        CopyCheckpoint().run(source, out)
    assert tree(out) == {next(iter(tree(out))): b"keep me"}
    CopyCheckpoint().run(source, out, overwrite=True)
    assert not (out / "precious.txt").exists() and (out / "xmac.json").exists()


def test_a_failed_run_leaves_no_output_and_the_old_one_in_place(source, tmp_path):
    with pytest.raises(ConstraintError):
        CopyCheckpoint(fail=True).run(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    CopyCheckpoint().run(source, tmp_path / "old")
    before = tree(tmp_path / "old")
    with pytest.raises(ConstraintError):
        CopyCheckpoint(fail=True).run(source, tmp_path / "old", overwrite=True)
    assert tree(tmp_path / "old") == before


def test_resume_with_other_options_is_refused(source, tmp_path):
    with pytest.raises(ConstraintError):
        CopyCheckpoint(fail=True).run(source, tmp_path / "out")
    with pytest.raises(ResumeMismatchError):
        CopyCheckpoint(fail=False).run(source, tmp_path / "out", resume=True)
    with pytest.raises(ConstraintError):
        CopyCheckpoint(fail=True).run(source, tmp_path / "out", resume=True)


def test_resume_after_the_output_was_published_has_nothing_left_to_do(source, tmp_path):
    CopyCheckpoint().run(source, tmp_path / "out")
    before = tree(tmp_path / "out")
    report = CopyCheckpoint().run(source, tmp_path / "out", resume=True)
    assert report.output == tmp_path / "out" and report.result == {"tensors": 2} and tree(tmp_path / "out") == before
    with pytest.raises(UsageError, match="exists"):
        CopyCheckpoint(times=2).run(source, tmp_path / "out", resume=True)


def test_resume_notices_weights_of_the_same_shape_but_other_content(source, tmp_path):
    with pytest.raises(ConstraintError):
        CopyCheckpoint(fail=True).run(source, tmp_path / "out")
    name = "model-00001-of-00002.safetensors"
    save_file({"a": torch.zeros(2, 3)}, source / name, metadata={"format": "pt"})
    with pytest.raises(ResumeMismatchError):
        CopyCheckpoint(fail=True).run(source, tmp_path / "out", resume=True)


@pytest.mark.parametrize("where", ["source", "source/inside"])
def test_output_may_not_be_the_input_or_lie_inside_it(source, tmp_path, where):
    before = tree(source)
    with pytest.raises(UsageError):
        CopyCheckpoint().run(source, tmp_path / where, overwrite=True)
    assert tree(source) == before


def test_a_broken_input_is_answered_before_anything_is_written(source, tmp_path):
    shard = source / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(InputError):
        CopyCheckpoint().run(source, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_missing_arguments_are_usage_errors(source, tmp_path):
    with pytest.raises(UsageError, match="OUTPUT"):
        CopyCheckpoint().run(source)
    with pytest.raises(UsageError, match="INPUT"):
        CopyCheckpoint().run(None, tmp_path / "out")
    with pytest.raises(UsageError, match="does not exist"):
        CopyCheckpoint().run(tmp_path / "nothing", tmp_path / "out")


def test_a_report_directory_gets_page_json_and_plots(source, tmp_path):
    CopyCheckpoint().run(source, tmp_path / "out", report=tmp_path / "report")
    page = (tmp_path / "report" / "report.html").read_text()
    assert "Copied" in page and "data:image/png;base64," in page and "<script" not in page
    assert json.loads((tmp_path / "report" / "report.json").read_text())["result"] == {"tensors": 2}
    assert (tmp_path / "report" / "plots" / "bytes.png").read_bytes().startswith(b"\x89PNG")


def run_command(arguments, capsys):
    code = build_command(CopyCheckpoint).main([str(a) for a in arguments], standalone_mode=False)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_stdout_is_the_output_path_and_nothing_else(source, tmp_path, capsys):
    _, out, err = run_command([source, "-o", tmp_path / "out"], capsys)
    assert out == f"{tmp_path / 'out'}\n"
    assert "Copied" in err and "\x1b" not in err


def test_quiet_silences_stderr(source, tmp_path, capsys):
    _, out, err = run_command([source, tmp_path / "out", "--quiet"], capsys)
    assert out == f"{tmp_path / 'out'}\n" and err == ""


def test_json_replaces_the_path_by_the_report(source, tmp_path, capsys):
    _, out, _ = run_command([source, tmp_path / "out", "--json"], capsys)
    body = json.loads(out)
    assert body["verb"] == "copy" and body["output"] == str(tmp_path / "out") and body["result"] == {"tensors": 2}


def test_dry_run_reads_headers_and_writes_nothing(source, tmp_path, capsys):
    _, out, _ = run_command([source, tmp_path / "out", "--dry-run", "--json"], capsys)
    assert json.loads(out)["result"] == {"bytes": 32}
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_a_flag_overrides_the_recipe_and_a_run_can_be_repeated(source, tmp_path, capsys):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"times: 4\nseed: 9\ninput: {source}\n")
    run_command(["--recipe", recipe, "--times", "5", "-o", tmp_path / "a"], capsys)
    run_command(["--recipe", tmp_path / "a" / "xmac.json", "-o", tmp_path / "b"], capsys)
    steps = [json.loads((tmp_path / n / "xmac.json").read_text())["lineage"][-1] for n in ("a", "b")]
    assert [(s["options"]["times"], s["seed"]) for s in steps] == [(5, 9), (5, 9)]


def test_an_output_that_stdout_cannot_name_in_one_line_is_refused(source, tmp_path):
    with pytest.raises(UsageError, match="line break"):
        CopyCheckpoint().run(source, tmp_path / "two\nlines")
