"""The dashboard in a browser: headless Chromium before runs of real nodes, and before one of fifty."""

from __future__ import annotations

import shutil
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench.bed import Bed
from coordinator.dashboard.words import number, percent
from deploy.processes import Children, Grace
from protos.units import format_bytes
from tests.coordinator.dashboard.dashboard_rig import STRANGER, TOKEN, Stage
from tests.waiting import free_port, until

CHROMIUM: Final = shutil.which("chromium") or shutil.which("chromium-browser")
sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
pytest.importorskip("nicegui", reason="the extra 'dashboard' is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine"),
]

SECONDS: Final = 120.0
QUIET: Final = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class Visitor:
    """A page and what it asked for and complained of."""

    def __init__(self, browser: Any, url: str) -> None:
        self.url = url
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.page = browser.new_context(viewport={"width": 1440, "height": 1000}).new_page()
        self.page.set_default_timeout(SECONDS * 1000)
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("websocket", lambda opened: self.asked.append(opened.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._heard)
        self.page.goto(url)

    def _heard(self, message: Any) -> None:
        if message.type == "error" and "ERR_CONNECTION_REFUSED" not in message.text:
            self.complaints.append(message.text)

    def text(self, name: str) -> str:
        return str(self.page.inner_text(f"[data-test={name}]"))

    @property
    def phase(self) -> str:
        return self.text("phase")

    @property
    def round(self) -> int:
        head = self.text("round").split(" / ")[0].replace(",", "")
        return int(head) if head.isdigit() else -1

    def cells(self) -> dict[str, list[str]]:
        """The roster's rows by node."""
        rows = self.page.eval_on_selector_all(
            ".roster tbody tr", "rows => rows.map(row => [...row.cells].map(cell => cell.innerText.trim()))"
        )
        return {row[0]: row for row in rows if len(row) > 2}

    def until(self, holds: Callable[[], bool], what: str, fate: Callable[[], str] = str) -> None:
        """Wait; the page's events are taken meanwhile."""

        def tried() -> bool:
            self.page.wait_for_timeout(50)
            try:
                return holds()
            except sync_api.Error:  # it is being loaded again
                return False

        until(tried, what, deadline=SECONDS, fate=lambda: f"{fate()} {self.complaints}")

    def log_in(self, token: str) -> None:
        self.page.click("[data-test=login]")
        self.page.fill("[data-test=token]", token)
        self.page.click("[data-test=token-send]")

    def only_its_own_origin(self) -> bool:
        own = self.url.partition("://")[2]
        return {url.partition("://")[2].partition("/")[0] for url in self.asked if "://" in url} == {own}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        yield launched
        launched.close()


def scraped(port: int) -> dict[tuple[str, str], float]:
    """Samples of the coordinator's metrics, by name and by the values of their labels but for names."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SECONDS) as reply:
        families = text_string_to_metric_families(reply.read().decode())
    return {
        (
            sample.name,
            " ".join(value for key, value in sorted(sample.labels.items()) if key != "name"),
        ): sample.value
        for family in families
        for sample in family.samples
    }


def differences(visitor: Visitor, port: int) -> list[str]:
    """What page and metrics say differently of a run that stands still."""
    found, cells = scraped(port), visitor.cells()
    members = [node for name, node in found if name == "atoll_member_ranks"]
    detail = visitor.text("loss-detail")
    pairs = {
        "round": (str(visitor.round), f"{found['atoll_rounds_committed_total', '']:.0f}"),
        "loss": (visitor.text("loss"), number(found["atoll_loss_nats", ""])),
        "validation": (detail.split()[1], number(found["atoll_validation_loss_nats", ""])),
        "bits": (detail.split()[3], number(found["atoll_validation_bits_per_byte", ""])),
        "agreement": (visitor.text("agreement"), percent(found["atoll_vote_agreement_ratio", ""])),
        "nodes": (" ".join(sorted(cells)), " ".join(sorted(members))),
    }
    for node in members:
        row = cells.get(node, [""] * 12)
        pairs |= {
            f"{node} loss": (row[4], number(found["atoll_member_loss_nats", node])),
            f"{node} agreement": (row[5], percent(found["atoll_member_vote_agreement_ratio", node])),
            f"{node} missed": (row[6], f"{found['atoll_member_missed_rounds_total', node]:,.0f}"),
            f"{node} sent": (row[8], format_bytes(int(found["atoll_member_bytes_total", f"sent {node}"]))),
            f"{node} got": (row[9], format_bytes(int(found["atoll_member_bytes_total", f"received {node}"]))),
        }
    return [f"{name}: {page} != {metric}" for name, (page, metric) in pairs.items() if page != metric]


@pytest.mark.timeout(900)
def test_a_run_of_real_nodes(browser: Any, tmp_path: Path) -> None:
    metrics, port = free_port(), free_port()
    options = (
        "--metrics",
        f"127.0.0.1:{metrics}",
        "--dashboard",
        f"127.0.0.1:{port}",
        "--admin-token",
        TOKEN,
    )
    with Children(Grace(5.0)) as children:
        bed = Bed(tmp_path, children)
        bed.write({"run": {"nodes": 2, "rounds": 100_000, "evaluate_every": 5}})
        bed.lead(*options)
        bed.join("reef")
        bed.join("atoll")
        visitor = Visitor(browser, f"http://127.0.0.1:{port}")

        # It is live.
        visitor.until(lambda: visitor.round >= 10, "round 10 on the page")
        visitor.page.evaluate("window.unchanged = true")
        before = visitor.round
        visitor.until(lambda: visitor.round >= before + 5, "five more rounds on the page")
        assert visitor.page.evaluate("window.unchanged"), "without loading the page again"
        assert len(visitor.cells()) == 2 and visitor.phase == "training"

        # Who only looks can do nothing.
        visitor.page.click(".roster button:has-text('node-1')")
        visitor.page.wait_for_selector(".sheet:has-text('To expel this node, log in')")
        assert not visitor.page.is_visible("[data-test=expel]") and not visitor.page.is_visible(
            "[data-test=pause]"
        )
        visitor.page.keyboard.press("Escape")
        visitor.log_in(f"not {TOKEN}")
        visitor.until(lambda: visitor.text("token-note") == "this is not the admin token", "the refusal")
        visitor.page.fill("[data-test=token]", TOKEN)
        visitor.page.keyboard.press("Enter")

        # A pause holds the run still: page and metrics say the same.
        visitor.page.click("[data-test=pause]")
        visitor.page.fill("[data-test=pause-reason]", "looking closely")
        visitor.page.click("[data-test=pause-send]")
        visitor.until(lambda: visitor.phase == "paused", "the pause")
        visitor.until(lambda: visitor.page.inner_text(".banner") == "Paused: looking closely", "the reason")
        visitor.until(
            lambda: not differences(visitor, metrics),
            "page and metrics that agree",
            fate=lambda: str(differences(visitor, metrics)),
        )
        stands = visitor.round

        # The coordinator dies; the page finds the next one by itself, and the run is paused still.
        assert bed.coordinator is not None
        bed.kill(bed.coordinator)
        visitor.page.wait_for_selector("#popup[aria-hidden=false]")
        bed.lead(*options)
        visitor.until(lambda: not visitor.page.evaluate("window.unchanged"), "the next page")
        visitor.until(
            lambda: visitor.phase == "paused" and len(visitor.cells()) == 2 and visitor.round == stands,
            "the page of the next coordinator",
        )
        assert not visitor.page.is_visible("[data-test=pause]"), "whoever acts has to log in again"
        visitor.log_in(TOKEN)
        visitor.page.click("[data-test=pause]:has-text('Resume')")
        visitor.until(lambda: visitor.round >= stands + 5, "rounds after the pause")

        # A node is expelled, and does not come back.
        found: list[str] = []

        def found_it() -> bool:  # the table may be drawn anew just now
            found[:] = [node for node, row in visitor.cells().items() if row[1] == "atoll"]
            return len(found) == 1

        visitor.until(found_it, "the row of the node")
        (expelled,) = found
        visitor.page.click(f".roster button:has-text('{expelled}')")
        visitor.page.click("[data-test=expel]")
        visitor.until(
            lambda: visitor.cells().get(expelled, ["", "", ""])[2] in ("leaving", "left"), "the node's leave"
        )
        assert bed.ended(bed.nodes["atoll"]) != 0
        before = visitor.round
        visitor.until(lambda: visitor.round >= before + 5, "rounds of the other node")
        assert bed.ended(bed.join("atoll")) != 0
        assert f"{expelled} (atoll) was expelled from this run" in (tmp_path / "atoll.log").read_text()

        assert visitor.only_its_own_origin() and visitor.complaints == []
        assert all(TOKEN not in url for url in visitor.asked)
        bed.kill(bed.coordinator, signal.SIGINT)
        assert TOKEN not in (tmp_path / "coordinator.log").read_text()


@pytest.mark.timeout(600)
def test_fifty_nodes_and_a_strangers_name(browser: Any) -> None:
    names = [f"gpu-{index}" for index in range(49)]
    with Stage([*names, STRANGER]) as stage:
        stage.play(5)
        visitor = Visitor(browser, stage.url)
        visitor.until(lambda: len(visitor.cells()) == 25, "the first page of the roster")
        stage.play(3)
        visitor.until(lambda: visitor.page.is_visible(".map-mark:last-child tspan:has-text('/s')"), "rates")
        labels = visitor.page.eval_on_selector_all(
            ".map-mark text",
            "texts => texts.map(text => { const box = text.getBoundingClientRect();"
            " const all = text.ownerSVGElement.getBoundingClientRect();"
            " return [text.textContent, box.left >= all.left - 1 && box.right <= all.right + 1"
            " && box.top >= all.top - 1 && box.bottom <= all.bottom + 1]; })",
        )
        shown = [text for text, _ in labels]
        assert all(any(text.startswith(name) for text in shown) for name in names), "each is on the map"
        assert all(inside for _, inside in labels), "and within it"
        assert visitor.page.eval_on_selector("body", "body => body.scrollWidth <= body.clientWidth")

        # A name that would be markup is text: on the map, in the roster, in events, in its sheet.
        visitor.page.fill(".roster-search input", STRANGER)
        visitor.until(lambda: list(visitor.cells()) == ["node-49"], "the stranger's row")
        assert visitor.cells()["node-49"][1] == STRANGER
        visitor.page.keyboard.press("Tab")
        visitor.page.focus(".roster button.link")
        visitor.page.keyboard.press("Enter")
        visitor.page.wait_for_selector(".sheet-title:has-text('onerror')")
        visitor.page.wait_for_selector(".events td:has-text('onerror')")
        assert visitor.page.eval_on_selector_all("img[src=x]", "found => found.length") == 0
        assert visitor.page.evaluate("window.__pwned") is None
        visitor.page.keyboard.press("Escape")

        # Light or dark as the system is, or as chosen.
        ground = "getComputedStyle(document.body).backgroundColor"
        light = visitor.page.evaluate(ground)
        visitor.page.emulate_media(color_scheme="dark")
        visitor.until(lambda: visitor.page.evaluate(ground) != light, "the dark page")
        visitor.page.click(".themes button:has-text('Light')")
        visitor.until(lambda: visitor.page.evaluate(ground) == light, "the light page")
        assert visitor.only_its_own_origin() and visitor.complaints == []
