"""The `atoll` command.

Each command imports what it needs when it runs: `atoll --help` loads neither torch nor grpc.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from deploy.audit_command import EXAMPLE as AUDIT
from deploy.audit_command import audit
from deploy.cli_island import island_app
from deploy.cli_node import address, join, train
from deploy.cli_plan import plan
from deploy.cli_run import run_app
from deploy.doctor_command import EXAMPLES as DOCTOR
from deploy.doctor_command import doctor
from deploy.errors import INTERRUPTED, UserError, exit_code, message
from deploy.export_command import EXAMPLES, export
from deploy.invite_command import invite_app
from deploy.options import (
    EventsOption,
    InviteText,
    JournalLogDirOption,
    Json,
    MethodOption,
    RunFilePath,
    Sets,
    TlsCaOption,
    TlsCertOption,
    TlsKeyOption,
)
from deploy.processes import follow_parent
from deploy.replay_command import EXAMPLE as REPLAY
from deploy.replay_command import replay
from deploy.terminal import console as _console
from deploy.testbed_command import testbed_app
from deploy.throttle_command import throttle_app
from deploy.timeline_command import EXAMPLE as TIMELINE
from deploy.timeline_command import timeline
from node.torchrun import leads


class Commands(TyperGroup):
    """Turns expected errors into a short text and their exit codes, and Ctrl-C into exit code 130."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            if leads():
                typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            text = message(error)
            if text is None:
                raise
            if ctx.params.get("debug"):
                traceback.print_exc()
            who = "atoll" if leads() else f"atoll, rank {os.environ['RANK']}"
            typer.echo(f"{who}: {text}", err=True)
            raise typer.Exit(exit_code(error)) from None


app = typer.Typer(
    name="atoll",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train one model across islands of GPUs joined by thin links.",
)
app.add_typer(run_app, name="run")
app.add_typer(invite_app, name="invite")
app.add_typer(island_app, name="island")
app.add_typer(testbed_app, name="testbed")
app.add_typer(throttle_app, name="throttle")


def _show_version(show: bool) -> None:
    if show:
        from protos.version import version_of

        number = version_of("atoll")
        typer.echo(f"atoll {number}" if number else "atoll, not installed as a package")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of errors, and debug logs.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    import logging

    logging.basicConfig(
        level=logging.DEBUG if debug else logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    # It tells of its font cache, in the middle of a command's output.
    logging.getLogger("matplotlib").setLevel(logging.DEBUG if debug else logging.ERROR)


@app.command(
    "coordinator",
    epilog="Example: atoll coordinator run.toml --listen 0.0.0.0:4600 --advertise gpu1.example.org",
)
def coordinator(
    file: RunFilePath,
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Instead of the run file's; port 0 takes a free one."),
    ] = None,
    advertise: Annotated[
        str | None, typer.Option(metavar="HOST", help="Name or address of this machine as nodes reach it.")
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where Prometheus metrics are served, or 'off'."),
    ] = None,
    dashboard: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where the dashboard is served, or 'off'; 127.0.0.1:4680, if not given and the extra "
            "'dashboard' is installed.",
        ),
    ] = None,
    admin_token: Annotated[
        str | None,
        typer.Option(
            envvar="ATOLL_ADMIN_TOKEN",
            help="Secret of an administrator, who pauses the run and expels nodes; see also 'atoll invite'.",
        ),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(envvar="ATOLL_TOKEN", help="Secret of the invite, instead of a random one."),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Neither encrypt nor prove to nodes who this is: anybody on the way can read and change "
            "what travels.",
        ),
    ] = False,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A certificate, PEM, instead of one made and kept with the journal."
        ),
    ] = None,
    tls_key: TlsKeyOption = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Take only nodes that show a certificate that this authority (PEM) has signed.",
        ),
    ] = None,
    invite_file: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Also write the invite there while the run is on.")
    ] = None,
    stay: Annotated[
        bool, typer.Option("--stay", help="Go on answering 'atoll status' after the run.")
    ] = False,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Wait for so many nodes before the first round, instead of the run file's number."
        ),
    ] = None,
    journal: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder in which the run is kept: started again with it, the coordinator goes on. "
            "NAME.journal, of the run's name, if not given; another folder begins the run anew.",
        ),
    ] = None,
    journal_size: Annotated[
        str, typer.Option(metavar="BYTES", help="How much of the rounds' results the journal keeps.")
    ] = "10GB",
    snapshot_every: Annotated[
        int,
        typer.Option(
            min=0,
            help="Rounds between two snapshots for newcomers; 0: when they cost less than results do.",
        ),
    ] = 0,
    events: EventsOption = None,
    log_dir: JournalLogDirOption = None,
    json_log: Annotated[bool, typer.Option("--json-log", help="Log lines as JSON objects.")] = False,
) -> None:
    """Coordinate a run; prints the invite for the nodes."""
    from protos.runfile import RunFile
    from protos.units import parse_bytes

    runfile = RunFile.load(file)
    from deploy import serving

    choices = serving.Choices(
        listen=address(listen),
        advertise=advertise,
        metrics=metrics,
        token=token,
        invite_file=invite_file,
        stay=stay,
        nodes=nodes,
        journal=journal,
        keep_bytes=parse_bytes(journal_size),
        snapshot_every=snapshot_every,
        events=events,
        log_dir=log_dir,
        dashboard=dashboard,
        admin_token=admin_token,
        insecure=insecure,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_client_ca=tls_client_ca,
    )
    if json_log:
        serving.log_as_json()
    code = serving.coordinate(runfile, choices, lambda line: typer.echo(line))
    if code:
        raise typer.Exit(code)


