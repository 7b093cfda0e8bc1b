from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from deploy.errors import UserError
from deploy.testbed.control import Desk, ask

DEADLINE = 100.0


def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
    if request.get("do") == "fail":
        raise UserError("no link 'x'")
    return {"text": f"did {request['do']}"}


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Path]:
    """A bed that serves requests until the test ends."""
    over = threading.Event()
    with Desk(tmp_path / "control") as made:

        def serve() -> None:
            while not over.is_set():
                made.serve(0.01, answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield tmp_path / "control"
        over.set()
        thread.join(DEADLINE)


def test_a_request_is_answered(desk: Path) -> None:
    assert ask(desk, {"do": "it"}) == {"ok": True, "text": "did it"}


def test_a_refusal_reaches_who_asked(desk: Path) -> None:
    with pytest.raises(UserError, match="no link 'x'"):
        ask(desk, {"do": "fail"})


def test_the_socket_is_for_its_owner_alone(desk: Path) -> None:
    assert desk.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("sent", [b"\n", b"nonsense\n", b"[1]\n"])
def test_nonsense_is_refused_and_the_bed_goes_on(desk: Path, sent: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(DEADLINE)
        connection.connect(str(desk))
        connection.sendall(sent)
        assert b'"ok": false' in connection.recv(4096)
    assert ask(desk, {"do": "more"})["text"] == "did more"


def test_who_goes_before_the_answer_does_no_harm(desk: Path) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(desk))
    assert ask(desk, {"do": "on"})["text"] == "did on"


def test_where_nobody_answers(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not answer"):
        ask(tmp_path / "control", {"do": "it"})
