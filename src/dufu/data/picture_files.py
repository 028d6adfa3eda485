"""Where labelled pictures lie: a folder with a sub-folder for each class, arrays in an `.npz`, or CIFAR's binary files.

Nothing is unpickled. The pictures of a source have a fixed order of their own, a permutation of what lies on the disk, so that a
contiguous share of them (a split) holds pictures of all classes.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dufu.data.permutation import permute
from dufu.errors import ConfigError, DataError

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_ORDER = 0x9C7E5  # the seed of every source's own order
_CIFAR = {3073: ("CIFAR-10", 1, 10), 3074: ("CIFAR-100", 2, 100)}  # bytes of a record: its name, label bytes, classes
_SPLIT_NAMES = {"train", "training", "val", "valid", "validation", "test"}


def pillow() -> Any:
    """Return Pillow's Image module.

    Raises:
        ConfigError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError("pictures need Pillow; install dufu[pictures]") from None
    return Image


class PictureSource:
    """Labelled pictures of one folder or file.

    Args:
        path: what was given.
        classes: their names.
        labels: (N,) class of each picture, as they lie on the disk.
        fingerprint: of what decides the pictures.
    """

    least = 1  # what a split needs

    def __init__(self, path: Path, classes: Sequence[str], labels: npt.NDArray[np.int64], fingerprint: str) -> None:
        self.prefix, self.classes, self.fingerprint = str(path), list(classes), fingerprint
        self._labels = labels
        self._order = permute(np.arange(len(labels), dtype=np.int64), len(labels), _ORDER, 0)

    @property
    def document_count(self) -> int:
        """Return the number of pictures."""
        return len(self._labels)

    def document_start(self, number: int) -> int:
        """Return the place of a picture, counted in pictures."""
        return number

    def label(self, number: int) -> int:
        """Return the class of picture `number` in the source's own order."""
        return int(self._labels[self._order[number]])

    def read(self, number: int) -> Image:
        """Return picture `number` in the source's own order.

        Raises:
            DataError: it cannot be decoded; the message names it.
        """
        return self._decode(int(self._order[number]))

    def _decode(self, place: int) -> Image:
        raise NotImplementedError


class PictureFolder(PictureSource):
    """A folder with a sub-folder for each class; class numbers follow the sorted names."""

    def __init__(self, path: Path) -> None:
        classes = class_folders(path)
        self.files: list[Path] = []
        labels: list[int] = []
        digest = hashlib.sha256()
        for number, name in enumerate(classes):
            found = sorted(_pictures_below(path / name))
            if not found:
                raise DataError(f"{path / name}: no picture; each sub-folder is a class and holds pictures")
            self.files += found
            labels += [number] * len(found)
            for file in found:
                digest.update(f"{file.relative_to(path).as_posix()}\0{file.stat().st_size}\0".encode())
        super().__init__(path, classes, np.array(labels, np.int64), digest.hexdigest()[:16])

    def _decode(self, place: int) -> Image:
        module, file = pillow(), self.files[place]
        try:
            with module.open(file) as image:
                image.load()
                return image.copy()
        except (OSError, SyntaxError, ValueError, EOFError, module.DecompressionBombError) as error:
            raise DataError(f"{file}: not readable as a picture ({error})") from None


