"""Options are the fields of a verb's dataclass: one source for flags, recipe keys, help, defaults and validation.

A field is declared as ``name: Annotated[type, Option(help=...)] = default``. Supported types: bool, int, float, str,
Path, Literal[...], tuple[T, ...] (a flag that may be repeated), each also with ``| None``.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from xmac_cli.cli.errors import UsageError


@dataclass(frozen=True)
class Option:
    """What a flag needs beside its type and default.

    Args:
        help: one sentence.
        ge, gt, le, lt: numeric bounds.
        choices: allowed strings, where Literal does not fit.
        short: a one-letter flag such as "-k".
        metavar: how the value is shown in the help.
        panel: heading under which the help lists it.
        flag: the flag, where it cannot be the field's name.
        identity: whether the value is part of what the work is; False for options that only split or display it, which
            may differ between the runs of one job (--resume, --shards).
        argument: a positional word before OUTPUT instead of a flag.
    """

    help: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: tuple[str, ...] = ()
    short: str | None = None
    metavar: str | None = None
    panel: str = "Options"
    flag: str | None = None
    identity: bool = True
    argument: bool = False


@dataclass(frozen=True)
class OptionField:
    """One field, taken apart.

    Args:
        name: field name and recipe key.
        flag: `--like-this`.
        kind: the plain type of one value.
        choices: allowed strings, or empty.
        multiple: the flag may be repeated and the value is a tuple.
        default: the default value.
        option: the declaration.
    """

    name: str
    flag: str
    kind: type
    choices: tuple[str, ...]
    multiple: bool
    default: Any
    option: Option


def option_fields(cls: type) -> tuple[OptionField, ...]:
    """The options of a dataclass, in the order they are declared.

    Raises:
        TypeError: a field has no Option or a type that is not supported (a programming error).
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    return tuple(_take_apart(field, hints[field.name]) for field in dataclasses.fields(cls))


def _take_apart(field: dataclasses.Field[Any], hint: Any) -> OptionField:
    if typing.get_origin(hint) is not Annotated:
        raise TypeError(f"option {field.name} needs Annotated[type, Option(...)]")
    inner, *extras = typing.get_args(hint)
    option = next(extra for extra in extras if isinstance(extra, Option))
    if typing.get_origin(inner) in (Union, types.UnionType):
        inner = next(a for a in typing.get_args(inner) if a is not type(None))
    multiple = typing.get_origin(inner) is tuple
    if multiple:
        inner = typing.get_args(inner)[0]
    choices = option.choices
    if typing.get_origin(inner) is Literal:
        choices, inner = tuple(str(c) for c in typing.get_args(inner)), str
    if inner not in (bool, int, float, str, Path):
        raise TypeError(f"option {field.name} has the unsupported type {inner}")
    flag = option.flag or (field.name.upper() if option.argument else "--" + field.name.replace("_", "-"))
    return OptionField(field.name, flag, inner, choices, multiple, field.default, option)


def check_values(instance: Any) -> None:
    """Check every option value of a dataclass instance against its declaration.

    Raises:
        UsageError: naming the flag, the value and what is allowed.
    """
    for field in option_fields(type(instance)):
        value = getattr(instance, field.name)
        if value is None:
            if field.default is not None:
                raise UsageError(f"{field.flag} needs a value")
            continue
        values = value if field.multiple else (value,)
        if field.multiple and not isinstance(value, tuple):
            raise UsageError(f"{field.flag} takes a tuple of values, got {value!r}")
        for item in values:
            _check_one(field, item)


def _check_one(field: OptionField, value: Any) -> None:
    wanted = (int, float) if field.kind is float else field.kind
    if not isinstance(value, wanted) or (field.kind in (int, float) and isinstance(value, bool)):
        raise UsageError(f"{field.flag} takes a {field.kind.__name__.lower()}, got {value!r}")
    if field.choices and value not in field.choices:
        close = difflib.get_close_matches(str(value), field.choices, n=1)
        hint = f"did you mean {close[0]}?" if close else None
        raise UsageError(f"{field.flag} is one of {', '.join(field.choices)}, not {value!r}", hint)
    if field.kind not in (int, float):
        return
    if value != value:
        raise UsageError(f"{field.flag} is not a number")
    option = field.option
    bounds = (
        (option.ge, lambda v, b: v >= b, ">="),
        (option.gt, lambda v, b: v > b, ">"),
        (option.le, lambda v, b: v <= b, "<="),
        (option.lt, lambda v, b: v < b, "<"),
    )
    for bound, holds, sign in bounds:
        if bound is not None and not holds(value, bound):
            raise UsageError(f"{field.flag} must be {sign} {bound:g}, got {value}")


def coerce(field: OptionField, value: Any) -> Any:
    """Turn a value read from YAML or JSON into the field's type; None stays None.

    Raises:
        UsageError: the value cannot be such a type.
    """
    if value is None:
        return None
    if field.multiple:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(_coerce_one(field, item) for item in items)
    return _coerce_one(field, value)


def _coerce_one(field: OptionField, value: Any) -> Any:
    if field.kind is Path and isinstance(value, str):
        return Path(value)
    if field.kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if field.kind is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, field.kind) or (field.kind is int and isinstance(value, bool)):
        raise UsageError(f"{field.name} takes a {field.kind.__name__.lower()}, got {value!r}")
    return value


def as_plain(instance: Any) -> dict[str, Any]:
    """The options as JSON-able values: paths become strings, tuples become lists."""
    return {f.name: _plain(getattr(instance, f.name)) for f in dataclasses.fields(instance)}


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def unknown_key(key: str, known: Iterable[str], where: str) -> UsageError:
    """The error for an option name that does not exist, with the nearest one that does."""
    close = difflib.get_close_matches(key, list(known), n=1)
    return UsageError(f"{where} has no option '{key}'", f"did you mean '{close[0]}'?" if close else None)
