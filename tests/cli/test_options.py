"""One dataclass is flags, recipe keys, validation and stored options."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import pytest

from xmac_cli.cli.errors import InputError, UsageError
from xmac_cli.cli.options import Option, as_plain, coerce, option_fields
from xmac_cli.cli.recipes import load_recipe
from xmac_cli.cli.settings import RunSettings
from xmac_cli.cli.verb import Verb


@dataclass(frozen=True)
class Example(Verb):
    """An example."""

    name: ClassVar[str] = "example"
    ratio: Annotated[float | None, Option("share", ge=0, lt=1)] = None
    count: Annotated[int, Option("count", gt=0, le=10)] = 3
    kind: Annotated[Literal["red", "green"], Option("kind")] = "red"
    files: Annotated[tuple[Path, ...], Option("files")] = ()
    plan_file: Annotated[Path | None, Option("plan", flag="--plan")] = None
    fast: Annotated[bool, Option("fast")] = True


def test_fields_know_their_flag_type_and_choices():
    fields = {f.name: f for f in option_fields(Example)}
    assert list(fields) == ["ratio", "count", "kind", "files", "plan_file", "fast"]
    assert fields["plan_file"].flag == "--plan" and fields["ratio"].flag == "--ratio"
    assert fields["ratio"].kind is float and fields["files"].multiple and fields["files"].kind is Path
    assert fields["kind"].choices == ("red", "green")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"ratio": 1.0}, ["--ratio", "< 1", "1.0"]),
        ({"ratio": -0.1}, ["--ratio", ">= 0"]),
        ({"ratio": float("nan")}, ["--ratio", "not a number"]),
        ({"count": 0}, ["--count", "> 0"]),
        ({"count": 11}, ["--count", "<= 10"]),
        ({"count": True}, ["--count", "int"]),
        ({"count": None}, ["--count", "needs a value"]),
        ({"kind": "gren"}, ["--kind", "red, green"]),
        ({"files": [Path("a")]}, ["--files", "tuple"]),
    ],
)
def test_a_value_out_of_bounds_names_flag_and_bound(values, words):
    with pytest.raises(UsageError) as caught:
        Example(**values)
    assert all(word in caught.value.message for word in words)


def test_a_near_miss_is_suggested():
    with pytest.raises(UsageError) as caught:
        Example(kind="gren")
    assert caught.value.hint == "did you mean green?"


def test_plain_values_build_the_same_instance_again():
    example = Example(ratio=0.5, files=(Path("a"), Path("b")), plan_file=Path("p.json"), fast=False)
    plain = json.loads(json.dumps(as_plain(example)))
    assert Example(**{field.name: coerce(field, plain[field.name]) for field in option_fields(Example)}) == example


def test_a_recipe_takes_field_names_flags_and_common_flags(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("verb: example\ninput: some/dir\nratio: 0.25\nplan: p.json\nfiles: [a, b]\nseed: 7\ncount: 2\n")
    recipe = load_recipe(path, Example)
    assert recipe.options == {"ratio": 0.25, "plan_file": Path("p.json"), "files": (Path("a"), Path("b")), "count": 2}
    assert recipe.settings == {"seed": 7} and recipe.source == "some/dir"


def test_the_last_step_of_the_verb_in_a_lineage_is_a_recipe(tmp_path):
    steps = [
        {"verb": "example", "options": {"count": 1}, "seed": 1, "input": {"path": "x"}},
        {"verb": "example", "options": {"count": 5}, "seed": 4, "input": {"path": "y"}},
        {"verb": "other", "options": {"count": 9}, "seed": 9},
    ]
    path = tmp_path / "xmac.json"
    path.write_text(json.dumps({"schema": "xmac/1", "lineage": steps}))
    recipe = load_recipe(path, Example)
    assert recipe.options == {"count": 5} and recipe.settings["seed"] == 4 and recipe.source == "y"


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("ratios: 0.25", UsageError, ["ratios"]),
        ("verb: other", UsageError, ["other", "example"]),
        ("- a\n- b", InputError, ["mapping"]),
        ("a: [", InputError, ["parsed"]),
        ("count: [1, 2]", UsageError, ["count"]),
        ("count: many", UsageError, ["count"]),
        ("!!python/object/apply:os.system ['true']", InputError, ["parsed"]),
    ],
)
def test_a_bad_recipe_is_one_sentence(tmp_path, text, error, words):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(error) as caught:
        load_recipe(path, Example)
    assert all(word in caught.value.message for word in words)


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cpu:1", ""])
def test_a_device_that_does_not_exist_is_refused(device):
    with pytest.raises(UsageError):
        RunSettings(device=device)
