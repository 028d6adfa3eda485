"""Pictures that tests make up: coloured shapes in folders, and noise."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw


def write_shapes(folder: Path, count: int, size: int = 24, seed: int = 0) -> Path:
    """Write `count` pictures each of red circles, green squares and blue triangles on dark ground; return the folder."""
    draw = random.Random(seed)
    for number, kind in enumerate(("circle", "square", "triangle")):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            image = Image.new("RGB", (size, size), tuple(draw.randrange(90) for _ in range(3)))
            colour = [draw.randrange(60) for _ in range(3)]
            colour[number] = draw.randrange(150, 256)
            side = draw.randrange(size // 3, 2 * size // 3)
            x, y = draw.randrange(size - side), draw.randrange(size - side)
            pen = ImageDraw.Draw(image)
            if kind == "circle":
                pen.ellipse((x, y, x + side, y + side), fill=tuple(colour))
            elif kind == "square":
                pen.rectangle((x, y, x + side, y + side), fill=tuple(colour))
            else:
                pen.polygon([(x, y + side), (x + side, y + side), (x + side // 2, y)], fill=tuple(colour))
            image.save(folder / kind / f"{i:03d}.png")
    return folder


def write_noise(path: Path, count: int = 40, size: int = 14, classes: int = 7) -> Path:
    """Write noise with labels as an .npz; return the file."""
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    np.savez(path, images=images, labels=np.arange(count) % classes)
    return path
