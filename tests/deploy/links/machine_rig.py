"""A machine that knows `ip`, `tc` and `iptables` as far as links need them, and its processes."""

from __future__ import annotations

import json
import shlex
from typing import Any

from deploy.links.commands import CommandError
from deploy.links.delays import Lines, held_by
from deploy.links.interface import Interface

UNKNOWN_KIND = "Error: Specified qdisc kind is unknown."
UNKNOWN_TYPE = "Error: Unknown device type."


class Machine:
    """Runs commands on its own state; ``lacks`` names kinds of qdiscs and devices, and programs."""

    def __init__(self, *lacks: str, root: bool = True) -> None:
        self.lacks, self.root = set(lacks), root
        self.links: dict[str, int] = {"lo": 1, "eth0": 2, "eth1": 3}
        self.addresses = {"lo": "127.0.0.1", "eth0": "192.0.2.5", "eth1": "10.90.0.7"}
        self.qdiscs: list[dict[str, Any]] = []
        self.filters: dict[str, str] = {}
        self.rules: dict[str, list[str]] = {"iptables": [], "ip6tables": []}
        self.ran: list[str] = []
        self.fails: str | None = None  # a command that has this text in it

    @property
    def bare(self) -> bool:
        """Whether nothing is left of all that was done."""
        nothing = not self.qdiscs and not self.filters and not any(self.rules.values())
        return nothing and set(self.links) == {"lo", "eth0", "eth1"}

    def add_qdisc(self, dev: str, kind: str, handle: str) -> None:
        """As somebody else does."""
        self.qdiscs.append({"dev": dev, "kind": kind, "handle": handle, "root": True, "options": {}})

    def __call__(self, *words: str) -> str:
        if words[0] == "nsenter":
            words = words[2:]
        program, arguments = words[0], list(words[1:])
        if program in self.lacks:
            raise CommandError(words, "not found")
        reading = "show" in arguments or "-S" in arguments
        if not reading:
            self.ran.append(" ".join(words))
            if not self.root:
                raise CommandError(words, "RTNETLINK answers: Operation not permitted")
            if self.fails is not None and self.fails in self.ran[-1]:
                raise CommandError(words, "broken")
        answer = {"ip": self._ip, "tc": self._tc}.get(program)
        return answer(words, arguments) if answer else self._tables(words, arguments)

    def _ip(self, words: tuple[str, ...], arguments: list[str]) -> str:
        if "show" in arguments:
            return json.dumps(
                [
                    {
                        "ifname": name,
                        "ifindex": index,
                        "mtu": 1500,
                        "addr_info": [{"local": self.addresses[name]}] if name in self.addresses else [],
                    }
                    for name, index in self.links.items()
                ]
            )
        match arguments:
            case ["link", "add", "name", name, "type", kind]:
                if kind in self.lacks:
                    raise CommandError(words, UNKNOWN_TYPE)
                assert name not in self.links
                self.links[name] = max(self.links.values()) + 1
            case ["link", "set", "dev", name, "up"]:
                assert name in self.links
            case ["link", "del", "dev", name]:
                del self.links[name]
                self.qdiscs = [qdisc for qdisc in self.qdiscs if qdisc["dev"] != name]
            case _:
                raise AssertionError(words)
        return ""

    def _tc(self, words: tuple[str, ...], arguments: list[str]) -> str:
        match arguments:
            case ["-j", "qdisc", "show"]:
                defaults = [
                    {"dev": name, "kind": "noqueue", "handle": "0:", "root": True, "options": {}}
                    for name in self.links
                    if not any(qdisc["dev"] == name and qdisc.get("root") for qdisc in self.qdiscs)
                ]
                return json.dumps(defaults + self.qdiscs)
            case ["filter", "show", "dev", name, "parent", "ffff:"]:
                return self.filters.get(name, "")
            case ["filter", "add", "dev", name, "parent", "ffff:", *_, target]:
                assert target in self.links
                self.filters[name] = f"action order 1: mirred (Egress Redirect to device {target})"
            case ["qdisc", "add", "dev", name, "handle", "ffff:", "ingress"]:
                self.qdiscs.append({"dev": name, "kind": "ingress", "handle": "ffff:", "parent": "ffff:fff1"})
            case ["qdisc", "del", "dev", name, "ingress"]:
                self._delete(words, name, lambda qdisc: qdisc.get("parent") == "ffff:fff1")
                self.filters.pop(name, None)
            case ["qdisc", "del", "dev", name, "root"]:
                self._delete(words, name, lambda qdisc: qdisc.get("parent") != "ffff:fff1")
            case ["qdisc", verb, "dev", name, *rest]:
                self._set_qdisc(words, verb, name, rest)
            case _:
                raise AssertionError(words)
        return ""

    def _delete(self, words: tuple[str, ...], name: str, chosen: Any) -> None:
        left = [qdisc for qdisc in self.qdiscs if qdisc["dev"] != name or not chosen(qdisc)]
        if len(left) == len(self.qdiscs):
            raise CommandError(words, "Error: Cannot delete qdisc with handle of zero.")
        self.qdiscs = left

    def _set_qdisc(self, words: tuple[str, ...], verb: str, name: str, rest: list[str]) -> None:
        assert name in self.links
        place: dict[str, Any] = {"root": True} if rest[0] == "root" else {"parent": rest[1]}
        rest = rest[1:] if rest[0] == "root" else rest[2:]
        handle = "8001:"
        if rest[0] == "handle":
            handle, rest = rest[1], rest[2:]
        kind, options = rest[0], rest[1:]
        if kind in self.lacks:
            raise CommandError(words, UNKNOWN_KIND)
        there = [qdisc for qdisc in self.qdiscs if qdisc["dev"] == name and place.items() <= qdisc.items()]
        if verb == "add":
            assert not there, words
        elif verb == "change":
            assert [(qdisc["kind"], qdisc["handle"]) for qdisc in there] == [(kind, handle)], words
            waiting = min(there[0]["options"].get("burst", 0), 70_000)  # a packet so large may be in front
            assert kind != "tbf" or int(options[3]) >= waiting, "this packet would stay there for ever"
        if "parent" in place:
            assert any(qdisc["handle"] == f"{place['parent'][:-1]}" for qdisc in self.qdiscs), words
        self.qdiscs = [qdisc for qdisc in self.qdiscs if qdisc not in there]
        entry = {"dev": name, "kind": kind, "handle": handle, **place, "options": _options(kind, options)}
        self.qdiscs.append(entry)

    def _tables(self, words: tuple[str, ...], arguments: list[str]) -> str:
        assert arguments[:3] == ["-w", "-t", "mangle"]
        rules = self.rules[words[0]]
        if "NFQUEUE" in self.lacks and "NFQUEUE" in arguments:
            raise CommandError(words, "iptables: No chain/target/match by that name.")
        match arguments[3:]:
            case ["-S"]:
                return "\n".join(["-P INPUT ACCEPT", *(f"-A {rule}" for rule in rules)])
            case ["-A", *rule]:
                if not rule[0].startswith("atoll-probe"):
                    rules.append(shlex.join(rule))
            case ["-D", *rule]:
                rules.remove(shlex.join(rule))
            case ["-N" | "-F" | "-X", _]:
                pass
            case _:
                raise AssertionError(words)
        return ""