class PictureArrays(PictureSource):
    """Pictures as an array (N, height, width[, colours]) of bytes."""

    def __init__(
        self, path: Path, images: npt.NDArray[np.uint8], labels: npt.NDArray[np.int64], classes: Sequence[str], planar: bool = False
    ) -> None:
        digest = hashlib.sha256(np.ascontiguousarray(labels).tobytes())
        digest.update(repr(images.shape).encode())
        for place in sorted({0, len(images) // 2, len(images) - 1}):
            digest.update(np.ascontiguousarray(images[place]).tobytes())
        self.images, self.planar = images, planar
        super().__init__(path, classes, labels, digest.hexdigest()[:16])

    def _decode(self, place: int) -> Image:
        array = np.asarray(self.images[place])
        if self.planar:
            array = array.reshape(3, 32, 32).transpose(1, 2, 0)
        image: Image = pillow().fromarray(np.ascontiguousarray(array[..., 0] if array.shape[2:] == (1,) else array))
        return image


def class_folders(path: Path) -> list[str]:
    """Return the names of a folder's classes.

    Raises:
        DataError: there are none, pictures lie beside them, or they are a data set's splits.
    """
    names, loose = [], ""
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            names.append(entry.name)
        elif entry.name.lower().endswith(SUFFIXES):
            loose = loose or entry.name
    if loose:
        raise DataError(f"{path / loose}: lies beside the classes; put each picture into the sub-folder of its class")
    if not names:
        raise DataError(f"{path}: no sub-folder; each class needs one, with its pictures")
    if {name.lower() for name in names} <= _SPLIT_NAMES:
        raise DataError(
            f"{path}: holds {', '.join(names)}, which are splits rather than classes; give one of them, such as "
            f"--data {path / names[0]}, and the other as dataloader.valid_data"
        )
    return names


def _pictures_below(folder: Path) -> list[Path]:
    found = []
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if name.startswith("."):
                continue
            if not name.lower().endswith(SUFFIXES):
                raise DataError(f"{Path(place) / name}: no picture; known are {', '.join(SUFFIXES)}")
            found.append(Path(place) / name)
    return found


def _arrays(path: Path, wanted: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = {"images", "labels"} - set(file.files)
            if missing:
                raise DataError(f"{path}: has no array {' or '.join(sorted(missing))}; it holds {', '.join(file.files) or 'none'}")
            return {name: file[name] for name in wanted if name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: not readable as arrays; nothing is unpickled ({error})") from None


def _labels(path: Path, labels: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or (len(labels) and labels.min() < 0) or not len(labels):
        raise DataError(f"{path}: labels {labels.shape} of {labels.dtype}: one whole number of at least 0 for each picture")
    return labels.astype(np.int64)


def _open_npz(path: Path) -> PictureArrays:
    arrays = _arrays(path, ("images", "labels", "classes"))
    images, labels = arrays["images"], _labels(path, arrays["labels"])
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] not in (1, 3)):
        raise DataError(
            f"{path}: images {images.shape} of {images.dtype}: bytes of shape (N, height, width) or (N, height, width, 3)"
        )
    if len(images) != len(labels):
        raise DataError(f"{path}: {len(images)} images, but {len(labels)} labels")
    return PictureArrays(path, images, labels, _array_classes(path, arrays))


def _array_classes(path: Path, arrays: dict[str, npt.NDArray[Any]]) -> list[str]:
    count = int(_labels(path, arrays["labels"]).max()) + 1
    if "classes" not in arrays:
        return [str(number) for number in range(count)]
    names = [str(name) for name in arrays["classes"].tolist()]
    if len(names) < count or len(set(names)) < len(names):
        raise DataError(f"{path}: {len(set(names))} names of classes, but labels up to {count - 1}")
    return names


def _cifar_record(path: Path) -> tuple[int, int, int]:
    """Return (bytes of a record, label bytes, classes) of a binary file."""
    with path.open("rb") as file:
        if file.read(1) == b"\x80":
            raise DataError(f"{path}: a Python pickle, which is never unpickled; take CIFAR's binary version (.bin)")
    size = path.stat().st_size
    fits = [record for record in _CIFAR if size and size % record == 0]
    if len(fits) != 1:
        which = "both" if fits else "neither"
        raise DataError(
            f"{path}: {size} bytes are records of {which} CIFAR-10 (3073 bytes) and CIFAR-100 (3074); convert it to .npz"
        )
    return (fits[0], *_CIFAR[fits[0]][1:])


def _open_cifar(path: Path) -> PictureArrays:
    record, label_bytes, classes = _cifar_record(path)
    rows = np.memmap(path, np.uint8, "r").reshape(-1, record)
    labels = rows[:, label_bytes - 1].astype(np.int64)  # of CIFAR-100's two the fine one
    if labels.max() >= classes:
        raise DataError(f"{path}: a label {labels.max()} in a file of {classes} classes; no binary CIFAR file")
    return PictureArrays(path, rows[:, label_bytes:], labels, [str(number) for number in range(classes)], planar=True)


def open_pictures(given: str | Path) -> PictureSource:
    """Open a folder of pictures, an `.npz` with `images`, `labels` and perhaps `classes`, or a binary CIFAR file.

    Raises:
        DataError: nothing is there, or it is something else.
    """
    path = Path(given)
    if path.is_dir():
        return PictureFolder(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file or folder")
    if path.suffix == ".npz":
        return _open_npz(path)
    return _open_cifar(path)


def classes_of(given: Sequence[str | Path]) -> list[str]:
    """Return the names of the classes of several sources, without reading their pictures.

    Raises:
        DataError: as for `open_pictures`.
    """
    found: dict[str, None] = {}
    folders = True
    for path in map(Path, given):
        if path.is_dir():
            names = class_folders(path)
        elif path.is_file():
            folders = False
            if path.suffix == ".npz":
                names = _array_classes(path, _arrays(path, ("labels", "classes")))
            else:
                names = [str(number) for number in range(_cifar_record(path)[2])]
        else:
            raise DataError(f"{path}: no such file or folder")
        found.update(dict.fromkeys(names))
    return sorted(found) if folders else list(found)


__all__ = ["SUFFIXES", "PictureArrays", "PictureFolder", "PictureSource", "classes_of", "open_pictures", "pillow"]
