"""The namespaces of a test bed and their links: a routed core, and a place behind each of its interfaces."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

from deploy.links.kernel import probe
from deploy.links.shape import Shape
from deploy.links.shaping import Shaped, shape
from deploy.testbed.change import Change, State
from deploy.testbed.layout import Layout, Link
from deploy.testbed.namespace import Namespace
from deploy.testbed.nat import masquerade

WAN: Final = "wan"  # an end's interface towards the core
LAN: Final = "lan"  # a gateway's interface towards its site
# Room for rate x delay: 10 Gbit/s with 100 ms.
_BUFFERS: Final = ("net.ipv4.tcp_rmem=4096 131072 134217728", "net.ipv4.tcp_wmem=4096 65536 134217728")


@dataclass(frozen=True)
class Counters:
    """What passed a link since it was made, in bytes with Ethernet's headers: as its end sees it."""

    sent: int
    received: int

    def since(self, before: Counters) -> Counters:
        """What has passed after ``before``."""
        return Counters(self.sent - before.sent, self.received - before.received)


class _Joined:
    """A link as it is: both ends, what shapes them, and its state."""

    def __init__(self, link: Link, end: Namespace) -> None:
        self.link, self.end = link, end
        self.shaped: list[Shaped] = []  # at the core, and at the end
        self.state = State(Shape())


class Network:
    """Namespaces and links of a layout. Use as a context manager; leaving it takes all of them down.

    Nothing has a name in the system, and nothing outside of its namespaces is touched: when this process
    ends, however that is, they end with it and with the processes in them.

    Attributes:
        core: the namespace in the middle, which has no addresses of sites behind NAT in its tables.

    Raises:
        NamespaceError: the system refuses one of the steps.
    """

    def __init__(self, layout: Layout, *, nat: str = "") -> None:
        self.layout = layout
        self._stack = ExitStack()
        self._joined: dict[str, _Joined] = {}
        self._places: dict[str, Namespace] = {}
        try:
            self.core = self._stack.enter_context(Namespace())
            self.core.run("sysctl", "-qw", "net.ipv4.ip_forward=1")
            self._kernel = probe(netns=self.core.path)
            for link in layout.links:
                self._join(link, nat)
        except BaseException:
            self.close()
            raise

    @property
    def notes(self) -> list[str]:
        """How the links are shaped, where that needs to be said."""
        kernel = self._kernel
        if kernel.netem is None or not any(joined.state.shape.held for joined in self._joined.values()):
            return []
        if kernel.nfqueue is None:
            return ["no netem in this kernel: delay, jitter and loss by NFQUEUE and a process for each link"]
        return [f"neither netem ({kernel.netem}) nor NFQUEUE ({kernel.nfqueue}): rates alone are set"]

    def place(self, name: str) -> Namespace:
        """Where the processes of a site, or the coordinator's, run."""
        return self._places[name]

    def gateway(self, name: str) -> Namespace:
        """What lies between a place and the core: the router of a site behind NAT, else the place itself."""
        return self._joined[name].end

    def state(self, name: str) -> State:
        """How a link is now."""
        return self._joined[name].state

    def shape(self, *, lossless: bool = False) -> None:
        """Give every link its shape; ``lossless`` leaves the loss out, which a probe of the rate needs."""
        for link in self.layout.shaped:
            asked = link.shape
            wanted = Shape(asked.rate, asked.delay, asked.jitter) if lossless else asked
            self._reshape(self._joined[link.name], wanted)

    def change(self, change: Change) -> State:
        """Cut, heal or reshape a link while it is used; returns its new state.

        Raises:
            UserError: no such link, or a text that cannot be read.
            ShapingError, NamespaceError: the system refuses.
        """
        joined = self._joined[self.layout.link(change.link).name]
        state = change.after(joined.state, State(joined.link.shape))
        if state.shape != joined.state.shape:
            self._reshape(joined, state.shape)
        if state.up != joined.state.up:
            # The core's end alone: at the other one the routes would be gone with the interface.
            self.core.run("ip", "link", "set", "dev", joined.link.name, "up" if state.up else "down")
        joined.state = state
        return state

    def counters(self) -> dict[str, Counters]:
        """What has passed every link so far."""
        # /proc/net would be that of the process's first thread.
        lines = self.core.call(lambda: _text("/proc/thread-self/net/dev")).splitlines()[2:]
        found = {name.strip(): values.split() for name, _, values in (line.partition(":") for line in lines)}
        return {
            link.name: Counters(sent=int(found[link.name][0]), received=int(found[link.name][8]))
            for link in self.layout.links
        }

    def close(self) -> None:
        """Undo the shaping, and let go of all namespaces."""
        for joined in self._joined.values():
            for shaped in joined.shaped:
                self._stack.callback(shaped.undo)
            joined.shaped = []
        self._stack.close()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _join(self, link: Link, nat: str) -> None:
        end = self._stack.enter_context(Namespace())
        addresses = link.addresses
        # Always with `dev` and `name`: a link called "a" would be read as "address".
        _pair(end, WAN, link.name, self.core)
        _address(self.core, link.name, addresses.router)
        _address(end, WAN, addresses.end)
        end.run("ip", "route", "add", "default", "via", addresses.router)
        place = end
        if addresses.inside is not None:
            place = self._stack.enter_context(Namespace())
            host, gateway = addresses.inside
            _pair(place, WAN, LAN, end)
            _address(end, LAN, gateway)
            _address(place, WAN, host)
            place.run("ip", "route", "add", "default", "via", gateway)
            end.run("sysctl", "-qw", "net.ipv4.ip_forward=1")
            masquerade(end, inside=LAN, outside=WAN, kind=nat)
        for setting in _BUFFERS:
            place.run("sysctl", "-qw", setting)
        self._joined[link.name] = _Joined(link, end)
        self._places[link.name] = place

    def _reshape(self, joined: _Joined, wanted: Shape) -> None:
        if wanted == joined.state.shape:
            return
        # A rate is exact where packets go out, so at both ends. What delays them is best in the middle, where
        # no TCP waits for its own queue, and one process can do it for both directions.
        rate = Shape(wanted.rate)
        core, end = (wanted, replace(wanted, rate=None)), (rate, None)
        if joined.shaped:
            for shaped, (out, into) in zip(joined.shaped, (core, end), strict=True):
                shaped.change(out, into)
        else:
            ends = ((joined.link.name, self.core, core), (WAN, joined.end, end))
            for interface, namespace, (out, into) in ends:
                shaped = shape(interface, out, into, netns=namespace.path, kernel=self._kernel)
                joined.shaped.append(shaped)
        joined.state = State(wanted, joined.state.up)


def _pair(end: Namespace, name: str, peer: str, other: Namespace) -> None:
    end.run("ip", "link", "add", "name", name, "type", "veth", "peer", "name", peer, "netns", other.path)


def _address(namespace: Namespace, interface: str, address: str) -> None:
    namespace.run("ip", "address", "add", f"{address}/24", "dev", interface)
    namespace.run("ip", "link", "set", "dev", interface, "up")


def _text(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()
