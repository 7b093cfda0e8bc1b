"""What this machine can do to a link: found out by trying it on a device of our own, which goes again."""

from __future__ import annotations

import os
from dataclasses import dataclass

from deploy.links.commands import CommandError, Run, emulator, ip, iptables, run_command, tc, token_bucket
from deploy.links.namespace import inside_new
from deploy.links.shape import Shape

_CHAIN = "atoll-probe"
_DELAYED = Shape(delay=0.001)


@dataclass(frozen=True)
class Kernel:
    """``None`` for what can be done, else why it cannot.

    Attributes:
        tbf: limit a rate.
        netem: delay, jitter and loss by the kernel.
        ifb: shape what comes in.
        nfqueue: delay, jitter and loss by a process of ours; only tried where netem is missing.
    """

    tbf: str | None = None
    netem: str | None = None
    ifb: str | None = None
    nfqueue: str | None = None

    @property
    def holds(self) -> bool:
        """Whether packets can be delayed or lost at all."""
        return self.netem is None or self.nfqueue is None

    def sentences(self) -> list[str]:
        """What it can and what not, for people."""
        return [
            _sentence("rates (tbf)", self.tbf),
            _sentence("delay, jitter and loss by netem", self.netem),
            *([] if self.netem is None else [_sentence("the same by NFQUEUE", self.nfqueue)]),
            _sentence("shaping what comes in (ifb)", self.ifb),
        ]


def probe(run: Run = run_command, netns: str | None = None) -> Kernel:
    """Try everything on an ifb device of our own, made in ``netns`` and taken away again.

    Raises:
        CommandError: no device can be made at all: no root, no ``ip``.
    """
    name = f"atoll{os.getpid():x}"
    ifb: str | None = None
    for kind in ("ifb", "dummy", "veth"):
        try:
            run(*ip(netns, "link", "add", "name", name, "type", kind))
            break
        except CommandError as error:
            if "unknown device type" not in error.answer.lower():
                raise
            ifb = ifb or error.answer
    try:
        tbf = _refusal(run, *tc(netns, "qdisc", "add", "dev", name, "root", *token_bucket(10**6)))
        netem = _refusal(run, *tc(netns, "qdisc", "replace", "dev", name, "root", *emulator(_DELAYED)))
    finally:
        run(*ip(netns, "link", "del", "dev", name))
    return Kernel(tbf, netem, ifb, None if netem is None else _queueing(run, netns))


def probe_apart() -> Kernel:
    """The same in a new namespace, where nobody sees the device; in this one if there can be no new one."""
    try:
        return inside_new(probe)
    except OSError:
        return probe()


def _queueing(run: Run, netns: str | None) -> str | None:
    chain = f"{_CHAIN}-{os.getpid()}"
    refusal = _refusal(run, *iptables(netns, "-N", chain))
    if refusal is not None:
        return refusal
    queue = ("-j", "NFQUEUE", "--queue-num", "0", "--queue-bypass")
    refusal = _refusal(run, *iptables(netns, "-A", chain, *queue))
    run(*iptables(netns, "-F", chain))
    run(*iptables(netns, "-X", chain))
    return refusal


def _refusal(run: Run, *words: str) -> str | None:
    try:
        run(*words)
    except CommandError as error:
        return error.answer.splitlines()[0]
    return None


def _sentence(what: str, refusal: str | None) -> str:
    return f"{what}: yes" if refusal is None else f"{what}: no ({refusal})"
