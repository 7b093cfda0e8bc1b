"""What the command line makes of the dashboard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import deploy.dashboard
from coordinator.journal_folder import JournalFolder
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
def test_by_default_it_is_for_this_machine(folder: JournalFolder) -> None:
    shown = watching(None, None, folder)
    assert shown is not None and shown.listen == DEFAULT and not shown.exact
    assert shown.token == folder.admin_token() == folder.admin_token_path.read_text().strip()
    assert shown.token not in repr(shown)


@pytest.mark.usefixtures("installed")
def test_as_chosen(folder: JournalFolder) -> None:
    shown = watching("0.0.0.0:8080", TOKEN, folder)
    assert shown is not None and (shown.listen, shown.exact) == (Address("0.0.0.0", 8080), True)
    assert shown.token == TOKEN and not folder.admin_token_path.exists()
    assert watching("off", TOKEN, folder) is None
    with pytest.raises(AddressError):
        watching("everywhere", TOKEN, folder)
    with pytest.raises(UserError, match="at least 16 characters"):
        watching(None, "short", folder)


@pytest.mark.usefixtures("missing")
def test_without_its_packages(folder: JournalFolder) -> None:
    assert watching(None, None, folder) is None
    with pytest.raises(UserError, match=r"pip install 'atoll\[dashboard\]'"):
        watching("127.0.0.1:0", None, folder)


def test_what_is_said_of_it(folder: JournalFolder) -> None:
    said: list[str] = []
    announce(Address("0.0.0.0", 8080), TOKEN, folder, said.append)
    announce(Address("::1", 8080), None, folder, said.append)
    assert said[0] == "dashboard at http://localhost:8080/"
    assert "not encrypted" in said[1]
    assert said[2].endswith("the admin token as given")
    assert said[3] == "dashboard at http://[::1]:8080/"
    assert said[4].endswith(f"the admin token in {folder.admin_token_path}")
