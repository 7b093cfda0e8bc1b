"""What torchrun tells a process in its environment. Light: command lines ask before they import torch."""

from __future__ import annotations

import os


def under_torchrun() -> bool:
    """Whether torchrun has started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def ranks_here() -> int:
    """How many ranks this process is one of; 1 if torchrun has not started it."""
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else 1


def leads() -> bool:
    """Whether this process speaks for its node: it is alone, or rank 0."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def host_of_leader() -> str:
    """Where rank 0 is, as all ranks know it: on this machine, if all of them are."""
    here = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    return "127.0.0.1" if here else os.environ["MASTER_ADDR"]
