"""Pictures made ready for a model: scaled and cropped, and in training changed at random.

What is drawn for a picture comes from its own stream of numbers (`Draws`), so that it is a function of (seed, epoch, sample) and the same
in every layout and after resuming. Decoded pictures are changed by Pillow; mixing works on what the model sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from dufu.data.masking import Draws
from dufu.data.picture_files import pillow
from dufu.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = npt.NDArray[np.float32]
_ATTEMPTS = 10  # at a random crop of the wanted area and ratio, before the largest one in the middle is taken
_LARGEST = 10.0  # magnitude of a random operation
_GREY = 128  # what lies beyond the edge of a turned or shifted picture


def _where(name: str) -> str:
    return f"dataloader.dataset.{name}"


def check_share(name: str, value: float) -> None:
    """Raise ConfigError where a setting is no share."""
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"{_where(name)}={value}: from 0 to 1")


def check_range(name: str, value: Sequence[float]) -> tuple[float, float]:
    """Return two positive numbers in order.

    Raises:
        ConfigError: they are not.
    """
    if len(value) != 2 or not 0.0 < value[0] <= value[1]:
        raise ConfigError(f"{_where(name)}={list(value)}: two positive numbers, the smaller one first")
    return float(value[0]), float(value[1])


@dataclass(frozen=True)
class Augmentation:
    """How a picture becomes the model's input.

    Args:
        img_size: side length of the result.
        channels: colours of the result, 3 or 1.
        mean, std: of each colour, from 0 to 1: x becomes (x - mean) / std.
        crop_share: in evaluation the middle square is this share of the shorter side; None = the whole picture, made a square.
        crop: in training: a stretch of random area and ratio ("random_resized"), a random place of the picture with a black edge
            of an eighth of its side ("padded"), or as in evaluation ("none").
        crop_scale, crop_ratio: of "random_resized", the area as a share of the picture's, and the ratio of width and height.
        flip: probability of turning left and right round.
        color_jitter: brightness, contrast and saturation change by a factor of up to 1 ± this.
        rand_augment: operations chosen at random (Cubuk et al., "RandAugment", 2019); 0 = none.
        rand_augment_magnitude: their strength, from 0 to 10.
        erase: probability of blanking a rectangle (Zhong et al., "Random erasing", 2017).
        resample: how a picture is scaled.

    Raises:
        ConfigError: a setting that cannot be.
    """

    img_size: int
    channels: int = 3
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    crop_share: float | None = 0.875
    crop: Literal["random_resized", "padded", "none"] = "random_resized"
    crop_scale: tuple[float, float] = (0.08, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    color_jitter: float = 0.0
    rand_augment: int = 0
    rand_augment_magnitude: float = 9.0
    erase: float = 0.0
    resample: Literal["bicubic", "bilinear"] = "bicubic"

    def __post_init__(self) -> None:
        if self.channels not in (1, 3):
            raise ConfigError(f"{_where('channels')}={self.channels}: 3, or 1 for grey pictures")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, self.channels):
                raise ConfigError(f"{_where(name)}={list(values)}: one number, or one for each of {self.channels} colours")
        if min(self.std) <= 0:
            raise ConfigError(f"{_where('std')}={list(self.std)}: above 0")
        if self.crop_share is not None and not 0.0 < self.crop_share <= 1.0:
            raise ConfigError(f"{_where('crop_share')}={self.crop_share}: above 0 to 1, or null")
        if self.crop not in ("random_resized", "padded", "none"):
            raise ConfigError(f'{_where("crop")}="{self.crop}": one of random_resized, padded, none')
        if self.resample not in ("bicubic", "bilinear"):
            raise ConfigError(f'{_where("resample")}="{self.resample}": bicubic or bilinear')
        for name in ("flip", "color_jitter", "erase"):
            check_share(name, getattr(self, name))
        if self.rand_augment < 0 or not 0.0 <= self.rand_augment_magnitude <= _LARGEST:
            raise ConfigError(
                f"{_where('rand_augment')}={self.rand_augment}, rand_augment_magnitude={self.rand_augment_magnitude}: at least 0, and 0 to 10"
            )

    def plain(self, image: Image) -> Pixels:
        """Return a picture as evaluation sees it: (channels, img_size, img_size)."""
        return self._values(self._middle(self._colours(image)))

    def drawn(self, image: Image, draws: Draws) -> Pixels:
        """Return a picture changed at random: (channels, img_size, img_size)."""
        image = self._cropped(self._colours(image), draws)
        if draws.uniform(1)[0] < self.flip:
            image = image.transpose(pillow().Transpose.FLIP_LEFT_RIGHT)
        if self.color_jitter:
            image = _jittered(image, self.color_jitter, draws)
        for _ in range(self.rand_augment):
            image = _changed(image, self.rand_augment_magnitude / _LARGEST, draws)
        pixels = self._values(image)
        if self.erase and draws.uniform(1)[0] < self.erase:
            top, left, height, width = _stretch(self.img_size, self.img_size, (0.02, 1 / 3), (0.3, 1 / 0.3), draws)
            pixels[:, top : top + height, left : left + width] = 0.0  # the mean colour
        return pixels

    def _colours(self, image: Image) -> Image:
        return image.convert("L" if self.channels == 1 else "RGB")

    def _values(self, image: Image) -> Pixels:
        values = np.asarray(image, np.float32) / np.float32(255.0)
        values = values[None] if values.ndim == 2 else values.transpose(2, 0, 1)
        mean, std = (np.array(v, np.float32).reshape(-1, 1, 1) for v in (self.mean, self.std))
        return np.ascontiguousarray((values - mean) / std)

    def _scaled(self, image: Image, box: tuple[float, float, float, float]) -> Image:
        size = (self.img_size, self.img_size)
        if box == (0, 0, *image.size) and image.size == size:
            return image
        return image.resize(size, getattr(pillow().Resampling, self.resample.upper()), box=box)

    def _middle(self, image: Image) -> Image:
        width, height = image.size
        if self.crop_share is None:
            return self._scaled(image, (0, 0, width, height))
        side = min(width, height) * self.crop_share
        left, top = (width - side) / 2, (height - side) / 2
        return self._scaled(image, (left, top, left + side, top + side))

    def _cropped(self, image: Image, draws: Draws) -> Image:
        if self.crop == "none":
            return self._middle(image)
        if self.crop == "random_resized":
            width, height = image.size
            top, left, rows, columns = _stretch(height, width, self.crop_scale, self.crop_ratio, draws)
            return self._scaled(image, (left, top, left + columns, top + rows))
        image, edge = self._middle(image), self.img_size // 8
        wide = pillow().new(image.mode, (self.img_size + 2 * edge, self.img_size + 2 * edge))
        wide.paste(image, (edge, edge))
        left, top = draws.below(2 * edge + 1), draws.below(2 * edge + 1)
        cut: Image = wide.crop((left, top, left + self.img_size, top + self.img_size))
        return cut


def _stretch(
    height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float], draws: Draws
) -> tuple[int, int, int, int]:
    """Return (top, left, height, width) of a random rectangle of an area and a ratio in given ranges."""
    for area_draw, ratio_draw, across, down in draws.uniform(4 * _ATTEMPTS).reshape(-1, 4):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * area_draw)
        shape = math.exp(math.log(ratio[0]) + (math.log(ratio[1]) - math.log(ratio[0])) * ratio_draw)
        columns, rows = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < columns <= width and 0 < rows <= height:
            return int(down * (height - rows + 1)), int(across * (width - columns + 1)), rows, columns
    columns, rows = min(width, max(1, round(height * ratio[1]))), min(height, max(1, round(width / ratio[0])))
    return (height - rows) // 2, (width - columns) // 2, rows, columns


def _enhanced(image: Image, what: str, factor: float) -> Image:
    from PIL import ImageEnhance

    changed: Image = getattr(ImageEnhance, what)(image).enhance(factor)
    return changed


def _jittered(image: Image, most: float, draws: Draws) -> Image:
    kinds = ("Brightness", "Contrast", "Color")
    factors = 1.0 + most * (2.0 * draws.uniform(3) - 1.0)
    for place in draws.order(3):
        image = _enhanced(image, kinds[place], float(factors[place]))
    return image


def _affine(image: Image, matrix: tuple[float, ...]) -> Image:
    module = pillow()
    fill: Any = _GREY if image.mode == "L" else (_GREY,) * 3
    return image.transform(image.size, module.Transform.AFFINE, matrix, resample=module.Resampling.BILINEAR, fillcolor=fill)


def _rotated(image: Image, degrees: float) -> Image:
    fill: Any = _GREY if image.mode == "L" else (_GREY,) * 3
    return image.rotate(degrees, pillow().Resampling.BILINEAR, fillcolor=fill)


def _operated(image: Image, what: str, *arguments: Any) -> Image:
    from PIL import ImageOps

    changed: Image = getattr(ImageOps, what)(image, *arguments)
    return changed


# Each takes the picture and a strength from -1 to 1 (or its size, where the sign means nothing).
_OPERATIONS: tuple[tuple[str, Callable[[Any, float], Any]], ...] = (
    ("identity", lambda image, strength: image),
    ("autocontrast", lambda image, strength: _operated(image, "autocontrast")),
    ("equalize", lambda image, strength: _operated(image, "equalize")),
    ("posterize", lambda image, strength: _operated(image, "posterize", 8 - round(4 * abs(strength)))),
    ("solarize", lambda image, strength: _operated(image, "solarize", 256 - round(256 * abs(strength)))),
    ("rotate", lambda image, strength: _rotated(image, 30.0 * strength)),
    ("color", lambda image, strength: _enhanced(image, "Color", 1.0 + 0.9 * strength)),
    ("contrast", lambda image, strength: _enhanced(image, "Contrast", 1.0 + 0.9 * strength)),
    ("brightness", lambda image, strength: _enhanced(image, "Brightness", 1.0 + 0.9 * strength)),
    ("sharpness", lambda image, strength: _enhanced(image, "Sharpness", 1.0 + 0.9 * strength)),
    ("shear_x", lambda image, strength: _affine(image, (1.0, 0.3 * strength, 0.0, 0.0, 1.0, 0.0))),
    ("shear_y", lambda image, strength: _affine(image, (1.0, 0.0, 0.0, 0.3 * strength, 1.0, 0.0))),
    ("translate_x", lambda image, strength: _affine(image, (1.0, 0.0, 0.45 * strength * image.size[0], 0.0, 1.0, 0.0))),
    ("translate_y", lambda image, strength: _affine(image, (1.0, 0.0, 0.0, 0.0, 1.0, 0.45 * strength * image.size[1]))),
)


def _changed(image: Image, strength: float, draws: Draws) -> Image:
    """Apply one operation at random."""
    _, operation = _OPERATIONS[draws.below(len(_OPERATIONS))]
    sign = -1.0 if draws.below(2) else 1.0
    changed: Image = operation(image, sign * strength)
    return changed


def beta(alpha: float, draws: Draws) -> float:
    """Return a number from the distribution Beta(alpha, alpha) (Jöhnk, 1964)."""
    while True:
        first, second = np.log1p(-draws.uniform(2)) / alpha
        top = max(first, second)
        if top + math.log(math.exp(first - top) + math.exp(second - top)) <= 0.0:
            return float(1.0 / (1.0 + math.exp(min(700.0, second - first))))


@dataclass(frozen=True)
class Mixing:
    """Two pictures and their labels as one sample: mixup (Zhang et al., 2017) and CutMix (Yun et al., 2019).

    Args:
        mixup, cutmix: the parameter of each one's Beta distribution; 0 = not used. Of two each has half of the samples.

    Raises:
        ConfigError: a negative or too large parameter.
    """

    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        for name in ("mixup", "cutmix"):
            if not 0.0 <= getattr(self, name) <= 8.0:  # beyond, drawing takes ever longer, and shares are near a half anyway
                raise ConfigError(f"{_where(name)}={getattr(self, name)}: from 0 to 8")

    def __bool__(self) -> bool:
        return bool(self.mixup or self.cutmix)

    def __call__(self, pixels: Pixels, other: Pixels, draws: Draws) -> tuple[Pixels, float]:
        """Return the mixture of two pictures (C, S, S), and the first one's share of it."""
        cut = bool(self.cutmix) and (not self.mixup or draws.below(2) == 1)
        share = beta(self.cutmix if cut else self.mixup, draws)
        if not cut:
            kept = np.float32(share)
            return kept * pixels + (np.float32(1.0) - kept) * other, float(kept)
        size = pixels.shape[-1]
        half = math.sqrt(1.0 - share) * size / 2
        down, across = draws.uniform(2) * size
        top, bottom = round(max(0.0, down - half)), round(min(float(size), down + half))
        left, right = round(max(0.0, across - half)), round(min(float(size), across + half))
        mixed = pixels.copy()
        mixed[:, top:bottom, left:right] = other[:, top:bottom, left:right]
        return mixed, 1.0 - (bottom - top) * (right - left) / size**2


__all__ = ["Augmentation", "Mixing", "Pixels", "beta"]
