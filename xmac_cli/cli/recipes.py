"""Recipes: the options of a verb in a YAML file, or in the xmac.json of an earlier run.

A recipe's keys are the option names (dashes or underscores), the common flags, and optionally `verb`, `input` and
`output`. Flags on the command line override it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from xmac_cli.cli.errors import InputError, UsageError
from xmac_cli.cli.options import coerce, option_fields, unknown_key
from xmac_cli.cli.settings import RunSettings

if TYPE_CHECKING:
    from xmac_cli.cli.verb import Verb

_LARGEST = 16 << 20


@dataclass(frozen=True)
class Recipe:
    """What a recipe file supplies.

    Args:
        options: values for the verb's own options.
        settings: values for the common flags.
        source: INPUT, or None.
        output: OUTPUT, or None.
    """

    options: Mapping[str, Any]
    settings: Mapping[str, Any]
    source: str | None = None
    output: str | None = None


def load_recipe(path: Path, verb: type[Verb]) -> Recipe:
    """Read a recipe for one verb.

    Args:
        path: a YAML file, or an xmac.json whose last step of this verb is taken.
        verb: the verb's class.

    Raises:
        UsageError: the file is missing, is for another verb, or holds an unknown option.
        InputError: it cannot be parsed.
    """
    data = _parse(path)
    if "lineage" in data:
        data = _from_lineage(data, verb.name, path)
    named = data.pop("verb", None)
    if named is not None and named != verb.name:
        raise UsageError(f"{path} is a recipe for {named}, not for {verb.name}")
    source, output = data.pop("input", None), data.pop("output", None)
    own = {alias: field for field in option_fields(verb) for alias in (field.name, _key(field.flag))}
    common = {field.name: field for field in option_fields(RunSettings)}
    options, settings = {}, {}
    for raw, value in data.items():
        key = _key(str(raw))
        if key in own:
            options[own[key].name] = coerce(own[key], value)
        elif key in common:
            settings[key] = coerce(common[key], value)
        else:
            raise unknown_key(str(raw), [*own, *common, "input", "output"], f"recipe {path}: {verb.name}")
    return Recipe(options, settings, _text(source), _text(output))


def _key(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _parse(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UsageError(f"the recipe {path} does not exist")
    if path.stat().st_size > _LARGEST:
        raise InputError(f"{path} is too large to be a recipe")
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (UnicodeDecodeError, json.JSONDecodeError, yaml.YAMLError, RecursionError) as error:
        where = str(error).replace("\n", " ")
        raise InputError(f"the recipe {path} cannot be parsed: {where}") from error
    if not isinstance(data, dict):
        raise InputError(f"the recipe {path} must be a mapping of option names to values")
    return data


def _from_lineage(data: dict[str, Any], name: str, path: Path) -> dict[str, Any]:
    steps = data["lineage"] if isinstance(data["lineage"], list) else []
    for step in reversed(steps):
        if isinstance(step, dict) and step.get("verb") == name and isinstance(step.get("options"), dict):
            values = dict(step["options"])
            if step.get("seed") is not None:
                values["seed"] = step["seed"]
            if isinstance(step.get("settings"), dict):
                values.update(step["settings"])
            origin = step.get("input")
            if isinstance(origin, dict) and isinstance(origin.get("path"), str):
                values["input"] = origin["path"]
            return values
    raise UsageError(f"{path} records no run of {name}")