app.command(
    "join",
    epilog="Example: atoll join atoll://TOKEN@gpu1.example.org:4600/PIN --name reef --save checkpoints",
)(join)
app.command("train", epilog="Example: atoll train run.toml --save checkpoints --save-every 100")(train)


@app.command("demo", epilog="Example: atoll demo --rounds 100 --nodes 4 --no-baseline")
def demo(
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Logs, picture, numbers and checkpoint go there.")
    ] = Path("atoll-demo"),
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Rounds to train; if not given, as many as make 160, 256 or 128 steps of size S, M, L.",
        ),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, max=64, help="Node processes.")] = 3,
    method: MethodOption = "sign-muon",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of the coordinator; 0 takes a free one.")] = 0,
    baseline: Annotated[bool, typer.Option(help="Also train one Muon process on the same tokens.")] = True,
    size: Annotated[
        str, typer.Option(help="Of the model: S, M or L, 0.25, 2 or 11 million parameters.")
    ] = "S",
    set_: Sets = None,
    as_json: Json = False,
) -> None:
    """Train on this machine: a coordinator, some nodes, and one Muon process to compare with."""
    from deploy.demo import SIZES, Demo, Options
    from deploy.preset import merged
    from deploy.processes import unwinding_signals

    options = Options(
        out=out,
        nodes=nodes,
        rounds=rounds,
        method=method,
        port=port,
        baseline=baseline,
        size=size.upper(),
        values=merged({}, set_ or []),
    )
    if options.size not in SIZES:
        raise UserError(f"--size is {', '.join(SIZES)}, not {size!r}")
    console = _console(stderr=as_json)
    with unwinding_signals():
        run = Demo(options, console)
        results = run.run()
    if as_json:
        typer.echo(results.to_json())
    else:
        run.show(results)
    if not results.agreement.holds:
        raise typer.Exit(1)


@app.command(
    "compare", epilog="Example: atoll compare run.toml sign-muon muloco-1bit --seeds 3 --out compared"
)
def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Run files, or methods by name; these take everything else from the first file.",
        ),
    ],
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Seeds 0, 1, ... of weights and data.")] = 3,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens that all nodes of a run read together; those of the first file if not given."
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, max=1024, help="Processes, of one thread each.")] = 2,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Numbers and pictures go there; finished runs are kept.")
    ] = Path("atoll-compare"),
    set_: Sets = None,
    as_json: Json = False,
) -> None:
    """Simulate runs on equal tokens, and compare their losses and bytes. May be stopped and started again."""
    from deploy.compare_command import Options, compare_runs, show
    from deploy.preset import merged
    from deploy.processes import unwinding_signals

    options = Options(
        names=runs, out=out, seeds=seeds, tokens=tokens, jobs=jobs, values=merged({}, set_ or [])
    )
    with unwinding_signals():
        comparison = compare_runs(options, _console(stderr=True))
    if as_json:
        typer.echo(json.dumps(comparison.to_json(curves=False), allow_nan=False))
    else:
        show(comparison, out, _console())


app.command(
    "plan",
    epilog="Example: atoll plan --params 720M --nodes 8 --uplink 1gbit --step-time 2s",
)(plan)

app.command("export", epilog=EXAMPLES)(export)
app.command("timeline", epilog=TIMELINE)(timeline)
app.command("audit", epilog=AUDIT)(audit)
app.command("replay", epilog=REPLAY)(replay)
app.command("doctor", epilog=DOCTOR)(doctor)


@app.command("status", epilog="Example: atoll status atoll://TOKEN@gpu1.example.org:4600/PIN --watch")
def status(
    invite: InviteText,
    as_json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Follow the run until it ends.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks with --watch.")] = 1.0,
    tls_ca: TlsCaOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
) -> None:
    """Show how a run stands: roster, round, loss, bytes."""
    from deploy.invitation import client_tls, given
    from deploy.status import StatusClient, plain
    from deploy.table import status_view

    where = given(invite)
    with StatusClient(where, client_tls(where, tls_ca, tls_cert, tls_key)) as client:
        if watch:
            from deploy.watch import follow

            follow(client, _console(), every, as_json)
            return
        reply = client.fetch()
    if as_json:
        typer.echo(json.dumps(plain(reply), allow_nan=False))
    else:
        _console().print(status_view(reply))


def main() -> None:
    """Entry point of the console script."""
    follow_parent()
    atexit.register(gc.freeze)  # else the interpreter's end looks through all of torch, for seconds
    if os.environ.get("GRPC_VERBOSITY", "ERROR") == "ERROR":
        os.environ["GRPC_VERBOSITY"] = "NONE"  # its own lines repeat in its terms what our errors say
    try:
        app(prog_name="atoll")
    finally:
        # Ctrl-C while the interpreter winds up would only print a traceback of somebody's exit handler.
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
