"""Shaping an interface: what goes out by its root qdisc, what comes in by way of an ifb device of ours.

Rates are limited by tbf. Delay, jitter and loss are netem's where the kernel has it, else those of a process
that holds packets in queues of netfilter (:mod:`deploy.links.delay`), else they are left out, and said so.
Everything is found again by its handles, names and comments: there is no file of what was set.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Final

from deploy.links import interface as interfaces
from deploy.links.commands import (
    SEGMENT,
    Run,
    ShapingError,
    bucket_bytes,
    emulator,
    ip,
    iptables,
    run_command,
    signals_held_back,
    tc,
    token_bucket,
)
from deploy.links.delays import Delays, Hold, Lines, Processes, held_by
from deploy.links.interface import HELD, KEPT, TABLES, Handles, Interface, Setting, find, look
from deploy.links.kernel import Kernel, probe
from deploy.links.shape import OPEN, Shape

__all__ = ["Shape", "Shaped", "ShapingError", "clear", "current", "shape"]

_INTO, _THROUGH, _BACK, _AWAY = range(interfaces.QUEUES)  # queues of an interface
Words = tuple[str, ...]
PROCESSES: Final = Processes()


class Shaped:
    """A shaped interface. As a context manager, or by :meth:`undo`, everything is taken away again.

    Attributes:
        notes: what could not be done as asked, and what was found on the interface, in words.
    """

    def __init__(
        self,
        interface: Interface,
        run: Run,
        kernel: Kernel,
        delays: Delays,
        *,
        kept: bool = False,
        hold: Hold | None = None,
    ) -> None:
        self.interface, self.notes = interface, list[str]()
        self.out, self.into = OPEN, OPEN
        self._run, self._kernel, self._delays = run, kernel, delays
        self._kept, self._hold = kept, hold
        self._undone = False

    def __enter__(self) -> Shaped:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._kept:
            self.undo()

    def change(self, out: Shape | None, into: Shape | None) -> None:
        """Shape anew. Another rate or delay is changed in place and loses nothing that waits, unless the new
        rate's bucket is too small for that.

        Raises:
            ShapingError: a command failed; nothing is shaped then.
        """
        out, into = out or OPEN, into or OPEN
        try:
            for part in (self._change_out, self._change_into, self._change_held):
                part(out, into)
        except BaseException:
            self._remove()
            self.out, self.into = OPEN, OPEN
            raise
        self.out, self.into = out, into

    def undo(self) -> None:
        """Take everything away. Again, or when the interface is gone, it does nothing."""
        if self._undone:
            return
        self._undone = True
        with signals_held_back():  # a second Ctrl-C would leave half of it
            self._remove()
            if self._hold is not None:
                self._hold.close()

    def _remove(self) -> None:
        self._delays.ask(self.interface, end=True)
        with contextlib.suppress(ShapingError):  # an interface that is gone has taken everything along
            remove(self.interface, look(self.interface, self._run), self._run)

    def _change_out(self, out: Shape, into: Shape) -> None:
        self._root(self.interface.name, self.out, out)

    def _change_into(self, out: Shape, into: Shape) -> None:
        link, netns = self.interface, self.interface.netns
        before, after = self._kind(self.into), self._kind(into)
        if after and self._kernel.ifb is not None:
            raise ShapingError(
                f"what comes in through {link} cannot be shaped: {self._kernel.ifb} (ifb); load it with "
                "'modprobe ifb' on the host, or shape what goes out on the other side, with --direction out"
            )
        if after and not before:
            self._run(*ip(netns, "link", "add", "name", link.ifb, "type", "ifb"))
            self._run(*ip(netns, "link", "set", "dev", link.ifb, "up"))
        self._root(link.ifb, self.into, into)
        if after and not before:
            self._run(*tc(netns, "qdisc", "add", "dev", link.name, "handle", "ffff:", "ingress"))
            everything = ["protocol", "all", "prio", str(interfaces.FILTER), "u32", "match", "u32", "0", "0"]
            lead = ["action", "mirred", "egress", "redirect", "dev", link.ifb]
            self._run(*tc(netns, "filter", "add", "dev", link.name, "parent", "ffff:", *everything, *lead))
        elif before and not after:
            self._run(*tc(netns, "qdisc", "del", "dev", link.name, "ingress"))
            self._run(*ip(netns, "link", "del", "dev", link.ifb))

    def _root(self, device: str, before: Shape, after: Shape) -> None:
        netns, old, new = self.interface.netns, self._kind(before), self._kind(after)
        # A segment that waits and is larger than a new, smaller bucket would block the link for ever.
        anew = bool(old) and (old != new or self._waiting(after) < self._waiting(before))
        if anew:
            self._run(*tc(netns, "qdisc", "del", "dev", device, "root"))
        verb = "change" if old and not anew else "add"
        for words in qdiscs(after, new, KEPT if self._kept else HELD, self.interface.frame):
            self._run(*tc(netns, "qdisc", verb, "dev", device, *words))

    def _waiting(self, shape: Shape) -> int:
        """Bytes of the largest packet that may wait for its rate; 0 without a rate."""
        return 0 if shape.rate is None else min(bucket_bytes(shape.rate, self.interface.frame), SEGMENT)

    def _kind(self, shape: Shape) -> tuple[str, ...]:
        emulated = ("netem",) if shape.held and self._kernel.netem is None else ()
        return (*emulated, *(("tbf",) if shape.rate is not None else ()))

    def _change_held(self, out: Shape, into: Shape) -> None:
        """Delay, jitter and loss by netfilter, where netem is missing."""
        if self._kernel.netem is None:
            return
        link = self.interface
        lines = queue_lines(link, out, into)
        if self._kernel.nfqueue is not None:
            if lines:
                self.notes.append(
                    f"no delay, jitter and loss on {link}: no netem ({self._kernel.netem}), and no NFQUEUE "
                    f"({self._kernel.nfqueue}); only the rate is set"
                )
            return
        unused = {link.queue + queue: (0.0, 0.0, 0.0) for queue in range(interfaces.QUEUES)}
        if lines and self._delays.ask(link, {**unused, **lines}) is None:
            how = self._delays.start(link, {**unused, **lines}, owned=not self._kept)
            self.notes.append(f"no netem in this kernel: delay, jitter and loss of {link} by NFQUEUE ({how})")
            if out.delay:
                self.notes.append(
                    f"what this machine itself sends through {link} leaves at once, and its delay is added "
                    "to what comes back: round trips are as asked"
                )
        for rule in look(link, self._run).rules:
            self._run(*iptables(link.netns, *rule[1:], program=rule[0]))
        for words in rules(link, lines, self._kept):
            self._run(*iptables(link.netns, *words))
            with contextlib.suppress(ShapingError):  # a machine without IPv6
                self._run(*iptables(link.netns, *words, program=TABLES[1]))
        if not lines:
            self._delays.ask(link, end=True)


def shape(
    interface: str,
    out: Shape | None,
    into: Shape | None,
    *,
    netns: str | None = None,
    replace: bool = False,
    kept: bool = False,
    run: Run = run_command,
    kernel: Kernel | None = None,
    delays: Delays = PROCESSES,
) -> Shaped:
    """Shape what goes out of an interface, and what comes in; ``None`` leaves a direction alone.

    Args:
        interface: its name.
        out: of what goes out.
        into: of what comes in.
        netns: the network namespace, by name or path; that of the caller if ``None``.
        replace: take the place of a qdisc that somebody else has set. It is not put back.
        kept: stay until :func:`clear`, also when this process ends; else no other process may shape the
            interface, and the context manager takes everything away.
        run: runs a command and returns its stdout.
        kernel: what the kernel can, if that is known already; else it is tried.
        delays: processes that delay packets.

    Raises:
        ShapingError: no such interface, no rights, no tools, a qdisc of somebody else, another process that
            shapes it; the text says which, and what to do.
    """
    link = find(interface, run, netns)
    kernel = probe(run, netns) if kernel is None else kernel
    pid = delays.holder(link)
    if pid is not None:
        raise held_by(pid, link)
    hold = None if kept else delays.hold(link)
    shaped = Shaped(link, run, kernel, delays, kept=kept, hold=hold)
    try:
        _make_room(shaped, look(link, run), run, delays, replace)
        shaped.change(out, into)
    except BaseException:
        if hold is not None:
            hold.close()
        raise
    return shaped


def current(
    interface: str, *, netns: str | None = None, run: Run = run_command, delays: Delays = PROCESSES
) -> tuple[Shape, Shape]:
    """What is set on an interface: of what goes out, and of what comes in.

    Raises:
        ShapingError: there is no such interface.
    """
    link = find(interface, run, netns)
    return shapes(link, look(link, run), delays)


def clear(
    interface: str, *, netns: str | None = None, run: Run = run_command, delays: Delays = PROCESSES
) -> bool:
    """Take away what was set, also by a process that was killed; ``False`` if nothing was.

    Raises:
        ShapingError: no such interface, or a process that still runs holds it.
    """
    link = find(interface, run, netns)
    pid = delays.holder(link)
    if pid is not None:
        raise held_by(pid, link)
    process = delays.ask(link, end=True) is not None
    setting = look(link, run)
    remove(link, setting, run)
    return setting.ours or process


def remove(link: Interface, setting: Setting, run: Run) -> None:
    """Take away what is ours of a setting, and nothing else."""
    netns = link.netns
    for rule in setting.rules:
        run(*iptables(netns, *rule[1:], program=rule[0]))
    if setting.root:
        run(*tc(netns, "qdisc", "del", "dev", link.name, "root"))
    if setting.ingress:
        run(*tc(netns, "qdisc", "del", "dev", link.name, "ingress"))
    if setting.ifb:
        run(*ip(netns, "link", "del", "dev", link.ifb))


def qdiscs(shape: Shape, kind: tuple[str, ...], handles: Handles, frame: int) -> Iterator[Words]:
    """Place, handle and arguments of the qdiscs that make a shape; netem first, the rate comes after it."""
    if "netem" in kind:
        yield ("root", "handle", handles.emulator, *emulator(shape))
    if shape.rate is not None:
        bucket = token_bucket(shape.rate, frame)
        if "netem" in kind:
            yield ("parent", f"{handles.emulator}1", "handle", handles.bucket_below, *bucket)
        else:
            yield ("root", "handle", handles.bucket, *bucket)


def queue_lines(link: Interface, out: Shape, into: Shape) -> Lines:
    """What the queues of an interface have to do: number -> delay, jitter, loss.

    Packets of this machine's own sockets must not wait on their way out: TCP counts them as still in its own
    queue and sends no more (TCP small queues). So they only get lost there, and wait on the way back.
    """
    lines = {
        _INTO: (into.delay, into.jitter, into.loss),
        _THROUGH: (out.delay, out.jitter, out.loss),
        _BACK: (out.delay, out.jitter, 0.0),
        _AWAY: (0.0, 0.0, out.loss),
    }
    return {link.queue + queue: line for queue, line in lines.items() if any(line)}


def rules(link: Interface, lines: Lines, kept: bool) -> Iterator[Words]:
    """Netfilter rules, in their order, that lead packets into the queues that are in use."""
    hooks = {
        _INTO: ("PREROUTING", "-i"),
        _THROUGH: ("FORWARD", "-o"),
        _BACK: ("INPUT", "-i"),
        _AWAY: ("OUTPUT", "-o"),
    }
    for queue, (chain, side) in hooks.items():
        number = link.queue + queue
        if number in lines:
            target = ("-j", "NFQUEUE", "--queue-num", str(number), "--queue-bypass")
            yield ("-A", chain, side, link.name, "-m", "comment", "--comment", link.tag(kept), *target)


def _make_room(shaped: Shaped, setting: Setting, run: Run, delays: Delays, replace: bool) -> None:
    link = shaped.interface
    process = delays.ask(link)
    if setting.ours or process is not None:
        out, into = shapes(link, setting, delays)
        was = f"{out} out, {into} in"
        delays.ask(link, end=True)
        remove(link, setting, run)
        if setting.kept:
            shaped.notes.append(f"replaced what was set on {link} before ({was})")
        else:
            shaped.notes.append(f"removed what a process that was killed had left on {link} ({was})")
    if setting.foreign:
        what = " and ".join(setting.foreign)
        if not replace:
            raise ShapingError(
                f"{link} has {what}, which somebody else has set; --replace takes its place, and does not "
                "put it back"
            )
        shaped.notes.append(f"took the place of {what} on {link}; undoing does not put that back")
        for words in (("root",), ("ingress",)):
            with contextlib.suppress(ShapingError):  # there is only one of them perhaps
                run(*tc(link.netns, "qdisc", "del", "dev", link.name, *words))


def shapes(link: Interface, setting: Setting, delays: Delays = PROCESSES) -> tuple[Shape, Shape]:
    """Of what goes out and what comes in: the rates of qdiscs, the rest of the process that delays."""
    lines = delays.ask(link)
    if lines is None:
        return setting.out, setting.into

    def with_line(shape: Shape, queue: int) -> Shape:
        delay, jitter, loss = lines.get(link.queue + queue, (0.0, 0.0, 0.0))
        return Shape(shape.rate, delay, jitter, loss)

    return with_line(setting.out, _THROUGH), with_line(setting.into, _INTO)