class FakeDelays:
    """Processes that delay packets, as :class:`deploy.links.delays.Delays`; they outlive their owner here."""

    def __init__(self) -> None:
        self.running: dict[Interface, Lines] = {}
        self.holders: dict[Interface, int] = {}
        self.started: list[bool] = []

    def start(self, interface: Interface, lines: Lines, owned: bool) -> str:
        assert interface not in self.running
        self.running[interface] = dict(lines)
        self.started.append(owned)
        return "real time"

    def ask(self, interface: Interface, lines: Lines | None = None, end: bool = False) -> Lines | None:
        if interface not in self.running:
            return None
        self.running[interface] = {**self.running[interface], **(lines or {})}
        return self.running.pop(interface) if end else self.running[interface]

    def hold(self, interface: Interface) -> Held:
        if interface in self.holders:
            raise held_by(self.holders[interface], interface)
        self.holders[interface] = 77
        return Held(self, interface)

    def holder(self, interface: Interface) -> int | None:
        return self.holders.get(interface)

    def kill(self, owner: bool = True) -> None:
        """What SIGKILL of the holder does to its sign and to the process it owns."""
        self.holders.clear()
        if owner:
            self.running.clear()


class Held:
    def __init__(self, delays: FakeDelays, interface: Interface) -> None:
        self._delays, self._interface = delays, interface

    def close(self) -> None:
        self._delays.holders.pop(self._interface, None)


def _options(kind: str, options: list[str]) -> dict[str, Any]:
    if kind == "tbf":
        assert options[0] == "rate" and options[1].endswith("bit")
        return {"rate": int(options[1][:-3]) // 8, "burst": int(options[3])}
    if kind == "netem":  # as tc of iproute2 prints it
        values: dict[str, Any] = {"limit": int(options[1])}
        rest = options[2:]
        if rest[:1] == ["delay"]:
            times = [float(word[:-2]) / 1e6 for word in rest[1:3] if word.endswith("us")]
            values["delay"] = {"delay": times[0], "jitter": times[1] if len(times) > 1 else 0.0}
            rest = rest[1 + len(times) :]
        if rest[:1] == ["loss"]:
            values["loss-random"] = {"loss": float(rest[1][:-1]) / 100}
            rest = rest[2:]
        assert not rest, options
        return values
    return {}
