"""The ranks of one node on one machine: torchrun's agent, in this process, with our own exit codes."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from deploy.exit_codes import NOT_LAUNCHED
from deploy.processes import PARENT_KEY

GRACE_SECONDS = 600  # after Ctrl-C, for the round in progress, its checkpoint and the farewell

_OPTION = "--nproc"


def without_option(arguments: Sequence[str]) -> list[str]:
    """The command line of a rank: that of its node without ``--nproc``."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if skip or argument.startswith(f"{_OPTION}="):
            skip = False
        elif argument == _OPTION:
            skip = True
        else:
            kept.append(argument)
    return kept


def run_ranks(ranks: int, arguments: Sequence[str]) -> int:
    """Run ``python -m atoll ARGUMENTS`` on so many ranks under torchrun's agent, until all have ended.

    Ctrl-C and SIGTERM are handed on to the ranks, which get :data:`GRACE_SECONDS` to end in order. They
    cannot outlive this process.

    Returns:
        0 if all of them ended well; else the exit code of the node: that of its leader if it has one, or of
        the rank that failed first.
    """
    os.environ[PARENT_KEY] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    os.environ.setdefault("LOGLEVEL", "CRITICAL")  # the agent's own log repeats what the ranks say,
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # by two kinds of loggers
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(GRACE_SECONDS))
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # The agent keeps logs and errors of its ranks in temporary folders, unless there is no place for them.
    command = ["--standalone", f"--nproc-per-node={ranks}", "--log-dir", os.devnull]
    command += ["-m", "atoll", *arguments]
    try:
        agent: Any = torchrun
        agent.run(agent.parse_args(command))
    except SignalException as signalled:
        return 128 + signal.Signals(signalled.sigval).value
    except ChildFailedError as error:
        for rank, failure in error.failures.items():
            if failure.exitcode < 0:
                print(f"atoll: {_killed(rank, failure.pid, -failure.exitcode)}", file=sys.stderr)
        failure = error.failures.get(0) or error.get_first_failure()[1]
        return failure.exitcode if failure.exitcode > 0 else NOT_LAUNCHED.code
    return 0


def _killed(rank: int, pid: int, number: int) -> str:
    who = ", by somebody or by the system as memory ran out" if number == signal.SIGKILL else ""
    return (
        f"rank {rank} of this node (process {pid}) was ended by {signal.Signals(number).name}{who}. To come "
        "back, give the same command, and --resume with the folder of --save if there is one"
    )
