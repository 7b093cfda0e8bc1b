"""Which exceptions are messages for the user and which are defects of ours, and the exit code of each.

Named by module and class, so that deciding imports neither torch nor grpc.
"""

from __future__ import annotations

import errno
from typing import Final

from deploy.exit_codes import DONE, INTERRUPTED, OF_ERROR, OF_REFUSAL, STOPPED, SYSTEM

__all__ = ["DONE", "EXPECTED", "INTERRUPTED", "STOPPED", "UserError", "exit_code", "message"]

EXPECTED: Final = frozenset(OF_ERROR)


class UserError(RuntimeError):
    """Something that the user can put right; the text says what and how."""


def message(error: BaseException) -> str | None:
    """The text for the user, or ``None`` for a defect that deserves its traceback."""
    if any(name in EXPECTED for name in _names(error)):
        return str(error)
    if isinstance(error, OSError):
        return _system_message(error)
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"the Python package {error.name!r} is not installed: {error}"
    return None


def exit_code(error: BaseException) -> int:
    """With which code `atoll` ends after ``error``, see :mod:`deploy.exit_codes`.

    What a coordinator has refused, and why, counts before the kind of exception that tells of it.
    """
    if message(error) is None:
        return STOPPED
    refused = OF_REFUSAL.get(getattr(error, "refusal", ""))
    if refused is not None:
        return refused.code
    return next((OF_ERROR[name].code for name in _names(error) if name in OF_ERROR), SYSTEM.code)


def _names(error: BaseException) -> list[str]:
    return [f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__]


def _system_message(error: OSError) -> str:
    reason = error.strerror or str(error)
    if error.errno == errno.EADDRINUSE:
        reason += "; another program listens there, choose another port"
    if error.filename is not None:
        return f"{error.filename}: {reason}"
    return reason
