"""A site's gateway: it lets its site out under one address, and nobody in who was not asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from deploy.errors import UserError
from deploy.testbed.namespace import Namespace

KINDS: Final = ("port-preserving", "symmetric")


def masquerade(gateway: Namespace, *, inside: str, outside: str, kind: str = "") -> None:
    """Translate addresses in a gateway's namespace.

    Args:
        gateway: the namespace.
        inside, outside: its interfaces towards the site and towards the world.
        kind: ``port-preserving`` (default), as most routers at home do, which can be punched through, or
            ``symmetric``: another random port for each destination.

    Raises:
        UserError: another kind.
        NamespaceError: iptables is missing, or the kernel has no such rules.
    """
    for rule in rules(inside, outside, kind or KINDS[0]):
        gateway.run("iptables", *rule)


def rules(inside: str, outside: str, kind: str) -> Iterator[list[str]]:
    """The arguments of iptables for it."""
    if kind not in KINDS:
        raise UserError(f"NAT of the kind {kind!r}: there are {' and '.join(KINDS)}")
    random = ["--random-fully"] if kind == "symmetric" else []
    yield ["-t", "nat", "-A", "POSTROUTING", "-o", outside, "-j", "MASQUERADE", *random]
    back = ["-A", "FORWARD", "-i", outside, "-o", inside]
    yield [*back, "-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED", "-j", "ACCEPT"]
    yield [*back, "-j", "DROP"]
