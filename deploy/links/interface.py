"""What is set on an interface: our own queueing disciplines, told from those of others by their handles."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import shlex
from dataclasses import dataclass, field, replace
from typing import Any, Final

from deploy.links.commands import CommandError, Run, ShapingError, ip, iptables, tc
from deploy.links.shape import Shape

FILTER: Final = 0xA701  # preference of our filter on what comes in
FIRST_QUEUE: Final = 41_000
_IFB: Final = "atollifb"
_INTERFACES: Final = 6_000  # after so many the numbers of queues begin anew
QUEUES: Final = 4  # of an interface
TABLES: Final = ("iptables", "ip6tables")


@dataclass(frozen=True)
class Handles:
    """Of the qdiscs of one device; tc writes them in hexadecimal."""

    bucket: str
    emulator: str
    bucket_below: str


HELD: Final = Handles("a701:", "a702:", "a703:")  # by a process, which undoes them when it ends
KEPT: Final = Handles("a711:", "a712:", "a713:")  # until they are cleared
_BUCKETS: Final = {handles.bucket for handles in (HELD, KEPT)} | {
    handles.bucket_below for handles in (HELD, KEPT)
}
_KERNEL: Final = "0:"  # the handle of what the kernel sets by itself
_HELD: Final = {HELD.bucket, HELD.emulator}
_KEPT: Final = {KEPT.bucket, KEPT.emulator}


@dataclass(frozen=True)
class Interface:
    """An interface in a network namespace; ``netns`` is a name, a path, or ``None``: that of the caller."""

    name: str
    index: int
    netns: str | None = None
    mtu: int = 1500

    @property
    def frame(self) -> int:
        """Bytes of its largest frame, as the kernel counts it."""
        return self.mtu + 14

    @property
    def ifb(self) -> str:
        """The device of ours through which what comes in is led."""
        return f"{_IFB}{self.index}"

    @property
    def queue(self) -> int:
        """The first of its four queues of netfilter."""
        return FIRST_QUEUE + self.index % _INTERFACES * QUEUES

    def tag(self, kept: bool) -> str:
        """The comment that our netfilter rules carry."""
        return f"atoll:{'kept' if kept else 'held'}:{self.name}"

    def __str__(self) -> str:
        return f"{self.name} in {self.netns}" if self.netns else self.name


@dataclass(frozen=True)
class Setting:
    """What was found on an interface.

    Attributes:
        out, into: shapes by qdiscs alone.
        kept: whether they last until they are cleared, or a process holds them; ``None`` if nothing is ours.
        root: whether the root qdisc is ours.
        ingress: whether the way of what comes in is ours.
        ifb: whether our device is there.
        foreign: qdiscs of others in our way, in words.
        rules: arguments that delete our netfilter rules, with the program's name first.
    """

    out: Shape = field(default_factory=Shape)
    into: Shape = field(default_factory=Shape)
    kept: bool | None = None
    root: bool = False
    ingress: bool = False
    ifb: bool = False
    foreign: tuple[str, ...] = ()
    rules: tuple[tuple[str, ...], ...] = ()

    @property
    def ours(self) -> bool:
        """Whether anything there is ours."""
        return self.root or self.ingress or self.ifb or bool(self.rules)


def find(name: str, run: Run, netns: str | None = None) -> Interface:
    """An interface by its name.

    Raises:
        ShapingError: there is none; the text names those that are there.
    """
    links = json.loads(run(*ip(netns, "-j", "link", "show")) or "[]")
    for link in links:
        if link.get("ifname") == name:
            return Interface(name, int(link["ifindex"]), netns, int(link["mtu"]))
    names = ", ".join(str(link.get("ifname")) for link in links)
    where = f" in the namespace {netns}" if netns else ""
    raise ShapingError(f"there is no interface {name!r}{where}; there are {names}")


def find_by_subnet(subnet: str, run: Run, netns: str | None = None) -> Interface:
    """The one interface that has an address of a subnet; names vary in containers, subnets do not.

    Raises:
        ShapingError: not a subnet, or not exactly one interface has an address of it.
    """
    try:
        network = ipaddress.ip_network(subnet, strict=False)
    except ValueError as error:
        raise ShapingError(f"{error}; write a subnet as '10.90.0.0/24'") from None
    found: dict[str, Interface] = {}
    seen: list[str] = []
    for link in json.loads(run(*ip(netns, "-j", "address", "show")) or "[]"):
        name = str(link["ifname"])
        for entry in link.get("addr_info", ()):
            seen.append(f"{entry['local']} at {name}")
            if ipaddress.ip_address(entry["local"]) in network:
                found[name] = Interface(name, int(link["ifindex"]), netns, int(link["mtu"]))
    if len(found) != 1:
        which = f"{' and '.join(found)} have" if found else "no interface has"
        choose = "; choose one with --interface" if found else ""
        raise ShapingError(f"{which} an address of {subnet}; there are {', '.join(seen)}{choose}")
    return next(iter(found.values()))


def look(interface: Interface, run: Run) -> Setting:
    """What is set on an interface. Reads only; without root the netfilter rules stay unseen."""
    netns, name, ifb = interface.netns, interface.name, interface.ifb
    qdiscs: list[dict[str, Any]] = json.loads(run(*tc(netns, "-j", "qdisc", "show")) or "[]")
    mine = [qdisc for qdisc in qdiscs if qdisc.get("dev") == name]
    led = any(qdisc.get("parent") == "ffff:fff1" for qdisc in mine)
    filters = run(*tc(netns, "filter", "show", "dev", name, "parent", "ffff:")) if led else ""
    links = json.loads(run(*ip(netns, "-j", "link", "show")) or "[]")
    device = any(link.get("ifname") == ifb for link in links)
    ingress = led and (ifb in filters or (device and not filters.strip()))  # or we were stopped in between
    foreign = []
    roots = [qdisc for qdisc in mine if qdisc.get("root") and qdisc["handle"] != _KERNEL]
    root = any(qdisc["handle"] in _HELD | _KEPT for qdisc in roots)
    if roots and not root:
        foreign.append(f"the qdisc {roots[0]['kind']} {roots[0]['handle']}")
    if led and not ingress:
        foreign.append("an ingress or clsact qdisc with filters of others")
    rules = _rules(interface, run)
    handles = {qdisc["handle"] for qdisc in qdiscs if qdisc.get("dev") in (name, ifb) and qdisc.get("root")}
    kept = bool(handles & _KEPT) or any(interface.tag(True) in rule for rule in rules)
    setting = Setting(
        out=_shape_of(mine) if root else Shape(),
        into=_shape_of([qdisc for qdisc in qdiscs if qdisc.get("dev") == ifb]) if ingress else Shape(),
        root=root,
        ingress=ingress,
        ifb=device,
        foreign=tuple(foreign),
        rules=rules,
    )
    return replace(setting, kept=kept) if setting.ours else setting


def shaped_interfaces(run: Run, netns: str | None = None) -> list[str]:
    """The names of interfaces on which something is ours."""
    names = [str(link["ifname"]) for link in json.loads(run(*ip(netns, "-j", "link", "show")) or "[]")]
    names = [name for name in names if not name.startswith(_IFB)]
    return [name for name in names if look(find(name, run, netns), run).ours]


def _rules(interface: Interface, run: Run) -> tuple[tuple[str, ...], ...]:
    found: list[tuple[str, ...]] = []
    tags = {interface.tag(True), interface.tag(False)}
    for program in TABLES:
        with contextlib.suppress(CommandError):  # not installed, or not for us: then there are none of ours
            for line in run(*iptables(interface.netns, "-S", program=program)).splitlines():
                words = shlex.split(line)
                if words[0] == "-A" and tags & set(words):
                    found.append((program, "-D", *words[1:]))
    return tuple(found)


def _shape_of(qdiscs: list[dict[str, Any]]) -> Shape:
    rate, delay, jitter, loss = None, 0.0, 0.0, 0.0
    for qdisc in qdiscs:
        options = qdisc.get("options", {})
        if qdisc["handle"] in _BUCKETS:
            rate = int(options["rate"]) * 8
        elif qdisc["kind"] == "netem":
            times = options.get("delay", {})
            delay, jitter = float(times.get("delay", 0)), float(times.get("jitter", 0))
            loss = float(options.get("loss-random", {}).get("loss", 0))
    return Shape(rate, delay, min(jitter, delay), loss)
