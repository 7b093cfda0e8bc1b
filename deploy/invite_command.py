"""`atoll invite`: tokens for nodes, observers and administrators of a run."""

from __future__ import annotations

import datetime
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.errors import UserError
from deploy.options import Json

Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="The coordinator's folder: its --journal, NAME.journal else.")
]

invite_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Make, list and revoke the invites of a run. A running coordinator heeds it within a second.",
)


@invite_app.command(
    "create",
    epilog="Examples: atoll invite create reef.journal --name alice --expires 7d\n\n"
    "atoll invite create reef.journal --role observer --json\n\n"
    "atoll invite create reef.journal --role admin",
)
def create(
    folder: Folder,
    name: Annotated[str | None, typer.Option(help="By which to revoke it; a new one if not given.")] = None,
    role: Annotated[
        str,
        typer.Option(
            help="node: takes part; observer: sees the status; admin: that, and orders at the dashboard."
        ),
    ] = "node",
    expires: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="For how long it is valid, as in 12h or 30d; else for good."),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where the coordinator is reached, if not as it says itself."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print a new invite. It cannot be shown again: only a digest of its token is kept."""
    from coordinator.token_file import TokenFile
    from coordinator.tokens import ROLES
    from deploy.tokens import invite_to
    from protos.address import Address
    from protos.invite import new_token
    from protos.units import parse_duration

    if role not in ROLES:
        raise UserError(f"--role is {', '.join(ROLES)}, not {role!r}")
    seconds = None if expires is None else parse_duration(expires)
    secret, now = new_token(), time.time()
    invite = invite_to(_journal(folder), secret, None if address is None else Address.parse(address))
    file = TokenFile(folder)
    book = file.edit(
        lambda book: book.added(name or book.free_name(role), role, secret, now=now, seconds=seconds)
    )
    token = book.tokens[-1]
    if as_json:
        typer.echo(json.dumps({"invite": str(invite), **_public(token, now)}))
    else:
        until = "until it is revoked" if token.expires is None else f"until {_time(token.expires)}"
        typer.echo(str(invite))
        typer.echo(f"token {token.name}, role {token.role}, valid {until}; it is not shown again", err=True)


@invite_app.command("list", epilog="Example: atoll invite list reef.journal")
def list_(folder: Folder, as_json: Json = False) -> None:
    """Show all tokens of a run: names, roles, and until when they are valid."""
    from rich.table import Table

    from coordinator.token_file import TokenFile
    from deploy.terminal import console

    tokens, now = TokenFile(_journal(folder)).book.tokens, time.time()
    if as_json:
        typer.echo(json.dumps([_public(token, now) for token in tokens]))
        return
    table = Table("name", "role", "state", "created", "expires", "revoked", box=None)
    for token in tokens:
        times = (_time(token.created), _time(token.expires), _time(token.revoked))
        table.add_row(token.name, token.role, token.state(now), *times)
    console().print(table)


@invite_app.command("revoke", epilog="Example: atoll invite revoke reef.journal alice")
def revoke(
    folder: Folder,
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Of tokens, as 'list' shows them.")],
    as_json: Json = False,
) -> None:
    """Make tokens void. Nodes that came with them are out within a round."""
    from coordinator.token_file import TokenFile
    from coordinator.tokens import TokenBook

    now = time.time()

    def change(book: TokenBook) -> TokenBook:
        for name in names:
            book = book.revoked(name, now)
        return book

    book = TokenFile(_journal(folder)).edit(change)
    if as_json:
        typer.echo(json.dumps([_public(book.named(name), now) for name in names]))
    else:
        typer.echo(f"revoked: {', '.join(names)}")


def _journal(folder: Path) -> Path:
    """The folder, if it is one of a coordinator.

    Raises:
        UserError: it is not.
    """
    from coordinator.journal_folder import DATABASE

    if not (folder / DATABASE).is_file():
        raise UserError(
            f"{folder} is not the folder of a coordinator: name that of its --journal, NAME.journal of the "
            "run's name if none was given"
        )
    return folder


def _public(token: Any, now: float) -> dict[str, Any]:
    """A token without its digest."""
    values = {key: value for key, value in asdict(token).items() if key != "digest"}
    return {**values, "state": token.state(now)}


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    when = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    return when.isoformat(sep=" ", timespec="seconds").replace("+00:00", "Z")
