"""The way from this machine to a coordinator and its nodes: what is known of it, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from deploy.doctor_facts import Connect, NetworkFacts
from deploy.finding import Finding
from node.exchange.trouble import Kind
from protos.units import format_duration, format_rate
from protos.version import version_of
from protos.wire import PROTOCOL

SLOW_LOOKUP: Final = 1.0  # seconds
FAR: Final = 0.5  # seconds of a round trip
SKEWED: Final = 2.0  # seconds
THIN: Final = 1e6  # bit/s


def names(facts: NetworkFacts) -> Iterator[Finding]:
    """Whether the host name leads anywhere."""
    host = facts.address.rpartition(":")[0].strip("[]")
    found = [lookup for lookup in facts.lookups if lookup.addresses]
    if not found:
        if facts.lookups:
            why = "; ".join(dict.fromkeys(f"{one.family}: {one.problem}" for one in facts.lookups))
            yield Finding(
                "bad",
                f"the host name {host!r} does not resolve ({why})",
                f"check its spelling in the invite, and this machine's DNS with 'getent hosts {host}'; the "
                "coordinator's --advertise HOST puts another name or an IP address into the invite",
            )
        return
    if all(one.addresses == (host,) for one in found):
        return  # an address, not a name
    texts = [f"{one.family} {', '.join(one.addresses)}" for one in found]
    seconds = max(one.seconds for one in found)
    text = f"{host} resolves to {' and '.join(texts)} in {format_duration(seconds)}"
    slow = seconds > SLOW_LOOKUP
    yield Finding(
        "warn" if slow else "ok",
        text,
        "the first name server of this machine may be dead: look at /etc/resolv.conf" if slow else "",
    )


def ports(facts: NetworkFacts) -> Iterator[Finding]:
    """Whether the coordinator's port takes connections."""
    open_, shut = _split(facts.connects)
    port = facts.address.rpartition(":")[2]
    if open_:
        best = min(open_, key=lambda one: one.seconds)
        yield Finding("ok", f"{best.address} takes connections, after {format_duration(best.seconds)}")
    for one in shut:
        if open_:
            yield Finding(
                "warn",
                f"{one.address} takes no connections: {one.problem}",
                "connecting tries it first and loses time: have the coordinator listen there too ([::] is "
                "both families), or take the address out of DNS",
            )
        else:
            yield Finding(
                "bad",
                f"{one.address} takes no connections: {one.problem}",
                f"see that the coordinator runs and listens on more than 127.0.0.1 (--listen 0.0.0.0:{port}) "
                f"and that firewalls and routers on the way let TCP port {port} through",
            )


_TROUBLES: Final[dict[Kind, str]] = {
    Kind.TOKEN: "ask for the run's present invite; its coordinator prints it (--invite-file keeps it)",
    Kind.STRANGER: "check the port in the invite; if it is right, install the coordinator's version of Atoll",
    Kind.CERTIFICATE: "compare with the invite that the coordinator prints, and use that from a safe source",
    Kind.PLAINTEXT: "ask the coordinator's owner whether it is meant to be without TLS, and for its invite",
    Kind.ENCRYPTED: "ask for the run's present invite; its coordinator prints it (--invite-file keeps it)",
    Kind.HANDSHAKE: "give the options --tls-… that the coordinator's owner asks for",
    Kind.NOBODY_LISTENS: "start the coordinator, or have the invite name the port that it prints",
    Kind.NAME: "check the spelling of the host, and this machine's DNS",
    Kind.UNREACHABLE: "open the coordinator's port in the firewalls on the way",
    Kind.FAULT: "the coordinator's log tells what failed",
    Kind.REFUSED: "do as it says",
    Kind.PROTOCOL: "install the same version of Atoll on both machines",
}
_OTHER_TROUBLE: Final = "try again; if it stays so, look at the coordinator's log and load"


