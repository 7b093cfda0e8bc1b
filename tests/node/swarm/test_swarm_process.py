"""Starting libp2p's process: silent ends are borne, everything else is told."""

from __future__ import annotations

from typing import Any

import pytest

from node.exchange.swarm import process


class Creating:
    """A start that ends in these errors before it goes well."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    async def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "a daemon"


async def test_daemons_that_end_without_a_word_are_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Any] = []

    async def end(one: Any) -> None:
        ended.append(one)

    monkeypatch.setattr(process, "_end", end)
    silent = RuntimeError("Daemon failed to start: None")
    create, started = Creating(silent, silent), ["first"]
    assert await process._alive(create, started) == "a daemon"
    assert create.calls == 3 and ended == ["first"] and not started
    endless = Creating(*[silent] * 10)
    with pytest.raises(RuntimeError, match="failed to start: None"):
        await process._alive(endless, [])
    assert endless.calls == 4


async def test_a_daemon_that_says_why_is_not_tried_again() -> None:
    create = Creating(RuntimeError("Daemon failed to start: address already in use"))
    with pytest.raises(RuntimeError, match="address already in use"):
        await process._alive(create, [])
    assert create.calls == 1
