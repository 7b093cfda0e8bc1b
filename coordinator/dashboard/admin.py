"""The administrator at a page: logging in with the admin token, and having the run do something."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from nicegui import ui

from coordinator.administration import Administration, Answer
from coordinator.dashboard.feed import Feed
from coordinator.dashboard.guard import Guard
from coordinator.dashboard.snapshot import Snapshot
from coordinator.ending import ENDED

ADMIN_SECONDS: Final = 1800.0  # without an action, until the administrator has to log in again
ANSWER_SECONDS: Final = 10.0
PLAIN: Final = (
    "This page is not encrypted: whoever listens on the way can read the token. Use it over a tunnel "
    "(ssh -L) or behind a proxy with TLS."
)


class Admin:
    """Of one page: what it was let in to do ends with the page.

    Args:
        feed: carries orders to the run's loop.
        guard: lets the administrator in.
        administration: what orders act on, on that loop.
        plain: whether the page is served to other machines, unencrypted.
        changed: called after logging in or out, and after an order.
    """

    def __init__(
        self,
        feed: Feed,
        guard: Guard,
        administration: Administration,
        *,
        plain: bool,
        changed: Callable[[], None],
    ) -> None:
        self.administration = administration
        self._feed = feed
        self._guard = guard
        self._plain = plain
        self._changed = changed
        self._until = 0.0
        self._name = ""  # of the token that let it
        self._paused = False
        self._source = ui.context.client.ip or ""

    @property
    def allowed(self) -> bool:
        """Whether this page may act."""
        return time.monotonic() < self._until and self._guard.valid(self._name)

    async def order(self, action: Callable[..., Answer]) -> bool:
        """Have the run's loop do something, ``by`` the name of this page's token, if it may; tells what came
        of it."""
        if not self.allowed:
            ui.notify("this needs the admin token", type="negative")
            return False
        self._until = time.monotonic() + ADMIN_SECONDS
        order = partial(action, by=self._name)
        try:
            answer = await asyncio.wait_for(asyncio.wrap_future(self._feed.order(order)), ANSWER_SECONDS)
        except asyncio.TimeoutError:
            answer = Answer(False, "the coordinator did not answer in time")
        ui.notify(answer.text, type="positive" if answer.done else "negative")
        self._changed()
        return answer.done

    # ----------------------------------------------------------------------------------------------- elements

    def buttons(self) -> None:
        """Make the buttons of the page's bar."""
        self._pause = ui.button("Pause", on_click=self._pause_or_resume).classes("action")
        self._pause.props('outline dense no-caps data-test="pause"').set_visibility(False)
        self._login = ui.button("Log in", on_click=self._log_in_or_out).classes("action")
        self._login.props('flat dense no-caps data-test="login"')

    def dialogs(self) -> None:
        """Make the dialogs for the token and for a pause."""
        with ui.dialog() as self._login_sheet, ui.card().classes("sheet"):
            ui.label("Log in as administrator").classes("sheet-title")
            ui.label(
                "An invite of 'atoll invite create DIR --role admin' on the coordinator's machine, or what "
                "was given with --admin-token."
            ).classes("note")
            if self._plain:
                ui.label(PLAIN).classes("note warn")
            self._token = ui.input("Admin token", password=True, password_toggle_button=True)
            self._token.props('dense outlined autofocus autocomplete="off" maxlength="512" data-test="token"')
            self._token.on("keydown.enter", self._check)
            self._note = ui.label().classes("note warn").props('role="alert" data-test="token-note"')
            with ui.element("div").classes("sheet-buttons"):
                ui.button("Cancel", on_click=self._login_sheet.close).props("flat no-caps")
                ui.button("Log in", on_click=self._check).props('unelevated no-caps data-test="token-send"')
        with ui.dialog() as self._pause_sheet, ui.card().classes("sheet"):
            ui.label("Pause the run").classes("sheet-title")
            ui.label(
                "The round in flight is finished; then no round is opened until you resume. Nodes are told, "
                "and wait. A restarted coordinator stays paused."
            ).classes("note")
            self._reason = ui.input("Reason, told to the nodes")
            self._reason.props('dense outlined autofocus maxlength="200" data-test="pause-reason"')
            with ui.element("div").classes("sheet-buttons"):
                ui.button("Cancel", on_click=self._pause_sheet.close).props("flat no-caps")
                ui.button("Pause", on_click=self._do_pause).props('unelevated no-caps data-test="pause-send"')

    def draw(self, snapshot: Snapshot) -> None:
        """Show what can be done now."""
        if self._until and not self.allowed:
            self._until = 0.0
            ui.notify("logged out: nothing was done for a while, or the token is valid no more")
        self._paused = bool(snapshot.paused)
        self._login.text = "Log out" if self.allowed else "Log in"
        self._pause.text = "Resume" if self._paused else "Pause"
        self._pause.set_visibility(self.allowed and snapshot.phase not in ENDED)

    # ------------------------------------------------------------------------------------------------ actions

    def _log_in_or_out(self) -> None:
        if self.allowed:
            self._until = 0.0
            self._changed()
            return
        self._token.value = self._note.text = ""
        self._login_sheet.open()

    def _check(self) -> None:
        token, self._token.value = self._token.value or "", ""
        self._name, self._note.text = self._guard.admit(self._source, token)
        if not self._note.text:
            self._until = time.monotonic() + ADMIN_SECONDS
            self._login_sheet.close()
            self._changed()

    async def _pause_or_resume(self) -> None:
        if self._paused:
            await self.order(self.administration.resume)
        elif self.allowed:
            self._reason.value = ""
            self._pause_sheet.open()

    async def _do_pause(self) -> None:
        if await self.order(partial(self.administration.pause, self._reason.value or "")):
            self._pause_sheet.close()
