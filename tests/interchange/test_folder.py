"""Hugging Face folders that are damaged, lie, or hold code: one clear line, and nothing is run."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dufu.config.instantiate import instantiate
from dufu.config.lazy import as_config
from dufu.errors import CheckpointError, DufuError
from dufu.interchange.folder import open_folder
from dufu.interchange.source import ForeignWeights
from dufu.models.hf import complete, describe_folder, family_of
from dufu.parallel.region import whole_region
from tests.interchange.made import VOCAB, make
from tests.models.foreign import shapes_of
from tests.small import dufu

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folder") / "llama"
    make(folder)
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in good.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    """Read every weight, as a rank that holds everything does."""
    described = describe_folder(folder)
    with torch.device("meta"):
        model = instantiate(as_config({"_target_": described.target, "cfg": described.cfg}))
    shapes = shapes_of(model)
    table = family_of(described.target).table(described.target, complete(described.target, described.cfg))
    source = ForeignWeights(open_folder(folder), table, shapes)
    source.compare(shapes)
    found = {}
    for name, shape in shapes.items():
        found[name] = torch.empty(whole_region(shape).numel)
        source.read(name, shape, whole_region(shape), found[name])
    return found


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def first_shard(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[0]


def truncate(folder: Path) -> None:
    path = first_shard(folder)
    path.write_bytes(path.read_bytes()[:-100])


def garbage(folder: Path) -> None:
    first_shard(folder).write_bytes(struct.pack("<Q", 1 << 50) + b"{}")


def lose_shard(folder: Path) -> None:
    first_shard(folder).unlink()


def wrong_index(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    placed = json.loads(path.read_text())["weight_map"]
    files = sorted(set(placed.values()))
    name = next(name for name, file in placed.items() if file == files[0])
    edit(path, weight_map={**placed, name: files[1]})


def index_beyond(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    placed = json.loads(path.read_text())["weight_map"]
    edit(path, weight_map={**placed, "model.ghost": "../../elsewhere.safetensors"})


def change_tensor(folder: Path, change: Any) -> None:
    path = first_shard(folder)
    state = load_file(path)
    save_file(change(state), path)


def nan(folder: Path) -> None:
    def spoil(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        next(iter(state.values())).view(-1)[3] = float("nan")
        return state

    change_tensor(folder, spoil)


def eight_bits(folder: Path) -> None:
    change_tensor(folder, lambda state: {name: value.to(torch.float8_e4m3fn) for name, value in state.items()})


def lie(folder: Path) -> None:
    edit(folder / "config.json", intermediate_size=64)


def lie_about_heads(folder: Path) -> None:
    edit(folder / "config.json", num_key_value_heads=4)


def no_size(folder: Path) -> None:
    edit(folder / "config.json", hidden_size=-3)


def scaling(folder: Path) -> None:
    edit(folder / "config.json", rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0]})


def unknown(folder: Path) -> None:
    edit(folder / "config.json", secret_multiplier=2.0)


def no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def other_type(folder: Path) -> None:
    edit(folder / "config.json", model_type="lama")


BAD = [
    (truncate, "not a whole safetensors file"), (garbage, "not a whole safetensors file"), (lose_shard, "does not hold"),
    (wrong_index, "does not fit its files"), (index_beyond, "which is not beside it"), (nan, "no finite numbers"),
    (eight_bits, "F8_E4M3"), (lie, "instead of [64, 32]"), (lie_about_heads, "k_proj.weight is [16, 32] instead of [32, 32]"),
    (no_size, "hidden_size=-3"), (scaling, "rope_type='longrope'"), (unknown, "secret_multiplier=2.0"), (no_json, "not readable as JSON"),
    (other_type, "did you mean"),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "said"), BAD, ids=[spoil.__name__ for spoil, _ in BAD])
def test_a_bad_folder_is_one_clear_line(spoil: Any, said: str, folder: Path) -> None:
    spoil(folder)
    with pytest.raises(DufuError) as caught:
        read_all(folder)
    assert said in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_pickle_bomb_does_not_go_off(folder: Path, tmp_path: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    torch.save({"model.norm.weight": torch.ones(32), "x": Bomb(tmp_path / "boom")}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="would run code"):
        read_all(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "boom")))
    with pytest.raises(CheckpointError):
        read_all(folder)
    assert not (tmp_path / "boom").exists()


def test_pytorch_files_are_read_as_the_others_are(good: Path, folder: Path) -> None:
    state: dict[str, torch.Tensor] = {}
    for path in folder.glob("model-*.safetensors"):
        state.update(load_file(path))
        path.unlink()
    (folder / "model.safetensors.index.json").unlink()
    names = sorted(state)
    for number, part in enumerate((names[::2], names[1::2]), 1):
        torch.save({name: state[name] for name in part}, folder / f"pytorch_model-0000{number}-of-00002.bin")
    placed = {n: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, n in enumerate(names)}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": placed}))
    one, two = read_all(good), read_all(folder)
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    (folder / "pytorch_model.bin.index.json").unlink()
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)  # as it was before 2020
    assert all(torch.equal(value, read_all(folder)[name]) for name, value in one.items())


@pytest.mark.parametrize(
    ("spoil", "verb", "said"),
    [
        (truncate, "generate", "not a whole safetensors file"),
        (lie, "eval", "instead of [64, 32]"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "generate", "holds no tokenizer"),
        (lambda folder: edit(folder / "config.json", vocab_size=VOCAB - 9), "export", "embed_tokens.weight is"),
    ],
    ids=["truncated", "lying", "no tokenizer", "vocabulary"],
)
def test_the_command_line_says_so_and_ends_with_2(spoil: Any, verb: str, said: str, folder: Path, corpus: Path) -> None:
    spoil(folder)
    arguments = {
        "generate": ["generate", str(folder), "--prompt", "a"],
        "eval": ["eval", str(folder), "--data", str(corpus)],
        "export": ["export", "hf", str(folder), str(folder) + "-out"],
    }[verb]
    done = dufu(*arguments)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error:")
    assert said in done.stderr
    assert not Path(str(folder) + "-out").exists()


def test_a_tokenizer_of_more_words_than_the_model_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    make(folder)
    text = json.loads((folder / "tokenizer.json").read_text())
    text["added_tokens"].append({**text["added_tokens"][-1], "id": VOCAB, "content": "<|more|>"})
    (folder / "tokenizer.json").write_text(json.dumps(text))
    done = dufu("generate", str(folder), "--prompt", "a")
    assert done.returncode == 2
    assert f"has {VOCAB + 1} tokens" in done.stderr
