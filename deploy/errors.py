"""Which exceptions are messages for the user and which are defects of ours.

Named by module and class, so that deciding imports neither torch nor grpc.
"""

from __future__ import annotations

import errno

INTERRUPTED = 130  # exit code after Ctrl-C
EXPECTED = frozenset(
    (
        "protos.runfile.RunFileError",
        "protos.invite.InviteError",
        "protos.address.AddressError",
        "protos.units.UnitError",
        "protos.buckets.BucketTableError",
        "optim.roles.RoleError",
        "coordinator.chunk_store.ChunkStoreError",
        "coordinator.journal.JournalError",
        "node.language.ModelError",
        "node.tokens.DataError",
        "node.checkpoint_meta.CheckpointError",
        "node.export.ExportError",
        "node.setting.LaunchError",
        "node.exchange.base.ExchangeError",
        "node.island.transfer.IslandError",
        "deploy.status.StatusError",
        "deploy.processes.ProcessError",
        "deploy.errors.UserError",
    )
)


class UserError(RuntimeError):
    """Something that the user can put right; the text says what and how."""


def message(error: BaseException) -> str | None:
    """The text for the user, or ``None`` for a defect that deserves its traceback."""
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
    if names & EXPECTED:
        return str(error)
    if isinstance(error, OSError):
        return _system_message(error)
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"the Python package {error.name!r} is not installed: {error}"
    return None


def _system_message(error: OSError) -> str:
    reason = error.strerror or str(error)
    if error.errno == errno.EADDRINUSE:
        reason += "; another program listens there, choose another port"
    if error.filename is not None:
        return f"{error.filename}: {reason}"
    return reason
