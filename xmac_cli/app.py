"""The `xmac` command: lists the verbs, and imports one only when it is called.

`xmac --help` must answer at once, so this module knows a verb's name, module, class and one line, and nothing else.
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from xmac_cli import __version__
from xmac_cli.cli.errors import INTERRUPTED, XmacError


@dataclass(frozen=True)
class Entry:
    """Where a verb lives.

    Args:
        target: "module:Class", imported when the verb is called.
        help: one line for `xmac --help`.
        panel: heading of the list.
    """

    target: str
    help: str
    panel: str


_SURGERY, _LOOK, _BRING = "Surgery", "Look and measure", "Bring in"
VERBS: dict[str, Entry] = {
    "prune-moe": Entry("xmac_cli.prune_moe.command:PruneMoe", "remove experts by Shapley value", _SURGERY),
    "inspect": Entry("xmac_cli.inspect_checkpoint.command:InspectCheckpoint", "what is in a checkpoint", _LOOK),
    "verify": Entry("xmac_cli.verify_checkpoint.command:VerifyCheckpoint", "re-check hashes and attachments", _LOOK),
    "eval-ppl": Entry("xmac_cli.eval_ppl.command:EvalPpl", "perplexity by document and domain", _LOOK),
    "doctor": Entry("xmac_cli.doctor.command:Doctor", "versions, devices, extras, what is missing", _LOOK),
    "import-gguf": Entry("xmac_cli.import_gguf.command:ImportGguf", "a GGUF file as a safetensors directory", _BRING),
    "demo-model": Entry("xmac_cli.demo_model.command:DemoModel", "a small real model to try things on", _BRING),
}


class _LazyVerb(TyperCommand):
    """Stands in the list for a verb; becomes the real command when it is called."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        from xmac_cli.cli.command import build_command

        module, _, name = VERBS[str(self.name)].target.partition(":")
        command = build_command(getattr(importlib.import_module(module), name))
        return command.make_context(info_name, args, parent, **extra)


class _Verbs(TyperGroup):
    """The list of verbs, without importing them."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = VERBS.get(cmd_name)
        if entry is None:
            return None
        return _LazyVerb(cmd_name, help=entry.help, short_help=entry.help, rich_help_panel=entry.panel)


app = typer.Typer(
    name="xmac",
    cls=_Verbs,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"xmac {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", help="Show the version.", callback=_print_version, is_eager=True),
) -> None:
    """Model surgery from the shell: a verb takes a checkpoint, applies one published method, and proves what changed.

    `xmac VERB --help` tells about one verb.
    """


def run_command_line(arguments: list[str]) -> int:
    """Run xmac with these arguments and return the exit code; errors become one sentence on stderr."""
    debug = "--debug" in arguments
    click_error = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
    try:
        code = typer.main.get_command(app).main(arguments, prog_name="xmac", standalone_mode=False)
        if code == INTERRUPTED:  # Typer has already turned Ctrl-C into an exit code
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except XmacError as error:
        if debug:
            raise
        from xmac_cli.cli.console import print_error

        print_error(error)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        sys.stderr.write("xmac: interrupted; OUTPUT was not touched, and --resume continues what was begun\n")
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if debug:
            raise
        from xmac_cli.cli.console import print_error
        from xmac_cli.cli.places import as_xmac_error

        print_error(as_xmac_error(error))
        return 1
    except MemoryError:
        sys.stderr.write("xmac: out of memory\n")
        return 1
    except Exception as error:  # the last line of defence: one sentence, no traceback
        if debug:
            raise
        if isinstance(error, click_error):
            sys.stderr.write(f"xmac: {error.format_message()}\n")  # type: ignore[attr-defined]
            return 2
        text = " ".join(str(error).split())[:300]
        sys.stderr.write(f"xmac: {type(error).__name__}: {text}\n      --debug shows where; please report it\n")
        return 1


def main() -> None:
    """Entry point of the `xmac` command."""
    # A stream that the caller closed is None, and nothing said to it can be heard.
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.exit(run_command_line(sys.argv[1:]))
