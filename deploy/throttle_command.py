"""The commands `atoll throttle set`, `show`, `clear` and `run`."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from deploy.options import Json

if TYPE_CHECKING:
    from deploy.links.interface import Interface
    from deploy.links.named import Link
    from deploy.links.shape import Shape

_LOOK_SECONDS: Final = 1.0

throttle_app = typer.Typer(
    no_args_is_help=True,
    help="Shape a network interface of this machine: rate, delay, jitter, loss. Linux, root.",
)

_Interface = Annotated[
    str | None, typer.Option("--interface", "-i", metavar="NAME", help="The interface, by its name.")
]
_Subnet = Annotated[
    str | None,
    typer.Option(metavar="CIDR", help="The interface that has an address of it, as in 10.90.0.0/24."),
]
_Netns = Annotated[
    str | None, typer.Option(metavar="NAME", help="Network namespace, by name or path; else this one.")
]
_Rate = Annotated[str, typer.Option(metavar="RATE", help="As in 10gbit, 100mbit, '1.5 Mbit/s'.")]
_Delay = Annotated[str, typer.Option(metavar="TIME", help="One way, as in 40ms.")]
_Jitter = Annotated[str, typer.Option(metavar="TIME", help="By which the delay varies, either way.")]
_Loss = Annotated[str, typer.Option(metavar="SHARE", help="Of the packets, as in 0.5%.")]
_Direction = Annotated[str, typer.Option(metavar="out|in|both", help="Which way; each is shaped alike.")]
_Links = Annotated[
    Path, typer.Option(metavar="FILE", help='Named links, TOML: [site-a], interface = "eth1", rate = ...')
]
_Names = Annotated[
    list[str] | None,
    typer.Option("--link", metavar="NAME", help="A link of that file. May be given several times."),
]
_Replace = Annotated[
    bool, typer.Option("--replace", help="Take the place of a qdisc of somebody else; it is not put back.")
]
_Print = Annotated[bool, typer.Option("--print", help="Print the commands instead of running them.")]
_LINKS = Path("links.toml")


@throttle_app.command(
    "set", epilog="Example: atoll throttle set --interface eth1 --rate 100mbit --delay 40ms --direction out"
)
def set_(
    interface: _Interface = None,
    subnet: _Subnet = None,
    netns: _Netns = None,
    rate: _Rate = "",
    delay: _Delay = "",
    jitter: _Jitter = "",
    loss: _Loss = "",
    direction: _Direction = "both",
    links: _Links = _LINKS,
    link: _Names = None,
    replace: _Replace = False,
    dry: _Print = False,
) -> None:
    """Shape an interface until it is cleared. The direction that is not named stays as it is."""
    from deploy.links.dry import Dry
    from deploy.links.shaping import current, shape

    given, means = locals(), _means()
    for chosen in _chosen(links, link, given):
        place = chosen.find(means["run"])
        out, into = chosen.shapes(current(place.name, netns=place.netns, **means))
        if dry:
            means = Dry(typer.echo, **means).means()
        shaped = shape(place.name, out, into, netns=place.netns, replace=replace, kept=True, **means)
        if dry:
            continue
        _tell(shaped.notes, f"{place}: {_both(shaped.out, shaped.into)}; 'atoll throttle clear' undoes it")


@throttle_app.command("show", epilog="Example: atoll throttle show --json")
def show(
    interface: _Interface = None, subnet: _Subnet = None, netns: _Netns = None, as_json: Json = False
) -> None:
    """Show what is set on an interface, or on all that are shaped."""
    from deploy.links.interface import find, shaped_interfaces
    from deploy.links.named import Link
    from deploy.links.shape import OPEN

    execute = _means()["run"]
    if interface is None and subnet is None:
        places = [find(name, execute, netns) for name in shaped_interfaces(execute, netns)]
    else:
        places = [Link(OPEN, interface=interface, subnet=subnet, netns=netns).find(execute)]
    described = [_describe(place) for place in places]
    if as_json:
        typer.echo(json.dumps({"links": described}, allow_nan=False))
        return
    for entry in described:
        typer.echo(f"{entry['interface']}: {entry['words']}")
    if not described:
        typer.echo("no interface is shaped")


@throttle_app.command("clear", epilog="Example: atoll throttle clear --interface eth1")
def clear(
    interface: _Interface = None,
    subnet: _Subnet = None,
    netns: _Netns = None,
    links: _Links = _LINKS,
    link: _Names = None,
) -> None:
    """Take away what `set` has set, or what a `run` that was killed has left."""
    from deploy.links import shaping
    from deploy.links.named import Link, choose
    from deploy.links.shape import OPEN

    means = _means()
    places = choose(links, link) if link else [Link(OPEN, interface=interface, subnet=subnet, netns=netns)]
    for place in (place.find(means["run"]) for place in places):
        was = _describe(place)["words"]
        if shaping.clear(place.name, netns=place.netns, **means):
            typer.echo(f"{place}: cleared; it was {was}")
        else:
            typer.echo(f"{place}: nothing of ours was set")


@throttle_app.command(
    "run",
    epilog="Example: atoll throttle run --interface eth1 --rate 20mbit --delay 30ms -- atoll join atoll://…",
)
def run(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND...]", help="Run it, and hold the shape until it ends."),
    ] = None,
    interface: _Interface = None,
    subnet: _Subnet = None,
    netns: _Netns = None,
    rate: _Rate = "",
    delay: _Delay = "",
    jitter: _Jitter = "",
    loss: _Loss = "",
    direction: _Direction = "both",
    links: _Links = _LINKS,
    link: _Names = None,
    replace: _Replace = False,
    for_: Annotated[
        str, typer.Option("--for", metavar="TIME", help="How long, as in 10m; else until Ctrl-C.")
    ] = "",
) -> None:
    """Shape an interface until Ctrl-C, or until a command ends, and undo it then."""
    from deploy.links.shaping import shape
    from deploy.processes import unwinding_signals
    from protos.units import parse_duration

    given, means = locals(), _means()
    seconds = parse_duration(for_) if for_ else None
    with unwinding_signals(), contextlib.ExitStack() as held:
        for chosen in _chosen(links, link, given):
            place = chosen.find(means["run"])
            out, into = chosen.shapes()
            shaped = shape(place.name, out, into, netns=place.netns, replace=replace, **means)
            held.enter_context(shaped)
            until = f"until {command[0]} ends" if command else f"for {for_}" if for_ else "until Ctrl-C"
            _tell(shaped.notes, f"{place}: {_both(shaped.out, shaped.into)}, {until}")
        code = _follow(command, seconds) if command else _wait(seconds)
    if code:
        raise typer.Exit(code)


def _means() -> dict[str, Any]:
    """What commands are run with, and the processes that delay packets."""
    from deploy.links.commands import run_command
    from deploy.links.shaping import PROCESSES

    return {"run": run_command, "delays": PROCESSES}


def _chosen(links: Path, names: list[str] | None, given: dict[str, Any]) -> list[Link]:
    """The links that a command line names, by their names or one by its values."""
    from deploy.links.commands import ShapingError
    from deploy.links.named import choose, make

    values = {key: given[key] for key in ("interface", "subnet", "netns", "rate", "delay", "jitter", "loss")}
    if not names:
        return [make({**values, "direction": given["direction"]}, "throttle")]
    if any(values.values()):
        raise ShapingError("--link takes everything from the file; leave the other options out")
    return choose(links, names)


def _describe(place: Interface) -> dict[str, Any]:
    from deploy.links.interface import look
    from deploy.links.shaping import shapes

    means = _means()
    setting = look(place, means["run"])
    out, into = shapes(place, setting, means["delays"])
    pid = means["delays"].holder(place)
    left = bool(setting.ours and not setting.kept and pid is None)
    words = _both(out, into)
    if setting.rules and means["delays"].ask(place) is None:
        words += "; the process that delays packets is gone, they pass at once"
    if pid is not None:
        words += f"; held by process {pid}"
    elif left:
        words += "; left by a process that was killed: 'atoll throttle clear' takes it away"
    return {
        "interface": place.name,
        "netns": place.netns,
        "out": vars(out),
        "in": vars(into),
        "kept": bool(setting.kept),
        "holder": pid,
        "left_over": left,
        "words": words,
    }


def _both(out: Shape, into: Shape) -> str:
    if not out and not into:
        return "not shaped"
    return f"{out} both ways" if out == into else f"out: {out}; in: {into}"


def _tell(notes: Sequence[str], line: str) -> None:
    for text in (*(f"note: {note}" for note in notes), line):
        typer.echo(text, err=True)


def _wait(seconds: float | None) -> int:
    never, end = threading.Event(), time.monotonic() + (math.inf if seconds is None else seconds)
    while (left := end - time.monotonic()) > 0:  # a signal that comes just before a wait is seen after it
        never.wait(min(left, _LOOK_SECONDS))
    return 0


def _follow(command: list[str], seconds: float | None) -> int:
    """The exit code of a command, which is ended when we are told to end, or its time is up."""
    process = subprocess.Popen(command)
    with _ending(process):
        try:
            # With a deadline it looks again and again, and sees a signal that came just before.
            code = process.wait(threading.TIMEOUT_MAX if seconds is None else seconds)
        except subprocess.TimeoutExpired:
            return 0
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _ending(process: subprocess.Popen[bytes], grace: float = 10.0) -> Iterator[None]:
    try:
        yield
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(grace)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
