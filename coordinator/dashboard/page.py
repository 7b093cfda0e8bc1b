"""The page: what a browser sees of a run, and the two things that an administrator can do to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from nicegui import ui
from nicegui.element import Element

from coordinator.administration import Administration
from coordinator.dashboard import charts, rows
from coordinator.dashboard.admin import Admin
from coordinator.dashboard.feed import Feed
from coordinator.dashboard.guard import Guard
from coordinator.dashboard.scene import scene
from coordinator.dashboard.sheet import NodeSheet
from coordinator.dashboard.snapshot import Snapshot
from coordinator.dashboard.tiles import Tile, tiles

STATIC: Final = Path(__file__).parent / "static"
STYLE: Final = (STATIC / "dashboard.css").read_text(encoding="utf-8")
MARK: Final = (STATIC / "favicon.svg").read_text(encoding="utf-8")
LOOK_SECONDS: Final = 0.5
# Vue templates: what stands between double braces becomes text, never markup.
STATE_CELL: Final = """
<q-td :props="props">
  <span :class="['chip', 'state-' + props.row.state]">{{ props.row.state }}</span>
</q-td>"""
NODE_CELL: Final = """
<q-td :props="props">
  <button class="link" :aria-label="'details of ' + props.row.node"
    @click="() => $parent.$emit('open', props.row.node)">{{ props.row.node }}</button>
</q-td>"""
EVENT_CELL: Final = """
<q-td :props="props">
  <span :class="['tag', 'tag-' + props.row.category]">{{ props.row.category }}</span>
