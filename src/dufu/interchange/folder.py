"""A Hugging Face folder's weights: one file or many, safetensors or PyTorch's own."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from dufu.errors import CheckpointError
from dufu.interchange.tensor_file import PickledFile, SafetensorsFile, TensorFile

# name of the single file, name of the index of many
_FORMS = (("model.safetensors", "model.safetensors.index.json"), ("pytorch_model.bin", "pytorch_model.bin.index.json"))


def is_folder(path: Path) -> bool:
    """Say whether a path is a Hugging Face folder."""
    return (path / "config.json").is_file()


def open_file(path: Path, within: tuple[str, ...] = ()) -> TensorFile:
    """Return a file of tensors by its name's end."""
    return SafetensorsFile(path) if path.suffix == ".safetensors" else PickledFile(path, within)


class Tensors:
    """The named tensors of several files.

    Args:
        where: the folder, for messages.
        files: no name may occur twice.

    Raises:
        CheckpointError: one does.
    """

    def __init__(self, where: Path, files: list[TensorFile]) -> None:
        self.where = where
        self._file: dict[str, TensorFile] = {}
        for file in files:
            for name in file.names():
                if name in self._file:
                    raise CheckpointError(f"{where}: {name} is in {self._file[name].path.name} and in {file.path.name}")
                self._file[name] = file

    def names(self) -> list[str]:
        """Return all names."""
        return list(self._file)

    def __contains__(self, name: str) -> bool:
        """Say whether there is a tensor of that name."""
        return name in self._file

    def file(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self._file[name].path

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self._file[name].shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's type."""
        return self._file[name].dtype(name)

    def rows(self, name: str, first: int, count: int, scratch: Tensor | None = None) -> Tensor:
        """Read rows of a tensor; see TensorFile."""
        return self._file[name].rows(name, first, count, scratch)

    def read_into(self, name: str, first: int, out: Tensor) -> bool:
        """Read rows straight into a matrix where that is possible: the file is of the matrix's type and the matrix lies in one piece."""
        file = self._file[name]
        if (
            not isinstance(file, SafetensorsFile)
            or file.dtype(name) != out.dtype
            or not out.is_contiguous()
            or out.device.type != "cpu"
        ):
            return False
        file.read_into(name, first, out)
        return True


def open_folder(folder: Path) -> Tensors:
    """Return the tensors of a Hugging Face folder.

    Raises:
        CheckpointError: there are none; a file is missing, cut short, or holds code; the index names what is not there.
    """
    for single, index in _FORMS:
        if (folder / index).is_file():
            return _indexed(folder, folder / index)
        if (folder / single).is_file():
            return Tensors(folder, [open_file(folder / single)])
    names = ", ".join(name for form in _FORMS for name in form)
    raise CheckpointError(f"{folder}: holds no weights (none of {names})")


def _indexed(folder: Path, index: Path) -> Tensors:
    try:
        placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = {str(name): str(file) for name, file in placed.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not an index of weights ({type(error).__name__}: {error})") from None
    wanted = sorted(set(names.values()))
    outside = [name for name in wanted if Path(name).name != name]
    if outside:
        raise CheckpointError(f"{index}: names {outside[0]}, which is not beside it")
    absent = [name for name in wanted if not (folder / name).is_file()]
    if absent:
        raise CheckpointError(f"{index}: names {', '.join(absent[:4])}, which {folder} does not hold")
    files = [open_file(folder / name) for name in wanted]
    tensors = Tensors(folder, files)
    wrong = [name for name, file in names.items() if name not in tensors or tensors.file(name).name != file]
    wrong += [f"{name} (in {tensors.file(name).name}, not in the index)" for name in tensors.names() if name not in names]
    if wrong:
        more = f" and {len(wrong) - 6} more" if len(wrong) > 6 else ""
        raise CheckpointError(f"{index}: does not fit its files: {', '.join(wrong[:6])}{more}")
    return tensors
