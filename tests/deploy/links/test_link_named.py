from __future__ import annotations

from pathlib import Path

import pytest

from deploy.links.commands import ShapingError
from deploy.links.named import choose, load
from deploy.links.shape import Shape
from tests.deploy.links.machine_rig import Machine

LINKS = """
[site-a]
interface = "eth1"
rate = "1gbit"
delay = "20ms"

[site-b]
subnet = "192.0.2.0/24"
direction = "in"
rate = "20mbit"
loss = "1%"
"""


@pytest.fixture
def links(tmp_path: Path) -> Path:
    path = tmp_path / "links.toml"
    path.write_text(LINKS)
    return path


def test_links_are_read_and_found(links: Path) -> None:
    site_a, site_b = choose(links, ["site-a", "site-b"])
    assert site_a.find(Machine()).name == "eth1" and site_b.find(Machine()).name == "eth0"
    assert site_a.shapes() == (Shape(10**9, 0.02), Shape(10**9, 0.02))
    before = (Shape(rate=10**6), Shape(rate=10**7))
    assert site_b.shapes() == (None, Shape(20_000_000, loss=0.01))
    assert site_b.shapes(before) == (before[0], Shape(20_000_000, loss=0.01))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[a", "links.toml: "),
        ("rate = '1gbit'", "'rate' is not a table"),
        ("[a]\nspeed = '1gbit'", r"links.toml, \[a\]: unknown key 'speed'; the keys are interface"),
        ("[a]\nrate = 5", r'\[a\]: rate must be a text with its unit, as in rate = "100mbit"'),
        ("[a]\nrate = 'fast'", r"\[a\]: 'fast' is not a rate"),
        ("[a]\nrate = '1gbit'\ndirection = 'up'", "it may be out, in, both"),
        ("[a]\ninterface = 'eth1'", r"\[a\]: nothing to set"),
    ],
)
def test_errors_say_where(links: Path, text: str, said: str) -> None:
    links.write_text(text)
    with pytest.raises(ShapingError, match=said):
        load(links)


def test_links_that_are_not_there(links: Path) -> None:
    with pytest.raises(ShapingError, match=r"no link site-c; it has site-a, site-b"):
        choose(links, ["site-a", "site-c"])
    with pytest.raises(ShapingError, match="no such file; --links"):
        choose(links.with_name("other.toml"), ["site-a"])
