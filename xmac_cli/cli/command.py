"""From a verb's class to a Typer command: flags, recipe, dry run, stdout line, exit code."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from xmac_cli.cli.errors import UsageError
from xmac_cli.cli.options import OptionField, option_fields
from xmac_cli.cli.settings import RunSettings
from xmac_cli.cli.verb import Verb

_META = ("source", "output_argument", "output", "recipe", "json", "quiet", "debug", "dry_run")


def build_command(verb: type[Verb]) -> Any:
    """The Typer command of a verb.

    Args:
        verb: the verb's class.

    Returns:
        A click command that Typer made.
    """

    def callback(**values: Any) -> None:
        invoke(verb, values)

    callback.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            *(_parameter(f) for f in option_fields(verb) if f.option.argument),
            *_meta_parameters(verb),
            *(_parameter(f) for f in option_fields(verb) if not f.option.argument),
            *_common_parameters(verb),
        ]
    )
    callback.__doc__ = inspect.cleandoc(verb.__doc__ or "")
    app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
    app.command(verb.name, context_settings={"help_option_names": ["-h", "--help"]})(callback)
    return typer.main.get_command(app)


def _parameter(field: OptionField) -> inspect.Parameter:
    option = field.option
    names = [field.flag if field.kind is not bool else f"{field.flag}/--no-{field.flag[2:]}"]
    if option.short:
        names.insert(0, option.short)
    annotation: Any = (list[field.kind] if field.multiple else field.kind) | None  # type: ignore[name-defined]
    help_text = option.help + _remarks(field)
    if option.argument:
        word = typer.Argument(help=help_text, metavar=option.metavar or field.flag, show_default=False)
        return _keyword(field.name, annotation, word)
    info = typer.Option(
        *names,
        help=help_text,
        metavar=option.metavar or _metavar(field),
        show_default=False,
        rich_help_panel=option.panel,
        autocompletion=(lambda choices: lambda: list(choices))(field.choices) if field.choices else None,
    )
    return _keyword(field.name, annotation, info)


def _metavar(field: OptionField) -> str:
    """The word that stands for a value in the help; a blank for a switch, which takes none."""
    if field.choices:
        return "NAME"
    return {bool: " ", int: "N", float: "X", Path: "PATH", str: "TEXT"}[field.kind]


def _remarks(field: OptionField) -> str:
    """What the help adds to an option's sentence: choices, repetition, default."""
    default = _default_text(field)
    remarks = (
        " | ".join(field.choices),
        "may be repeated" if field.multiple else "",
        f"default: {default}" if default else "",
    )
    text = "; ".join(filter(None, remarks))
    return f" ({text})" if text else ""


def _default_text(field: OptionField) -> str:
    if field.default is None or field.default == () or field.default is False:
        return ""
    if field.default is True:
        return "on"
    return ", ".join(map(str, field.default)) if field.multiple else str(field.default)


def _keyword(name: str, annotation: Any, info: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, info]
    )


def _meta_parameters(verb: type[Verb]) -> list[inspect.Parameter]:
    parameters = []
    if verb.reads:
        what = "a file, or -" if verb.reads == "file" else "a checkpoint directory, a hub id, or -"
        info = typer.Argument(help=f"{what} (one path on stdin)", metavar="INPUT", show_default=False)
        parameters.append(_keyword("source", str | None, info))
    if verb.writes:
        info = typer.Argument(help="the new directory", metavar="OUTPUT", show_default=False)
        parameters.append(_keyword("output_argument", Path | None, info))
    return parameters


def _common_parameters(verb: type[Verb]) -> list[inspect.Parameter]:
    run, out = "Running", "Output"
    hidden = () if verb.writes else ("overwrite", "resume", "link")
    parameters = []
    if verb.writes:
        info = typer.Option("-o", "--output", help="the new directory", metavar="OUTPUT", rich_help_panel=out)
        parameters.append(_keyword("output", Path | None, info))
    flags = (
        ("json", "--json", "print the report as one JSON object on stdout instead of the path", out),
        ("quiet", "--quiet", "nothing on stderr but errors", out),
        ("dry_run", "--dry-run", "say what would be done and what it costs, from headers only", run),
        ("debug", "--debug", "show the traceback of an error", run),
    )
    text = "options from a YAML file or an earlier xmac.json"
    info = typer.Option("--recipe", help=text, metavar="FILE", rich_help_panel=run)
    parameters.append(_keyword("recipe", Path | None, info))
    for name, flag, text, panel in flags:
        info = typer.Option(flag, help=text, metavar=" ", show_default=False, rich_help_panel=panel)
        parameters.append(_keyword(name, bool, info, default=False))
    taken = {field.name for field in option_fields(verb)}
    parameters += [_parameter(f) for f in option_fields(RunSettings) if f.name not in hidden and f.name not in taken]
    return parameters


def invoke(verb: type[Verb], values: dict[str, Any]) -> None:
    """Run one verb from parsed flags and print its one line.

    Raises:
        XmacError: anything that goes wrong in a foreseen way.
    """
    from xmac_cli.cli.console import print_tables, print_warnings, stderr_console
    from xmac_cli.cli.contract import dry_run, run_verb
    from xmac_cli.cli.inputs import read_input_argument
    from xmac_cli.cli.progress import ConsoleProgress

    options, settings, source, output = _merge(verb, values)
    instance = verb(**options)
    run_settings = RunSettings(**settings)
    path = Path(read_input_argument(source)) if source else None
    quiet = bool(values.get("quiet"))
    console = stderr_console()
    if values.get("dry_run"):
        report = dry_run(instance, path)
    else:
        progress = ConsoleProgress(console, quiet=quiet)
        report = run_verb(instance, path, output, run_settings, progress)
    if not quiet:
        print_tables(console, report.tables)
        print_warnings(console, report.warnings)
    if values.get("json"):
        body = {"verb": verb.name, "output": str(report.output) if report.output else None, **report.as_json()}
        sys.stdout.write(json.dumps(body, indent=2, sort_keys=False) + "\n")
    elif report.output is not None:
        sys.stdout.write(f"{report.output}\n")
    sys.stdout.flush()


def _merge(verb: type[Verb], values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], str | None, Path | None]:
    """Recipe first, flags over it."""
    from xmac_cli.cli.recipes import load_recipe

    given = {key: value for key, value in values.items() if key not in _META and value not in (None, [])}
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    own = {field.name for field in option_fields(verb)}
    options = {key: value for key, value in given.items() if key in own}
    settings = {key: value for key, value in given.items() if key not in own}
    if values.get("output") is not None and values.get("output_argument") is not None:
        raise UsageError("OUTPUT is given twice", "use the second argument or -o, not both")
    source = values.get("source")
    output = values.get("output") or values.get("output_argument")
    if values.get("recipe") is not None:
        recipe = load_recipe(values["recipe"], verb)
        options = {**recipe.options, **options}
        settings = {**recipe.settings, **settings}
        source = source or recipe.source
        output = output or (Path(recipe.output) if recipe.output else None)
    return options, settings, source, output
