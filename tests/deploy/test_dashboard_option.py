"""What the command line makes of the dashboard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import deploy.dashboard
from coordinator.journal_folder import JournalFolder
from coordinator.tokens import TokenBook
from deploy.dashboard import DEFAULT, announce, watching
from deploy.errors import UserError
from protos.address import Address, AddressError

TOKEN = "an-admin-token-of-mine"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[JournalFolder]:
    values = {"run_digest": "run", "table_digest": "tables", "run_toml": "[run]\n"}
    with JournalFolder.open(tmp_path / "j", **values) as opened:
        yield opened


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy.dashboard, "installed", lambda: True)


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy.dashboard, "installed", lambda: False)


@pytest.mark.usefixtures("installed")
def test_by_default_it_is_for_this_machine() -> None:
    shown = watching(None)
    assert shown is not None and shown.listen == DEFAULT and not shown.exact


@pytest.mark.usefixtures("installed")
def test_as_chosen() -> None:
    shown = watching("0.0.0.0:8080", TOKEN)
    assert shown is not None and (shown.listen, shown.exact) == (Address("0.0.0.0", 8080), True)
    assert watching("off", TOKEN) is None
    with pytest.raises(AddressError):
        watching("everywhere", TOKEN)
    with pytest.raises(UserError, match="at least 16 characters"):
        watching(None, "short")


@pytest.mark.usefixtures("missing")
def test_without_its_packages() -> None:
    assert watching(None) is None
    with pytest.raises(UserError, match=r"pip install 'PATH\[dashboard\]'"):
        watching("127.0.0.1:0")


def test_what_is_said_of_it(folder: JournalFolder) -> None:
    said: list[str] = []
    book = TokenBook().given("admin", "admin", TOKEN, now=0.0)
    announce(Address("0.0.0.0", 8080), book, folder, said.append)
    announce(Address("::1", 8080), TokenBook(), folder, said.append)
    assert said[0] == "dashboard at http://localhost:8080/"
    assert "not encrypted" in said[1]
    command = f"an invite of 'atoll invite create {folder.path} --role admin'"
    assert said[2].endswith(f"expel nodes: the token admin, or {command}")
    assert said[3] == "dashboard at http://[::1]:8080/"
    assert said[4].endswith(f"expel nodes: {command}")
