"""Samples for models of pictures: a picture with its class, in training augmented and mixed with another one."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from omegaconf import DictConfig, OmegaConf

from dufu.config.instantiate import resolve
from dufu.config.registry import register_dataset
from dufu.data.augment import Augmentation, Mixing, Pixels, check_range
from dufu.data.masking import IGNORE, Draws
from dufu.data.picture_files import PictureSource, classes_of, open_pictures
from dufu.data.picture_processor import FILE, processor_fields
from dufu.errors import ConfigError, DataError

Sample = dict[str, npt.NDArray[Any]]
_MIXING = 0x5EED_0F_317  # sets the draws for mixtures apart from those of single pictures


@register_dataset("pictures")
class PictureDataset:
    """Labelled pictures: of a folder with a sub-folder for each class, of an `.npz` (`images`, `labels`), or of a binary CIFAR file.

    Everything random is a function of (seed, epoch, sample): so is the picture that one is mixed with, any one of the same split, as it
    is itself drawn in that epoch. Evaluation sees every picture whole, or its middle. See Augmentation and Mixing.

    Args:
        source: pictures, from `open_pictures`.
        first_document, last_document: the split, as a half-open range of the source's pictures.
        classes: names of the classes, in the order of the model's scores; None in a config = those of the training data.
        img_size: side length; None in a config = the model's.
        channels: colours; None in a config = the model's in_chans.
        tokens: of a sample; None in a config = what the model makes of a picture.
        training: whether `item` augments.
        crop, crop_scale, crop_ratio, crop_share, resample, flip, color_jitter, rand_augment, rand_augment_magnitude, erase: see Augmentation.
        mean, std: of each colour, from 0 to 1.
        mixup, cutmix: see Mixing.
        broken: whether a picture that cannot be decoded ends the run ("refuse") or is a sample that scores nothing ("skip"), and is counted.
        seed: of all draws.

    Raises:
        ConfigError: an option is out of range. DataError: the split is empty, or has a class that the model does not know.
    """

    def __init__(
        self,
        source: PictureSource,
        first_document: int,
        last_document: int,
        classes: list[str] | None = None,
        img_size: int | None = None,
        channels: int | None = None,
        tokens: int | None = None,
        training: bool = True,
        crop: Literal["random_resized", "padded", "none"] = "random_resized",
        crop_scale: Sequence[float] = (0.08, 1.0),
        crop_ratio: Sequence[float] = (0.75, 1.3333333333333333),
        crop_share: float | None = 0.875,
        resample: Literal["bicubic", "bilinear"] = "bicubic",
        flip: float = 0.5,
        color_jitter: float = 0.0,
        rand_augment: int = 0,
        rand_augment_magnitude: float = 9.0,
        erase: float = 0.0,
        mean: Sequence[float] = (0.485, 0.456, 0.406),
        std: Sequence[float] = (0.229, 0.224, 0.225),
        mixup: float = 0.0,
        cutmix: float = 0.0,
        broken: Literal["refuse", "skip"] = "refuse",
        seed: int = 1234,
    ) -> None:
        for name, value in (("img_size", img_size), ("tokens", tokens)):
            if value is None or value < 1:
                raise ConfigError(f"dataloader.dataset.{name}={value}: at least 1")
        assert img_size is not None and tokens is not None
        if broken not in ("refuse", "skip"):
            raise ConfigError(f'dataloader.dataset.broken="{broken}": "refuse" or "skip"')
        if first_document >= last_document:
            raise DataError(f"{source.prefix}: the split holds no picture")
        self.source, self.first, self.size = source, first_document, last_document - first_document
        self.tokens, self.training, self.seed, self.skips = tokens, training, seed, broken == "skip"
        self.augmentation = Augmentation(
            img_size, 3 if channels is None else channels, tuple(map(float, mean)), tuple(map(float, std)), crop_share, crop,
            check_range("crop_scale", crop_scale), check_range("crop_ratio", crop_ratio), flip, color_jitter, rand_augment,
            rand_augment_magnitude, erase, resample,
        )  # fmt: skip
        self.mixing = Mixing(mixup, cutmix)
        known = {name: number for number, name in enumerate(source.classes if classes is None else classes)}
        unknown = [name for name in source.classes if name not in known]
        if unknown:
            raise DataError(
                f"{source.prefix}: class {unknown[0]!r} is none of the model's {len(known)} ({', '.join(list(known)[:8])}); "
                f"dataloader.dataset.classes lists them"
            )
        self._number_of = [known[name] for name in source.classes]
        self.skipped: set[int] = set()  # pictures that could not be decoded
        described = [
            source.fingerprint,
            first_document,
            last_document,
            list(known),
            repr(self.augmentation),
            repr(self.mixing),
            tokens,
            seed,
        ]
        self.fingerprint = hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]
        self._stream = int(hashlib.sha256(f"{source.fingerprint} {first_document}".encode()).hexdigest()[:16], 16)

    @staticmethod
    def open_source(path: str) -> PictureSource:
        """Open what `dataloader.data` names."""
        return open_pictures(path)

    @staticmethod
    def complete_config(config: DictConfig) -> None:
        """Fill in what follows from elsewhere: the shape of a sample from the model, the classes from the data.

        Raises:
            ConfigError: the model takes no pictures, or fewer classes than there are. DataError: the data cannot be read.
        """
        target = resolve(config.model["_target_"])
        if not hasattr(target, "picture_tokens"):
            raise ConfigError(f"dataloader.dataset=pictures, but {config.model['_target_']} takes none; choose a model such as vit")
        cfg, dataset = config.model.cfg, config.dataloader.dataset
        parameters = inspect.signature(target.__init__).parameters
        whole = {**{n: p.default for n, p in parameters.items()}, **OmegaConf.to_container(cfg, resolve=True)}  # type: ignore[dict-item]
        made = {"img_size": whole["img_size"], "channels": whole.get("in_chans", 3), "tokens": target.picture_tokens(whole)}
        for name, value in made.items():
            if dataset.get(name) is None:
                OmegaConf.update(config, f"dataloader.dataset.{name}", value, force_add=True)
            elif dataset[name] != value:
                raise ConfigError(
                    f"dataloader.dataset.{name}={dataset[name]}, but the model takes {value}; set it to that, or to null"
                )
        if dataset.get("classes") is None and config.dataloader.data:
            OmegaConf.update(config, "dataloader.dataset.classes", classes_of(list(config.dataloader.data)), force_add=True)
        if dataset.get("classes") is None or "num_classes" not in parameters:
            return
        if cfg.get("num_classes") is None:
            OmegaConf.update(config, "model.cfg.num_classes", len(dataset.classes), force_add=True)
        elif cfg.num_classes < len(dataset.classes):
            raise ConfigError(
                f"model.cfg.num_classes={cfg.num_classes}, but the data have {len(dataset.classes)} classes; set it to null"
            )

    @staticmethod
    def foreign_files(config: DictConfig) -> dict[str, dict[str, Any]]:
        """Return what a Hugging Face folder says of pictures: in config.json the classes, and how a picture is made ready."""
        dataset = config.dataloader.dataset
        side, share = int(dataset.img_size), dataset.get("crop_share", 0.875)
        classes = [str(name) for name in dataset.classes]
        named = dict(enumerate(classes)) | {i: f"LABEL_{i}" for i in range(len(classes), int(config.model.cfg.num_classes))}
        files: dict[str, dict[str, Any]] = {
            "config.json": {
                "id2label": {str(i): name for i, name in named.items()},
                "label2id": {name: i for i, name in named.items()},
            }
        }
        if dataset.channels != 3:  # transformers' processors do not make pictures grey
            return files
        defaults = inspect.signature(PictureDataset.__init__).parameters
        mean, std = (list(map(float, dataset.get(name, defaults[name].default))) for name in ("mean", "std"))
        files[FILE] = processor_fields(side, share, dataset.get("resample", "bicubic"), mean, std)
        return files

    @staticmethod
    def write_made_up(folder: Path, config: DictConfig) -> Path:
        """Write seeded noise as labelled pictures, for comparing layouts without data; return the file."""
        draw, path, cfg = np.random.default_rng(int(config.train.seed)), folder / "made_up.npz", config.model.get("cfg") or {}
        side, classes = int(cfg.get("img_size", 224)) + 3, int(cfg.get("num_classes") or 10)
        labels = draw.integers(0, classes, 48)
        labels[0] = classes - 1
        np.savez(path, images=draw.integers(0, 256, (48, side, side, 3), dtype=np.uint8), labels=labels)
        return path

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        """Return a picture as evaluation sees it: input_ids (tokens,), pixels (channels, img_size, img_size), class_labels ()."""
        pixels, label = self._picture(index, None)
        return self._sample(pixels, label)

    def item(self, index: int, epoch: int) -> Sample:
        """Return a sample of an epoch; a mixture has mixed_labels () and mixed_share () too."""
        if not self.training:
            return self[index]
        pixels, label = self._picture(index, epoch)
        sample = self._sample(pixels, label)
        if self.mixing:
            draws = Draws(self.seed, self._stream ^ _MIXING, epoch, index)
            other, other_label = self._picture(draws.below(self.size), epoch)
            share = 1.0
            if IGNORE not in (label, other_label):
                sample["pixels"], share = self.mixing(pixels, other, draws)
            sample["mixed_labels"] = np.array(label if share == 1.0 else other_label, np.int64)
            sample["mixed_share"] = np.array(share, np.float32)
        return sample

    def _sample(self, pixels: Pixels, label: int) -> Sample:
        return {"input_ids": np.arange(self.tokens, dtype=np.int64), "pixels": pixels, "class_labels": np.array(label, np.int64)}

    def _picture(self, index: int, epoch: int | None) -> tuple[Pixels, int]:
        """Return a picture and its class; one that is broken and skipped is blank and scores nothing."""
        place = self.first + index
        try:
            image = self.source.read(place)
        except DataError as error:
            if not self.skips:
                raise DataError(f"{error}; set dataloader.dataset.broken=skip to go on without it") from None
            if place not in self.skipped:
                self.skipped.add(place)
                print(f"warning: {error}; skipped, {len(self.skipped)} so far", file=sys.stderr, flush=True)
            side = self.augmentation.img_size
            return np.zeros((self.augmentation.channels, side, side), np.float32), IGNORE
        label = self._number_of[self.source.label(place)]
        if epoch is None:
            return self.augmentation.plain(image), label
        return self.augmentation.drawn(image, Draws(self.seed, self._stream, epoch, index)), label


__all__ = ["PictureDataset"]
