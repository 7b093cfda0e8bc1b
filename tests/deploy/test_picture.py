from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from deploy.picture import Curve, draw, smooth


def _curve(label: str, step_bytes: float, floor: float) -> Curve:
    steps = list(range(1, 201))
    losses = [floor + 3.5 * math.exp(-s / 40) + 0.05 * math.sin(s) for s in steps]
    return Curve(
        label, steps, losses, step_bytes, [(s, floor + 3.5 * math.exp(-s / 40)) for s in (50, 100, 200)]
    )


def _colors(path: Path) -> set[tuple[int, ...]]:
    image = (imread(path)[..., :3] * 255).round().astype(int)
    assert image.shape[0] > 300 and image.shape[1] > 900
    return {tuple(int(c) for c in row) for row in np.unique(image.reshape(-1, 3), axis=0)}


def test_the_picture_shows_every_curve(tmp_path: Path) -> None:
    path = tmp_path / "out" / "demo.png"
    draw(path, "one", [_curve("votes", 40_000, 1.7)])
    one = _colors(path)
    assert (0x0B, 0x6E, 0x99) in one and (0xC8, 0x55, 0x3D) not in one
    draw(path, "two", [_curve("votes", 40_000, 1.7), _curve("muon", 1_600_000, 1.8)])
    assert {(0x0B, 0x6E, 0x99), (0xC8, 0x55, 0x3D)} <= _colors(path)


def test_points_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "demo.png"
    draw(path, "gaps", [Curve("votes", [1, 2, 3, 4], [math.nan, 3.0, math.inf, 2.0], 0.0, [(4, math.nan)])])
    assert (0x0B, 0x6E, 0x99) in _colors(path)


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        draw(tmp_path / "demo.png", "empty", [Curve("votes", [1], [math.nan], 1.0)])
    assert not (tmp_path / "demo.png").exists()


def test_smoothing_keeps_a_line_and_evens_out_noise() -> None:
    line = [2.0 - 0.1 * index for index in range(20)]
    assert smooth(line, 7) == pytest.approx(line), "no lag"
    assert smooth([0.0, 3.0, 0.0, 3.0, 0.0], 3) == pytest.approx([0.0, 1.0, 2.0, 1.0, 0.0])
    assert smooth([5.0], 9) == [5.0] and smooth([], 9) == []