def answers(facts: NetworkFacts) -> Iterator[Finding]:
    """What answers there, and how fast."""
    if facts.trouble is not None:
        kind, text = facts.trouble
        open_, shut = _split(facts.connects)
        if shut and not open_:
            return  # the ports' check has said it
        if facts.proxy and open_ and kind not in (Kind.TOKEN, Kind.REFUSED, Kind.FAULT):
            host = facts.address.rpartition(":")[0].strip("[]")
            yield Finding(
                "bad", text, f"calls go through {facts.proxy}: add {host} to no_proxy and try again"
            )
            return
        yield Finding("bad", text, _TROUBLES.get(kind, _OTHER_TROUBLE))
    answer = facts.answer
    if answer is None:
        return
    text = f"the coordinator answers within {format_duration(answer.round_trip)}"
    far = answer.round_trip > FAR
    yield Finding(
        "warn" if far else "ok",
        text,
        "so far away, more work a round (local_steps) makes up for the waiting" if far else "",
    )


def encryption(facts: NetworkFacts) -> Iterator[Finding]:
    """Whether the connection is protected."""
    if facts.answer is not None and facts.insecure:
        yield Finding(
            "warn",
            "the connection to the coordinator is insecure: nothing is encrypted, nothing proves who answers",
            "start the coordinator without --insecure, and give its nodes the invite that it prints then",
        )


def versions(facts: NetworkFacts) -> Iterator[Finding]:
    """Whether both sides understand each other."""
    answer = facts.answer
    if answer is None:
        return
    mine, its = version_of("atoll"), answer.version
    text = f"the coordinator has Atoll {its or '(not installed as a package)'}, protocol {answer.protocol}"
    if answer.protocol != PROTOCOL:
        yield Finding(
            "bad",
            f"{text}; this machine speaks protocol {PROTOCOL}",
            f"install the same version on both: here the wheel or the checkout of {its}"
            if its
            else "install the same source tree on both",
        )
    elif mine != its:
        yield Finding(
            "warn",
            f"{text}; this machine has {mine or 'a source tree'}",
            "they can talk, but only equal versions are sure to compute the same bits",
        )
    else:
        yield Finding("ok", text)


def clock(facts: NetworkFacts) -> Iterator[Finding]:
    """Whether both clocks agree."""
    answer = facts.answer
    if answer is None:
        return
    sure = answer.round_trip / 2
    side = "ahead of" if answer.skew > 0 else "behind"
    off = f"{format_duration(abs(answer.skew))} {side} the coordinator's (± {format_duration(sure)})"
    if abs(answer.skew) > SKEWED + sure:
        yield Finding(
            "warn",
            f"this machine's clock is {off}",
            "training does not mind, but logs of several machines come out in the wrong order: "
            "'timedatectl set-ntp true' on the one that is wrong",
        )
    else:
        yield Finding("ok", f"this machine's clock is {off}")


def translation(facts: NetworkFacts) -> Iterator[Finding]:
    """Whether a NAT stands in between, and whether other nodes can connect to this one."""
    if facts.answer is None:
        return
    seen, tried = facts.answer.host, facts.listening
    mine = sorted(own for own in facts.own if (":" in own) == (":" in seen))
    behind = _translated(facts, seen)
    here = ", ".join(mine)
    where = f"behind a NAT: {here} here, {seen} from outside" if behind else f"no NAT: it is seen as {seen}"
    if tried is None:
        yield Finding("ok", where)
    elif not tried.why_not:
        yield Finding("ok", f"{where}. Other nodes can connect to this machine, at {tried.address}")
    else:
        advice = (
            "forward a TCP port on the router to this machine and join with --peer-listen 0.0.0.0:PORT "
            "--peer-address HOST:PORT"
            if behind
            else "open a TCP port in this machine's firewall and join with --peer-listen 0.0.0.0:PORT"
        )
        text = f"{where}. Other nodes cannot connect to this machine: {tried.why_not}"
        if facts.answer.transport in ("hub", "swarm"):
            yield Finding("ok", f"{text}. This run does without")
        else:
            yield Finding(
                "warn",
                text,
                f"{advice} ('atoll doctor INVITE --peer-listen 0.0.0.0:PORT' tries it). As it is, what "
                "it exchanges goes out to nodes that can be reached, through the swarm or the coordinator",
            )


