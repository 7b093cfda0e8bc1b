"""A hook of mkdocs: the pages that lie in the root of the repository are part of the documentation's site.

Their links, and those to them, are written as they hold in the repository, where most people read them; here
they become links between pages of the site. A link to a file that the site has not got is an error, but for
the few that are named here, whose text stays.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
PAGES: Final = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "threat-model.md",
    "CHANGELOG.md": "changelog.md",
}
ONLY_TEXT: Final = frozenset({"LICENSE", "NOTICE"})
_LINK: Final = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)|!\[([^\]]*)\]\(([^)\s]+)\)")


def slug(text: str, separator: str) -> str:
    """The anchor of a heading as GitHub makes it, so that one link holds in both places."""
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", separator)


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages of the root to those of docs/."""
    from mkdocs.structure.files import File

    for name, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Make links of the repository links of the site."""
    source = next((name for name, at in PAGES.items() if at == page.file.src_uri), None)
    folder = "" if source else posixpath.dirname(f"docs/{page.file.src_uri}")
    return _LINK.sub(lambda link: _translated(link, folder), markdown)


def _translated(link: re.Match[str], folder: str) -> str:
    picture = link[5] is not None
    text, target, anchor = (link[4], link[5], "") if picture else (link[1], link[2], link[3] or "")
    if re.match(r"[a-z]+:", target):
        return link[0]
    path = posixpath.normpath(posixpath.join(folder, target))
    if path in ONLY_TEXT:
        return text
    here = path.removeprefix("docs/") if path.startswith("docs/") else PAGES.get(path, target)
    return f"{'!' if picture else ''}[{text}]({here}{anchor})"
