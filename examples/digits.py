"""Images for the examples: the ten digits in the typefaces that matplotlib ships with, turned, shifted and
noisy. Drawn here, so that there is nothing to download."""

import random
from pathlib import Path

import matplotlib
import torch
from PIL import Image, ImageDraw, ImageFont

SIDE = 20
FACES = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSansMono",
    "DejaVuSerif",
    "DejaVuSerif-Italic",
    "STIXGeneral",
)


def draw_digits(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """``float32[count, 1, 20, 20]`` and their labels, the same for the same seed."""
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    fonts = [ImageFont.truetype(str(folder / f"{face}.ttf"), 16) for face in FACES]
    chance, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    images, labels = torch.empty(count, 1, SIDE, SIDE), torch.empty(count, dtype=torch.int64)
    for index in range(count):
        labels[index] = digit = chance.randrange(10)
        image = Image.new("L", (SIDE, SIDE))
        place = 5 + chance.randint(-3, 3), chance.randint(-2, 2)
        ImageDraw.Draw(image).text(place, str(digit), fill=255, font=chance.choice(fonts))
        turned = image.rotate(chance.uniform(-20, 20), Image.Resampling.BILINEAR)
        images[index, 0] = torch.tensor(list(turned.tobytes())).view(SIDE, SIDE) / 255
    return images + 0.2 * torch.randn(images.shape, generator=noise), labels