def mapping(facts: NetworkFacts) -> Iterator[Finding]:
    """Of which kind a NAT is: whether a local port looks the same from everywhere, so that others can be told
    where to meet it.

    That is the mapping of RFC 4787 (endpoint-independent, or not), for TCP (RFC 5382). What a NAT lets in is
    no part of it: :func:`translation` tries that.
    """
    if facts.answer is None or not facts.seen or not _translated(facts, facts.answer.host):
        return
    places = sorted({one.address for one in facts.seen})
    local, reached = facts.seen[0].local, facts.listening is not None and not facts.listening.why_not
    if len(facts.seen) < 2:
        keeps = places[0].rpartition(":")[2] == str(local)
        what = "keeps the port of a connection" if keeps else "gives connections other ports"
        yield Finding(
            "ok",
            f"the NAT {what} ({local} here, {places[0]} from outside); whether it is the same for all "
            "destinations shows as soon as a node of the run can be connected to",
        )
    elif len(places) == 1:
        yield Finding(
            "ok",
            f"the NAT is a cone for TCP: port {local} here is {places[0]} for {len(facts.seen)} "
            "destinations. Other nodes can meet this one by hole punching (transport = 'swarm' or 'auto')",
        )
    else:
        fine = reached or facts.answer.transport in ("hub", "direct")
        yield Finding(
            "ok" if fine else "warn",
            f"the NAT is symmetric for TCP: port {local} here is {' and '.join(places)}, another one for "
            "each destination. Hole punching does not get through it",
            ""
            if fine
            else "forward a port (see above), or let it be: a relay of the swarm or the coordinator carries "
            "what this machine exchanges with nodes that cannot be called either; the NAT may treat UDP "
            "(QUIC) otherwise",
        )


def bandwidth(facts: NetworkFacts) -> Iterator[Finding]:
    """What the link to the coordinator carries."""
    if facts.unmeasured:
        yield Finding("warn", f"the link was not measured: {facts.unmeasured}", "try again in some seconds")
    if facts.up is None or facts.down is None:
        return
    up, down = 8 * facts.up.per_second, 8 * facts.down.per_second
    if not (up and down):
        words = [f"{way} {format_rate(rate)}" for way, rate in (("up", up), ("down", down)) if rate]
        known = f"; {words[0]}" if words else ""
        if facts.up.held or facts.down.held:
            yield Finding(
                "warn",
                f"a round was being exchanged, which comes first: the link was not measured{known}",
                "try again between two rounds",
            )
        else:
            yield Finding(
                "warn",
                f"the link carries too little for a measurement{known}",
                "use another link, or a method that sends less: 'atoll plan --uplink RATE' computes it",
            )
        return
    least = "at least " if facts.up.held or facts.down.held else ""
    text = f"the link to the coordinator carries {least}{format_rate(up)} up and {format_rate(down)} down"
    thin = not least and min(up, down) < THIN
    yield Finding(
        "warn" if thin else "ok",
        text,
        f'\'atoll plan --uplink "{format_rate(up)}" --downlink "{format_rate(down)}"\' tells how long a '
        "round takes over it"
        if thin
        else "",
    )


def peers(facts: NetworkFacts) -> Iterator[Finding]:
    """Whether this machine can connect to the nodes that others can connect to."""
    fine = [one.address for one in facts.peers if not one.why_not]
    more = f" ({facts.more_peers} more were not tried)" if facts.more_peers else ""
    if fine:
        yield Finding("ok", f"nodes that can be connected to from here: {', '.join(fine)}{more}")
    for one in facts.peers:
        if one.why_not:
            yield Finding(
                "warn",
                f"the node at {one.address} cannot be connected to from here: {one.why_not}",
                "the coordinator reaches it: let this machine's firewall, and that node's, pass TCP to "
                f"{one.address}; meanwhile what both exchange takes the swarm or the coordinator",
            )


CHECKS: Final[tuple[Callable[[NetworkFacts], Iterable[Finding]], ...]] = (
    names,
    ports,
    answers,
    encryption,
    versions,
    clock,
    translation,
    mapping,
    bandwidth,
    peers,
)


def examine(facts: NetworkFacts) -> list[Finding]:
    """What all checks find, from the name to the nodes."""
    return [finding for check in CHECKS for finding in check(facts)]


def _translated(facts: NetworkFacts, seen: str) -> bool:
    """Whether an address of this machine, as seen from outside, is none of its own."""
    mine = [own for own in facts.own if (":" in own) == (":" in seen)]
    return bool(mine) and seen not in mine


def _split(connects: Iterable[Connect]) -> tuple[list[Connect], list[Connect]]:
    """Those that stood, and the others."""
    sorted_: tuple[list[Connect], list[Connect]] = ([], [])
    for one in connects:
        sorted_[bool(one.problem)].append(one)
    return sorted_
