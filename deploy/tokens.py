"""The tokens of a coordinator on a machine: the book in its folder, and the invites that come of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from coordinator.token_file import TokenFile
from coordinator.tokens import DEFAULT, TokenError
from coordinator.whole_file import write_whole
from protos.address import Address
from protos.invite import Invite, InviteError, check_token, new_token

ADMIN: Final = "admin"  # the token that --admin-token gives
WHERE: Final = "where.json"  # in the coordinator's folder: an invite without its token
_MAX_BYTES: Final = 1 << 14
_ANY_TOKEN: Final = "x"


def prepared(
    folder: Path,
    *,
    token: str | None,
    admin_token: str | None,
    invite: bool,
    now: Callable[[], float] = time.time,
) -> tuple[TokenFile, str]:
    """The book of a coordinator that begins, and the secret for its invite; empty: those that were made
    before are valid, and there is none to show.

    Args:
        folder: of the coordinator.
        token, admin_token: chosen by the owner; another default, or admin token, is valid no more.
        invite: whether there has to be one to show.

    Raises:
        InviteError: a token that cannot stand in an invite.
        TokenError: the book cannot be used, or a token that is given is valid no more.
    """
    file, secret = TokenFile(folder), token or ""
    if token is not None:
        check_token(token)
        file.edit(lambda book: book.given(DEFAULT, "node", token, now=now()))
    elif invite or not any(one.role == "node" and not one.ended(now()) for one in file.book.tokens):
        secret = new_token()
        file.edit(lambda book: book.added(book.free_name(DEFAULT), "node", secret, now=now()))
    if admin_token is not None:
        file.edit(lambda book: book.given(ADMIN, "admin", admin_token, now=now()))
    return file, secret


def keep_where(folder: Path, invite: Invite) -> None:
    """Note how the coordinator of this folder is reached, for further invites."""
    values = {key: value for key, value in asdict(invite).items() if key != "token"}
    write_whole(folder / WHERE, json.dumps(values) + "\n", 0o644)


def invite_to(folder: Path, secret: str, address: Address | None = None) -> Invite:
    """An invite with ``secret`` to the coordinator of a folder, by ``address`` if it is given.

    Raises:
        TokenError: no coordinator has been started with the folder, or its note is damaged.
        InviteError: the address cannot stand in one.
    """
    path = folder / WHERE
    try:
        values = json.loads(path.read_bytes()[:_MAX_BYTES])
        known = Invite(token=_ANY_TOKEN, **values)
    except FileNotFoundError:
        raise TokenError(
            f"no coordinator has been started with {folder} yet, so it is not known how nodes reach it: "
            f"start "
            "it once, or name its folder (--journal of 'atoll coordinator')"
        ) from None
    except (ValueError, TypeError, InviteError) as error:
        raise TokenError(
            f"{path} cannot be read ({str(error)[:100]}): start the coordinator again, which writes it anew"
        ) from None
    where = known if address is None else replace(known, host=address.host, port=address.port)
    return replace(where, token=secret)
