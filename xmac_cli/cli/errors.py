"""Every failure a user can meet, with the exit code the contract promises (docs/contract.md).

An error carries one sentence that says what is wrong and where, and a hint that says what to do. Raise it where the
cause is known; nothing catches it except the command line, which prints it and leaves with `exit_code`.
This module imports nothing, so every floor may use it.
"""

from __future__ import annotations

INTERRUPTED = 130


class XmacError(Exception):
    """A failure with a clear sentence.

    Args:
        message: what is wrong, and where.
        hint: what the user can do about it, or None.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class InputError(XmacError):
    """The content of an input file is broken or not what it claims to be."""


class MissingExtraError(XmacError):
    """A part of xmac that is installed separately is needed.

    Args:
        extra: name of the extra, as in `pip install "xmac[extra]"`.
        purpose: what it is needed for, as the end of the sentence "… is needed to …".
    """

    def __init__(self, extra: str, purpose: str) -> None:
        super().__init__(f"the extra '{extra}' is needed to {purpose}", f'pip install "xmac[{extra}]"')


class UsageError(XmacError):
    """The command line or the options are wrong."""

    exit_code = 2


class UnsupportedModelError(XmacError):
    """The checkpoint is of a family or layout that no rule covers."""

    exit_code = 3


class ConstraintError(XmacError):
    """What was asked for cannot be done with this model."""

    exit_code = 4


class VerificationError(XmacError):
    """A check of the result, or of an existing directory, failed."""

    exit_code = 5


class ResumeMismatchError(XmacError):
    """Interrupted work cannot be continued with these inputs or options."""

    exit_code = 6
