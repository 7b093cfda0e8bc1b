"""`atoll invite`: what it prints, and what it does to the book."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.journal_folder import JournalFolder
from coordinator.token_file import TokenFile
from coordinator.tokens import ROLES, TokenError
from deploy.cli import app
from deploy.tokens import ADMIN, keep_where, prepared
from protos.invite import Invite, InviteError

PIN = "A" * 43


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "reef.journal"
    JournalFolder.open(path, run_digest="run", table_digest="tables", run_toml="[run]\n").close()
    return path


def invoke(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["invite", *arguments])
    assert result.exit_code == code, result.output
    return result.output if code else result.stdout


def test_an_invite_from_its_making_to_its_end(folder: Path) -> None:
    keep_where(folder, Invite("secret", "192.0.2.7", 4600, PIN))
    assert "secret" not in (folder / "where.json").read_text()
    made = json.loads(invoke("create", str(folder), "--name", "alice", "--expires", "7d", "--json"))
    invite = Invite.parse(made["invite"])
    assert (invite.host, invite.port, invite.pin) == ("192.0.2.7", 4600, PIN)
    assert (made["name"], made["role"], made["state"]) == ("alice", "node", "valid")
    assert made["expires"] - made["created"] == pytest.approx(7 * 86400)
    assert "digest" not in made and invite.token not in (folder / "tokens.json").read_text()
    (token,) = TokenFile(folder).book.tokens
    assert not TokenFile(folder).book.verdict(invite.token, ROLES, token.created).refusal

    second = Invite.parse(invoke("create", str(folder), "--role", "observer", "--address", "[::1]:4700"))
    assert (second.host, second.port, second.pin) == ("::1", 4700, PIN)
    assert invoke("revoke", str(folder), "alice") == "revoked: alice\n"
    listed = json.loads(invoke("list", str(folder), "--json"))
    assert [(one["name"], one["role"], one["state"]) for one in listed] == [
        ("alice", "node", "revoked"),
        ("observer", "observer", "valid"),
    ]
    table = invoke("list", str(folder))
    assert "alice" in table and "revoked" in table and second.token not in table


def test_what_it_refuses(folder: Path, tmp_path: Path) -> None:
    assert "is not the folder of a coordinator" in invoke("list", str(tmp_path), code=12)
    assert "no coordinator has been started with" in invoke("create", str(folder), code=19)
    keep_where(folder, Invite("secret", "192.0.2.7", 4600))
    assert "--role is node, observer, admin" in invoke("create", str(folder), "--role", "king", code=12)
    assert "there is no token 'bob'" in invoke("revoke", str(folder), "bob", code=19)
    assert invoke("create", str(folder)).startswith("atoll+insecure://")
    assert "already" in invoke("create", str(folder), "--name", "node", code=19)
    (folder / "where.json").write_text('{"host": 7}')
    assert "start the coordinator again" in invoke("create", str(folder), code=19)
    (folder / "tokens.json").write_text("{")
    assert "all invites are void" in invoke("list", str(folder), code=19)


def test_help_shows_examples() -> None:
    for command in ("create", "list", "revoke"):
        assert f"atoll invite {command} reef.journal" in invoke(command, "--help")


def test_the_tokens_of_a_coordinator_that_begins(folder: Path) -> None:
    def names(file: TokenFile) -> list[str]:
        return [f"{token.name} {token.state(2.0)}" for token in file.book.tokens]

    def begun(
        token: str | None = None, admin: str | None = None, invite: bool = False
    ) -> tuple[TokenFile, str]:
        return prepared(folder, token=token, admin_token=admin, invite=invite, now=lambda: 1.0)

    file, first = begun()
    assert len(first) == 22 and names(file) == ["default valid"]
    assert begun()[1] == "", "the one before is valid"
    file, another = begun(invite=True)
    assert another not in ("", first) and names(file) == ["default valid", "default-2 valid"]
    file, secret = begun(token="chosen", admin="an-administrator")
    assert secret == "chosen" and names(file) == ["default-2 valid", "default valid", "admin valid"]
    assert file.book.verdict(first, ROLES, 2.0).refusal and not file.book.verdict(another, ROLES, 2.0).refusal
    file.edit(lambda book: book.revoked("default", 1.0).revoked("default-2", 1.0))
    with pytest.raises(TokenError, match="was revoked"):
        begun(token="chosen")
    assert begun()[1], "no node could join without a new one"
    with pytest.raises(InviteError):
        begun(token="not a token")
    assert file.book.named(ADMIN) is not None
