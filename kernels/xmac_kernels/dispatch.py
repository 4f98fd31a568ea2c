"""Which implementation of an operation runs.

Order: the `backend=` argument, then the environment variable XMAC_BACKEND, then automatic: Triton for CUDA and HIP
tensors, numba for CPU tensors when it is installed, else plain torch. A backend that fails raises; it is never replaced
silently. With XMAC_BACKEND=auto-fallback a failing backend is reported once on the log and the next one runs; the
backend that did the work is kept in `last_used`, so that a report can name it.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Mapping
from typing import TypeVar

ENVIRONMENT = "XMAC_BACKEND"
FALLBACK = "auto-fallback"

Result = TypeVar("Result")


class BackendError(ValueError):
    """A backend that was asked for does not exist, is not installed, or cannot take these shapes."""


logger = logging.getLogger("xmac_kernels")
last_used: dict[str, str] = {}
_reported: set[tuple[str, str]] = set()


def installed(backend: str) -> bool:
    """Whether the package behind a backend can be imported."""
    return backend in ("torch", "numpy") or importlib.util.find_spec(backend) is not None


def candidates(implementations: Mapping[str, object], device_type: str) -> list[str]:
    """Automatic choices for a device, best first."""
    order = ("triton", "torch") if device_type in ("cuda", "xpu") else ("numba", "numpy", "torch")
    return [name for name in order if name in implementations and installed(name)]


def run(
    operation: str,
    implementations: Mapping[str, Callable[[], Result]],
    *,
    device_type: str,
    backend: str | None = None,
    unfit: Mapping[str, str] | None = None,
) -> Result:
    """Run one implementation of an operation.

    Args:
        operation: name, for messages and `last_used`.
        implementations: backend -> call without arguments.
        device_type: where the tensors live: "cpu", "cuda", ...
        backend: the caller's wish, or None.
        unfit: backend -> reason why it cannot take these shapes; the automatic choice passes over it, an explicit wish
            for it raises.

    Raises:
        BackendError: the backend that was asked for is unknown, not installed, or cannot take these shapes.
    """
    unfit = unfit or {}
    wish = backend or os.environ.get(ENVIRONMENT) or None
    if wish not in (None, FALLBACK):
        _check_wish(operation, str(wish), implementations, unfit)
        return _call(operation, str(wish), implementations)
    names = [name for name in candidates(implementations, device_type) if name not in unfit]
    if wish != FALLBACK:
        return _call(operation, names[0], implementations)
    for name in names[:-1]:
        try:
            return _call(operation, name, implementations)
        except Exception as error:  # noqa: BLE001  the fallback mode exists to survive whatever a compiler throws
            if (operation, name) not in _reported:
                _reported.add((operation, name))
                logger.warning("%s: backend %s failed (%s); using the next one", operation, name, error)
    return _call(operation, names[-1], implementations)


def _check_wish(operation: str, wish: str, implementations: Mapping[str, object], unfit: Mapping[str, str]) -> None:
    if wish not in implementations:
        raise BackendError(f"{operation} has no backend '{wish}'; choose one of {', '.join(implementations)}")
    if wish in unfit:
        raise BackendError(f"{operation}: backend '{wish}' cannot be used: {unfit[wish]}")
    if not installed(wish):
        raise BackendError(f"{operation}: backend '{wish}' needs `pip install {wish}`")


def _call(operation: str, name: str, implementations: Mapping[str, Callable[[], Result]]) -> Result:
    result = implementations[name]()
    last_used[operation] = name
    return result
