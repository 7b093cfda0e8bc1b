"""A sheet with all about one node, from which the administrator expels it."""

from __future__ import annotations

from functools import partial

from nicegui import ui

from coordinator.dashboard import rows
from coordinator.dashboard.admin import Admin
from coordinator.dashboard.snapshot import Snapshot
from coordinator.ending import ENDED


class NodeSheet:
    """The dialog; to be made within a page.

    Args:
        admin: whether this page may act.
    """

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._node = ""
        with ui.dialog() as self._dialog, ui.card().classes("sheet"):
            self._title = ui.label().classes("sheet-title")
            self._facts = ui.table(rows=[], columns=rows.FACT_COLUMNS, row_key="name").classes("facts")
            self._facts.props("flat dense hide-header hide-bottom")
            self._reason = ui.input("Reason, told to the node").props('dense outlined maxlength="200"')
            self._note = ui.label("To expel this node, log in with the admin token.").classes("note")
            with ui.element("div").classes("sheet-buttons"):
                ui.button("Close", on_click=self._dialog.close).props("flat no-caps")
                self._expel = ui.button("Expel from the run", on_click=self._do_expel)
                self._expel.props('color="negative" unelevated no-caps data-test="expel"')
        self._dialog.on("hide", self._closed)

    def open(self, node: str, snapshot: Snapshot) -> None:
        """Show a node."""
        self._node, self._reason.value = node, ""
        self.draw(snapshot)
        self._dialog.open()

    def draw(self, snapshot: Snapshot) -> None:
        """Show what is known now, if a node is shown."""
        if not self._node:
            return
        view = next((node for node in snapshot.nodes if node.node == self._node), None)
        self._title.text = self._node if view is None else f"{view.node} · {view.name}"
        facts = [] if view is None else rows.facts(view)
        if facts != self._facts.rows:
            self._facts.rows = facts
        over = snapshot.phase in ENDED or view is None or view.state in ("left", "leaving")
        for element in (self._expel, self._reason):
            element.set_visibility(not over and self._admin.allowed)
        self._note.set_visibility(not over and not self._admin.allowed)

    def _closed(self) -> None:
        self._node = ""

    async def _do_expel(self) -> None:
        action = partial(self._admin.administration.expel, self._node, self._reason.value or "")
        if await self._admin.order(action):
            self._dialog.close()
