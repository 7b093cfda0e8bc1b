"""The commands `atoll testbed …`: a run of several sites on this machine, and changes of its links."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.options import Json, MethodOption, Sets
from deploy.terminal import console

EXAMPLES = (
    "Examples: sudo atoll testbed --sites 3 --rate 100mbit --delay 40ms --method muloco\n\n"
    "sudo atoll testbed link site-b --down   # from another terminal"
)

testbed_app = typer.Typer(
    invoke_without_command=True,
    rich_markup_mode=None,
    epilog=EXAMPLES,
    subcommand_metavar="[link|show]",
)

_TimeFromNow = Annotated[str, typer.Option(metavar="TIME", help="From now on, one way.")]
BedOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Which test bed, if several run: that of this --out."),
]


@testbed_app.callback()
def testbed(
    context: typer.Context,
    sites: Annotated[int, typer.Option(min=1, max=200, help="Sites, each behind its own link.")] = 3,
    rate: Annotated[
        str, typer.Option(metavar="RATE", help="Of each site's link, both ways: 10gbit, 100mbit, unlimited.")
    ] = "10gbit",
    delay: Annotated[str, typer.Option(metavar="TIME", help="Of each site's link, one way.")] = "40ms",
    jitter: Annotated[str, typer.Option(metavar="TIME", help="By which the delay varies, one way.")] = "",
    loss: Annotated[str, typer.Option(metavar="SHARE", help="Of the packets, one way: 1%.")] = "",
    site: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=RATE[,delay=TIME][,loss=SHARE]",
            help="Another link for one site: site-b=100mbit,delay=5ms. May be given several times.",
        ),
    ] = None,
    hub: Annotated[
        str, typer.Option(metavar="RATE", help="The coordinator's link, both ways; unlimited if not given.")
    ] = "",
    nat: Annotated[
        bool, typer.Option("--nat", help="Each site behind a router that translates addresses.")
    ] = False,
    nat_kind: Annotated[
        str, typer.Option(metavar="KIND", help="port-preserving (as with --nat alone) or symmetric.")
    ] = "",
    nodes_per_site: Annotated[int, typer.Option(min=1, max=64, help="Node processes of each site.")] = 1,
    ranks: Annotated[int, typer.Option(min=1, max=64, help="Ranks of each node.")] = 1,
    method: MethodOption = "sign-muon",
    model: Annotated[str, typer.Option(metavar="hf:FOLDER", help="A Transformers model (extra 'hf').")] = "",
    size: Annotated[str, typer.Option(metavar="N", help="Parameters of a decoder instead, such as 5M.")] = "",
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds to train; 128 steps of each node if not given.")
    ] = None,
    script: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TOML: changes of links at given times or rounds.")
    ] = None,
    probe: Annotated[bool, typer.Option(help="Measure the links first, and refuse if they are off.")] = True,
    plain: Annotated[
        bool, typer.Option("--plain", help="Plain processes without links, also where root could make some.")
    ] = False,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Logs, events and numbers go there.")] = Path(
        "atoll-testbed"
    ),
    set_: Sets = None,
    as_json: Json = False,
) -> None:
    """Train between sites on this machine: network namespaces behind links of given rate and delay.

    Needs root and Linux; elsewhere plain processes train without links.
    """
    if context.invoked_subcommand is not None:
        return
    from deploy.preset import merged
    from deploy.processes import unwinding_signals
    from deploy.testbed.bed import Bed
    from deploy.testbed.nat import KINDS
    from deploy.testbed.results import write
    from deploy.testbed.setting import Options

    options = Options(
        out=out,
        sites=sites,
        rate=rate,
        delay=delay,
        jitter=jitter,
        loss=loss,
        own=tuple(site or ()),
        hub=hub,
        nat=nat_kind or (KINDS[0] if nat else ""),
        nodes_per_site=nodes_per_site,
        ranks=ranks,
        method=method,
        model=model,
        size=size,
        rounds=rounds,
        values=merged({}, set_ or []),
        plain=plain,
        probe=probe,
        script=script,
    )
    bed = Bed(options, console(stderr=as_json))
    with unwinding_signals():
        results = bed.run()
    if as_json:
        typer.echo(write(results, indent=None), nl=False)
    else:
        bed.show(results)
    if not results.agreement.holds:
        raise typer.Exit(1)


@testbed_app.command("link", epilog="Example: atoll testbed link site-b --rate 10mbit --delay 200ms")
def link(
    name: Annotated[str, typer.Argument(metavar="NAME", help="site-a, site-b, … or coordinator.")],
    down: Annotated[bool, typer.Option("--down", help="Cut it.")] = False,
    up: Annotated[bool, typer.Option("--up", help="Heal it.")] = False,
    rate: Annotated[str, typer.Option(metavar="RATE", help="From now on, both ways.")] = "",
    delay: _TimeFromNow = "",
    jitter: _TimeFromNow = "",
    loss: Annotated[str, typer.Option(metavar="SHARE", help="From now on, one way.")] = "",
    reset: Annotated[bool, typer.Option("--reset", help="Back to its shape at the start.")] = False,
    out: BedOption = None,
) -> None:
    """Cut, heal or degrade a link of the test bed that runs."""
    from deploy.errors import UserError
    from deploy.testbed.change import Change

    if up and down:
        raise UserError("--up and --down: one of them")
    change = Change(
        name,
        up=True if up else False if down else None,
        rate=rate,
        delay=delay,
        jitter=jitter,
        loss=loss,
        reset=reset,
    )
    typer.echo(_ask(out, {"do": "change", "change": change.to_json()})["text"])


@testbed_app.command("show", epilog="Example: atoll testbed show --json")
def show(out: BedOption = None, as_json: Json = False) -> None:
    """Show the links of the test bed that runs, and how far it is."""
    from protos.units import format_rate

    reply = _ask(out, {"do": "show"})
    del reply["ok"]
    if as_json:
        typer.echo(json.dumps(reply, allow_nan=False))
        return
    typer.echo(f"round {reply['round']} of {reply['rounds']}, {reply['phase']}; {reply['out']}")
    if reply["plain"]:
        typer.echo(f"no links: {reply['plain']}")
    for name, one in reply["links"].items():
        up, down = map(format_rate, one["bits_per_second"])
        typer.echo(f"{name}: {one['text']}; now {up} up, {down} down")


def _ask(out: Path | None, request: dict[str, Any]) -> dict[str, Any]:
    from deploy.testbed.control import ask
    from deploy.testbed.home import find

    return ask(find(out), request)
