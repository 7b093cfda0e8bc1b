"""The site of the documentation is built without a warning, and needs nothing from elsewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from deploy.site_pages import slug

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="the extra 'docs' is not installed")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert built.returncode == 0, built.stderr
    return out


def test_every_page_is_built_and_its_links_lead_somewhere(site: Path) -> None:
    for source in (*(ROOT / "docs").glob("*.md"), Path("index.md"), Path("threat-model.md")):
        assert (site / f"{source.stem}.html").is_file()
    index = (site / "index.html").read_text(encoding="utf-8")
    assert 'src="demo.png"' in index and 'href="security.html#transport"' in index


class Loaded(HTMLParser):
    """What a browser loads for a page by itself, and the configuration that its script reads."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.config = ""
        self._in_config = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attrs}
        if tag == "link" and not {"prev", "next", "canonical"} & set(given.get("rel", "").split()):
            self.addresses.append(given["href"])
        self.addresses += [given[key] for key in ("src", "poster", "data") if key in given and tag != "div"]
        self.addresses += [part.split()[0] for part in given.get("srcset", "").split(",") if part.strip()]
        self._in_config = given.get("id") == "__config"

    def handle_data(self, data: str) -> None:
        if self._in_config:
            self.config += data
            self._in_config = False


def loaded(page: Path) -> Loaded:
    parser = Loaded()
    parser.feed(page.read_text(encoding="utf-8"))
    return parser


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    kinds = set()
    for page in site.glob("*.html"):
        for address in loaded(page).addresses:
            if address.startswith("data:"):
                continue
            assert "//" not in address, f"{page.name} loads {address}"
            file = site / address.lstrip("/").partition("?")[0].partition("#")[0]
            assert file.is_file(), f"{page.name} loads {address}, which is not there"
            kinds.add(file.suffix)
        assert 'class="mermaid"' not in page.read_text(encoding="utf-8"), "the theme fetches what draws these"
    assert kinds >= {".css", ".js", ".png"}
    for sheet in site.rglob("*.css"):
        found = re.findall(
            r"""url\(["']?([^"')]*)|@import\s+["']([^"']*)""", sheet.read_text(encoding="utf-8")
        )
        for address in map("".join, found):
            assert "//" not in address or address.startswith("data:"), f"{sheet.name} loads {address}"


def test_the_search_knows_every_page(site: Path) -> None:
    config = json.loads(loaded(site / "index.html").config)
    assert (site / config["search"]).is_file(), "the worker that searches"
    entries = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    pages = {entry["location"].partition("#")[0] for entry in entries}
    assert {page.name for page in site.glob("*.html")} - {"404.html"} <= pages | {"index.html"}
    (found,) = [entry for entry in entries if entry["location"] == "errors.html#old-version"]
    assert "Install the newer wheel" in found["text"]


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("What is not there yet", "what-is-not-there-yet"),
        ("[run]", "run"),
        ("atoll run init", "atoll-run-init"),
    ],
)
def test_anchors_are_those_of_github(heading: str, anchor: str) -> None:
    assert slug(heading, "-") == anchor