</q-td>"""
WAYS: Final = {"hub": "coordinator", "direct": "direct", "swarm": "swarm", "tunnel": "tunnel"}


class TopologyMap(Element, component="static/topology.js"):  # type: ignore[call-arg, misc]
    """The map; emits ``open`` with the id of a node."""

    def __init__(self, on_open: Callable[[str], None]) -> None:
        super().__init__()
        self._props["scene"] = {"width": 880, "height": 560, "marks": [], "lines": []}
        self.on("open", lambda event: on_open(str(event.args)))

    def show(self, values: dict[str, Any]) -> None:
        """Draw another scene."""
        if values != self._props["scene"]:
            self._props["scene"] = values
            self.update()


class Page:
    """One browser's page.

    Args:
        feed: of snapshots.
        guard: lets the administrator in.
        administration: carries orders out, on the run's loop.
        plain: whether it is served to other machines, unencrypted.
    """

    def __init__(self, feed: Feed, guard: Guard, administration: Administration, *, plain: bool) -> None:
        self._feed = feed
        self._admin = Admin(feed, guard, administration, plain=plain, changed=self._redraw)
        self._shown: Snapshot | None = None
        self._drawn: dict[str, object] = {}
        self._looking = False

    # ------------------------------------------------------------------------------------------ what is seen

    def build(self) -> None:
        """Make the page's elements. No text of the run is among them yet."""
        client = ui.context.client
        ui.add_css(STYLE)
        ui.colors(primary="#1c7c9c", positive="#2e8b57", negative="#c8433f", warning="#c98a1b")
        ui.query("body").classes("atoll")
        self._dark = ui.dark_mode(None)
        with ui.element("div").classes("page"):
            self._header()
            self._banner = ui.label().classes("banner").props('role="status"')
            self._banner.set_visibility(False)
            self._tiles = self._build_tiles()
            with ui.element("main").classes("panels"):
                with self._panel("Topology", "wide"):
                    self._ways = ui.label().classes("note")
                    self._map = TopologyMap(self._open)
                    self._legend()
                with self._panel("Loss, nats per token", "narrow"):
                    self._by_round = ui.echart(charts.loss_by_round(())).classes("chart")
                    self._by_bytes = ui.echart(charts.loss_by_bytes(())).classes("chart")
                with self._panel("Rounds, seconds", "wide"):
                    self._timeline = ui.echart(charts.timeline(())).classes("chart tall")
                    self._round_note = ui.label().classes("note")
                with self._panel("Events", "narrow"):
                    self._build_events()
                with self._panel("Nodes", "full"):
                    self._build_roster()
            self._footer = ui.element("footer")
            with self._footer:
                self._foot = ui.label()
        self._admin.dialogs()
        self._sheet = NodeSheet(self._admin)
        ui.timer(LOOK_SECONDS, self._look)
        client.on_connect(self._arrived)
        client.on_disconnect(self._gone)
        client.on_delete(self._gone)

    def _panel(self, title: str, size: str) -> Element:
        panel = ui.element("section").classes(f"panel {size}").props(f'aria-label="{title}"')
        with panel:
            ui.label(title).classes("panel-title").props('role="heading" aria-level="2"')
        body = ui.element("div").classes("panel-body")
        body.move(panel)
        return body

    def _header(self) -> None:
        with ui.element("header").classes("bar"):
            ui.html(MARK, sanitize=False).classes("mark").props('aria-hidden="true"')
            with ui.element("div").classes("titles"):
                self._title = ui.label("Atoll").classes("title").props('role="heading" aria-level="1"')
                self._subtitle = ui.label("connecting …").classes("subtitle")
            self._phase = ui.label("…").classes("chip phase").props('data-test="phase"')
            ui.element("div").classes("space")
            self._theme = ui.toggle(
                {"auto": "Auto", "light": "Light", "dark": "Dark"}, value="auto", on_change=self._themed
            ).props('dense no-caps unelevated padding="2px 10px" aria-label="Colours"')
            self._theme.classes("themes")
            self._admin.buttons()

    def _build_tiles(self) -> dict[str, tuple[ui.label, ui.label, Element]]:
        found = {}
        with ui.element("div").classes("tiles"):
            for tile in tiles(None):
                with ui.element("div").classes("tile"):
                    ui.label(tile.title).classes("tile-title")
                    value = ui.label(tile.value).classes(f"tile-value tile-{tile.id}")
                    value.props(f'data-test="{tile.id}"')
                    detail = (
                        ui.label(tile.detail).classes("tile-detail").props(f'data-test="{tile.id}-detail"')
                    )
                    with ui.element("div").classes("track"):
                        fill = ui.element("div").classes("fill")
                    fill.set_visibility(False)
                    found[tile.id] = (value, detail, fill)
        return found

    def _legend(self) -> None:
        with ui.element("div").classes("legend").props('aria-hidden="true"'):
            for state in ("active", "lagging", "joining"):
                with ui.element("span").classes(f"state-{state}"):
                    ui.element("i").classes("swatch")
                    ui.label(state)
            with ui.element("span") as self._legend_ways:
                for way, text in WAYS.items():
                    ui.element("i").classes(f"stroke way-{way}")
                    ui.label(text)

    def _build_events(self) -> None:
        with ui.element("div").classes("filters"):
            self._kind = ui.select(rows.KINDS, value=rows.FEW, on_change=lambda: self._draw_events()).props(
                'dense outlined options-dense aria-label="Kind of events"'
            )
            self._search = ui.input(placeholder="Filter", on_change=lambda: self._draw_events()).props(
                'dense outlined clearable debounce="200" aria-label="Filter events" maxlength="80"'
            )
        self._events = ui.table(rows=[], columns=rows.EVENT_COLUMNS, row_key="key").classes("events")
        self._events.props("flat dense hide-header virtual-scroll hide-bottom")
        self._events.add_slot("body-cell-category", EVENT_CELL)
        self._event_note = ui.label().classes("note")

    def _build_roster(self) -> None:
        with ui.element("div").classes("filters"):
            self._roster_search = (
                ui.input(placeholder="Find a node")
                .classes("roster-search")
                .props('dense outlined clearable aria-label="Find a node" maxlength="80"')
            )
            self._roster_note = ui.label().classes("note")
        self._roster = ui.table(
            rows=[],
            columns=rows.NODE_COLUMNS,
            row_key="node",
            pagination={"rowsPerPage": 25, "sortBy": "order"},
        ).classes("roster")
        self._roster.props('flat dense :rows-per-page-options="[10, 25, 50, 100, 0]"')
        self._roster.add_slot("body-cell-node", NODE_CELL)
        self._roster.add_slot("body-cell-state", STATE_CELL)
        self._roster.on("open", lambda event: self._open(str(event.args)))
        self._roster_search.bind_value_to(self._roster, "filter", lambda text: text or "")

    # --------------------------------------------------------------------------------------------- refreshing

    def _arrived(self) -> None:
        if not self._looking:
            self._looking = True
            self._feed.open()

    def _gone(self) -> None:
        if self._looking:
            self._looking = False
            self._feed.close()

    def _look(self) -> None:
        snapshot = self._feed.latest
        if snapshot is not None and snapshot is not self._shown:
            self._shown = snapshot
            self._draw(snapshot)

    def _redraw(self) -> None:
        self._shown = self._feed.latest or self._shown
        if self._shown is not None:
            self._draw(self._shown)

    def _changed(self, name: str, value: object) -> bool:
        """Whether a part has to be drawn anew."""
        if self._drawn.get(name) == value:
            return False
        self._drawn[name] = value
        return True

    def _draw(self, snapshot: Snapshot) -> None:
        self._title.text = snapshot.run
        self._subtitle.text = f"{snapshot.method} · {snapshot.reason}"
        self._phase.text = snapshot.phase
        if self._changed("phase", snapshot.phase):
            self._phase.classes(replace=f"chip phase phase-{snapshot.phase}")
        self._banner.text = f"Paused: {snapshot.paused}" if snapshot.paused else ""
        self._banner.set_visibility(bool(snapshot.paused))
        for tile in tiles(snapshot):
            self._draw_tile(tile)
        self._ways.text = snapshot.ways
        for element in (self._ways, self._legend_ways):
            element.set_visibility(bool(snapshot.ways))
        self._map.show(scene(snapshot).plain())
        if self._changed("curve", repr(snapshot.curve)):
            self._draw_chart(self._by_round, charts.loss_by_round(snapshot.curve))
            self._draw_chart(self._by_bytes, charts.loss_by_bytes(snapshot.curve))
        if self._changed("timeline", repr(snapshot.timeline[-1:])):
            self._draw_chart(self._timeline, charts.timeline(snapshot.timeline[-rows.ROUNDS :]))
            self._round_note.text = rows.round_note(snapshot)
        self._draw_events()
        table = rows.node_rows(snapshot)
        if self._changed("roster", table):
            self._roster.rows = table
        self._roster_note.text = rows.roster_note(snapshot)
        self._foot.text = rows.foot(snapshot)
        self._admin.draw(snapshot)
        self._sheet.draw(snapshot)

    def _draw_tile(self, tile: Tile) -> None:
        value, detail, fill = self._tiles[tile.id]
        value.text, detail.text = tile.value, tile.detail
        if tile.share is not None:
            fill.set_visibility(True)
            if self._changed(f"tile {tile.id}", tile.share):
                fill.style(f"width: {100 * tile.share:.2f}%")

    def _draw_chart(self, chart: ui.echart, options: charts.Options) -> None:
        chart.options.clear()
        chart.options.update(options)
        chart.update()

    def _draw_events(self) -> None:
        if self._shown is None:
            return
        found = rows.event_rows(self._shown, str(self._kind.value), self._search.value or "")
        if self._changed("events", found):
            self._events.rows = found
        self._event_note.text = rows.event_note(self._shown, found)

    def _themed(self) -> None:
        self._dark.value = {"auto": None, "light": False, "dark": True}[str(self._theme.value)]

    def _open(self, node: str) -> None:
        if self._shown is not None:
            self._sheet.open(node, self._shown)
