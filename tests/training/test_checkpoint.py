"""A checkpoint is complete or it does not exist, holds the same in every layout, and opening one executes nothing."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from dufu.config.schema import defaults
from tests.pool import Ranks
from tests.small import metrics
from tests.training.trials import again, one_epoch_of_24_samples, run, steps

ZERO3 = ["train.zero_optimization.enabled=true", "train.zero_optimization.stage=3"]
TP2 = ["train.dist.tensor_parallel_size=2"]
SHORT = ["dataloader.split=[1.0]", "train.train_iter=6"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return one_epoch_of_24_samples(tmp_path_factory.mktemp("text") / "a.txt")


@pytest.fixture(scope="module")
def saved(ranks: Ranks, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    ranks(1, run, str(folder), str(text), [*SHORT, "train.checkpointer.period=1", "train.stop_at_step=2"])
    return folder


def copy(saved: Path, to: Path) -> Path:
    return Path(shutil.copytree(saved, to / "run"))


# A process killed at every moment of a save ---------------------------------------------------------------------------------------


def killed_at_each_moment(base: str, scratch: str) -> list[tuple[int, str, list[float]]]:
    """Kill a process at the 1st, 2nd, … file operation of its save; return the checkpoint left, and now and then resume: the losses."""
    from dufu.training.checkpoint import CheckpointReader

    found = []
    for moment in range(1, 200):
        folder = Path(shutil.copytree(base, Path(scratch) / str(moment)))
        child = os.fork()
        if child == 0:
            _die_at(str(folder), moment)
        _, status = os.waitpid(child, 0)
        left = (folder / "checkpoints" / "latest").read_text().strip()
        newest = sorted(p.name for p in (folder / "checkpoints").glob("step_???????"))[-1]
        assert (folder / "checkpoints" / left / "manifest.json").is_file()
        CheckpointReader(folder / "checkpoints" / newest)
        losses = []
        if moment % 5 == 0:
            answer = again(str(folder), ["train.stop_at_step=4"])
            assert answer.get("step") == 4, answer
            assert not [p.name for p in (folder / "checkpoints").iterdir() if "part" in p.name or "removed" in p.name]
            losses = [r["loss"] for r in metrics(folder)]
        found.append((moment, newest, losses))
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0
            break
    return found


def _die_at(folder: str, moment: int) -> None:
    count = 0

    def watch(event: str, arguments: Any) -> None:
        nonlocal count
        path = str(arguments[0]) if arguments else ""
        if event in ("open", "os.rename", "os.mkdir", "os.remove", "shutil.rmtree") and path.startswith(f"{folder}/checkpoints"):
            started = count or (event == "os.mkdir" and path.endswith(".part"))
            count += bool(started)
            if count == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    answer = again(folder, ["train.stop_at_step=3", "train.checkpointer.max_to_keep=2"])
    os._exit(0 if answer.get("step") == 3 else 1)


def test_a_process_killed_at_any_moment_of_a_save_leaves_a_complete_checkpoint(
    ranks: Ranks, saved: Path, text: Path, tmp_path: Path
) -> None:
    ranks(1, run, str(tmp_path / "whole"), str(text), [*SHORT, "train.stop_at_step=4"])
    whole = [r["loss"] for r in metrics(tmp_path / "whole")]
    (tmp_path / "scratch").mkdir()
    found = ranks(1, killed_at_each_moment, str(saved), str(tmp_path / "scratch"))[0]
    assert len(found) > 20
    assert {name for _, name, _ in found} == {"step_0000002", "step_0000003"}
    assert all(losses == whole for moment, _, losses in found if moment % 5 == 0)


# Keeping and pointing -------------------------------------------------------------------------------------------------------------


def test_keep_last_goes_by_number(tmp_path: Path) -> None:
    from dufu.training.checkpoint import prune

    for step in range(9000, 10001, 100):
        (tmp_path / f"step_{step}").mkdir()
    os.utime(tmp_path / "step_9000")
    prune(tmp_path, keep=10, best=None)
    assert sorted(int(p.name[5:]) for p in tmp_path.iterdir()) == list(range(9100, 10001, 100))


def spoil_after_6(folder: str, corpus: str) -> None:
    from dufu.training.hooks import Hook
    from dufu.training.run import train
    from tests.small import TINY

    class Spoil(Hook):
        def before_step(self, trainer: Any) -> None:
            if trainer.step == 6:
                for entry in trainer.train_step.distributed.store.entries:
                    entry.tensor.data.mul_(20.0)

    own = [
        "train.train_iter=12",
        "train.evaluation.eval_period=2",
        "train.checkpointer.period=3",
        "train.checkpointer.max_to_keep=1",
    ]
    train("gpt2_tiny", [*TINY, f"train.output_dir={folder}", *own], data=[corpus], hooks=[Spoil()])


def test_the_best_checkpoint_outlives_rotation(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    from dufu.training.checkpoint import CheckpointReader

    ranks(1, spoil_after_6, str(tmp_path), str(corpus))
    assert steps(tmp_path) == ["step_0000006", "step_0000012"]
    best = (tmp_path / "checkpoints" / "best").read_text().strip()
    assert (best, CheckpointReader(tmp_path / "checkpoints" / best).state["step"]) == ("step_0000006", 6)
    shutil.rmtree(tmp_path / "checkpoints" / best)
    ranks(1, again, str(tmp_path), ["train.train_iter=13", "train.evaluation.enabled=false"])
    assert steps(tmp_path) == ["step_0000013"]
    assert not (tmp_path / "checkpoints" / "best").exists()


# One content, any layout ----------------------------------------------------------------------------------------------------------


def whole_tensors(folder: Path) -> dict[str, Any]:
    """Return every tensor of a checkpoint, put together, and the optimizer's numbers."""
    import torch

    from dufu.parallel.parameters import Piece
    from dufu.parallel.region import whole_region
    from dufu.training.checkpoint import CheckpointReader

    reader = CheckpointReader(folder)
    found: dict[str, Any] = {"numbers": reader.state["optimizer_scalars"]}

    class Info:
        name = ""
        shape: tuple[int, ...] = ()

    for kind, name in reader.pieces:
        info = Info()
        info.name, info.shape = name, reader.shape(name)
        region = whole_region(info.shape)
        memory = torch.full((region.numel,), float("nan"))
        reader.fill(kind, Piece(info, region, 0, region.numel), memory)  # type: ignore[arg-type]
        found[f"{kind}/{name}"] = memory.tolist()
    return found


def written_again(source: str, overrides: list[str], target: str) -> None:
    """Take over a checkpoint in this layout and write it down without a step."""
    from dufu.training.hooks import Hook
    from dufu.training.run import train
    from dufu.training.writing import Writing, take_pieces

    class Rewrite(Hook):
        def before_train(self, trainer: Any) -> None:
            step = trainer.train_step
            processes = step.distributed.processes
            pieces = take_pieces(step.distributed.store, step.optimizer, processes, copy=False)
            writing = Writing(Path(target), processes, pieces, {}, "")
            writing.begin()
            writing.finish(lambda: None)
            trainer.ending = True

    train(source, overrides, resume=True, hooks=[Rewrite()])


def test_every_layout_takes_over_every_other(ranks: Ranks, text: Path, tmp_path: Path) -> None:
    ranks(4, run, str(tmp_path / "run"), str(text), [*SHORT, *ZERO3, *TP2, "train.stop_at_step=2"])
    source = tmp_path / "run" / "checkpoints" / "step_0000002"
    expected = whole_tensors(source)
    assert len([k for k in expected if k.startswith("exp_avg/")]) == len([k for k in expected if k.startswith("weight/")]) > 10
    whole = [*defaults("train.dist"), *defaults("train.zero_optimization")]
    pp2, cp2 = "train.dist.pipeline_parallel_size=2", "train.dist.context_parallel_size=2"
    hybrid = ["train.zero_optimization.enabled=true", "train.zero_optimization.stage=2", "train.zero_optimization.shard_size=2"]
    layouts: dict[str, tuple[int, list[str]]] = {
        "one": (1, []), "dp3": (3, []), "tp2": (2, TP2), "zero1": (2, ["train.zero_optimization.enabled=true"]), "zero3": (4, ZERO3),
        "pp2": (2, [pp2]), "zero3xpp2": (4, [*ZERO3, pp2]), "hybrid": (4, hybrid), "cp2": (2, [cp2]),
        "sp2xpp2": (4, [*TP2, pp2, "train.dist.sequence_parallel=true"]),
    }  # fmt: skip
    for name, (size, layout) in layouts.items():
        ranks(size, written_again, str(tmp_path / "run"), [*whole, *layout], str(tmp_path / name))
        assert whole_tensors(tmp_path / name) == expected, name
    sizes = [p.stat().st_size for p in (tmp_path / "dp3").glob("rank_*.safetensors")]
    assert len(sizes) == 3 and max(sizes) < 0.6 * sum(sizes)  # copies share the writing


def empty_piece(folder: str) -> list[float]:
    """Save and load six elements over the ranks; on four, the last one holds only padding."""
    import torch

    from dufu.parallel.build import distribute
    from dufu.parallel.layout import ParallelLayout
    from dufu.parallel.process import join, leave, world_size
    from dufu.training.checkpoint import CheckpointReader, load_optimizer, load_weights
    from dufu.training.writing import Writing, take_pieces

    processes = join(ParallelLayout(data=world_size(), zero_stage=1), torch.device("cpu"))

    def make(seed: int) -> Any:
        made = distribute(
            lambda: torch.nn.Linear(6, 1, bias=False), processes, lambda m: [{"params": list(m.parameters())}], seed=seed
        )
        return made.store, torch.optim.Adam(made.groups, lr=0.1)

    store, optimizer = make(1)
    for entry in store.entries:
        entry.tensor.grad = torch.ones_like(entry.tensor)
    optimizer.step()
    writing = Writing(Path(folder), processes, take_pieces(store, optimizer, processes, copy=False), {}, "")
    writing.begin()
    writing.finish(lambda: None)
    other, another = make(2)
    reader = CheckpointReader(folder)
    load_weights(reader, other)
    load_optimizer(reader, other, another)
    for old, new in zip(store.entries, other.entries):
        used = sum(piece.region.numel for piece in old.pieces)
        assert torch.equal(old.tensor[:used], new.tensor[:used])
        for kind, value in optimizer.state[old.tensor].items():
            if used:
                assert torch.equal(value, another.state[new.tensor][kind]), kind
    leave()
    return [sum(piece.region.numel for piece in entry.pieces) for entry in store.entries]


def test_a_rank_that_holds_only_padding_saves_and_loads(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(4, empty_piece, str(tmp_path / "step_1")) == [[2], [2], [2], [0]]


# Damage, forgery, other models ----------------------------------------------------------------------------------------------------


def seal(folder: Path) -> None:
    """Give changed files the checksums of a checkpoint that was written so."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in manifest["files"]:
        data = (folder / name).read_bytes()
        manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def future(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))


def prefixed(path: Path) -> None:
    path.write_text(path.read_text().replace('"name": "', '"name": "module.'))
    seal(path.parent)


def tied_name_lost(path: Path) -> None:
    index = json.loads(path.read_text())
    index["pieces"] = [p for p in index["pieces"] if p["name"] != "embedding.word.weight"]
    path.write_text(json.dumps(index))
    seal(path.parent)


def moments_lost(path: Path) -> None:
    index = json.loads(path.read_text())
    index["pieces"] = [p for p in index["pieces"] if not (p["kind"] == "exp_avg" and p["name"] == "embedding.word.weight")]
    path.write_text(json.dumps(index))
    seal(path.parent)


def foreign(path: Path) -> None:
    path.write_text('{"name": "an app", "icons": []}')


DAMAGE = {
    "cut": ("rank_00000.safetensors", cut, "bytes instead of"),
    "flipped": ("rank_00000.safetensors", flip, "checksum differs"),
    "flipped-state": ("state.json", flip, "checksum differs"),
    "missing": ("rank_00000.safetensors", Path.unlink, "missing, though the manifest names it"),
    "no-manifest": ("manifest.json", Path.unlink, "is no complete checkpoint"),
    "cut-manifest": ("manifest.json", cut, "not readable as JSON"),
    "foreign-manifest": ("manifest.json", foreign, "not the manifest of a dufu checkpoint"),
    "future": ("manifest.json", future, "a newer one wrote it"),
    "prefix": ("index.json", prefixed, "missing embedding.position.weight"),
    "tied": ("index.json", tied_name_lost, "missing embedding.word.weight"),
    "moments": ("index.json", moments_lost, "holds no exp_avg of embedding.word.weight"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_checkpoint_is_one_line_and_stays(case: str, ranks: Ranks, saved: Path, tmp_path: Path) -> None:
    name, damage, said = DAMAGE[case]
    folder = copy(saved, tmp_path)
    newest = folder / "checkpoints" / "step_0000002"
    damage(newest / name)
    error = ranks(1, again, str(folder), [])[0]["error"]
    assert error.startswith("CheckpointError: ") and said in error
    if case not in ("prefix", "tied", "moments"):
        assert "remove" in error and "to resume from step_0000001" in error
    shutil.rmtree(newest)
    assert ranks(1, again, str(folder), ["train.stop_at_step=2"])[0]["step"] == 2


def test_a_tied_weight_is_saved_once_and_stays_tied(saved: Path) -> None:
    names = {key for key in whole_tensors(saved / "checkpoints" / "step_0000002") if key.startswith("weight/")}
    assert "weight/embedding.word.weight" in names and "weight/head.word.weight" not in names


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])
@pytest.mark.parametrize("name", ["manifest.json", "state.json", "index.json", "config.yaml", "rank_00000.safetensors"])
def test_a_pickle_in_the_place_of_a_file_is_refused_and_not_run(
    name: str, sealed: bool, ranks: Ranks, saved: Path, tmp_path: Path
) -> None:
    folder, marker = copy(saved, tmp_path), tmp_path / "marker"
    path = folder / "checkpoints" / "step_0000002" / name
    path.write_bytes(pickle.dumps(Bomb(marker)))
    if sealed and name != "manifest.json":
        seal(path.parent)
    assert "error" in ranks(1, again, str(folder), [])[0]
    assert not marker.exists()


# Disks and threads ----------------------------------------------------------------------------------------------------------------


def on_a_full_disk(folder: str, overrides: list[str], limit: int) -> dict[str, Any]:
    """Continue a run while no file may grow beyond `limit` bytes, as on a full disk."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        return again(folder, overrides)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("in_thread", ["false", "true"])
def test_a_full_disk_is_one_line_and_the_previous_checkpoint_stays(
    in_thread: str, ranks: Ranks, saved: Path, tmp_path: Path
) -> None:
    folder = copy(saved, tmp_path)
    overrides = [f"train.checkpointer.async_save={in_thread}", "train.checkpointer.period=1"]
    error = ranks(1, on_a_full_disk, str(folder), overrides, 50_000)[0]["error"]
    assert "step_0000003: could not be written" in error and "the previous checkpoint is untouched" in error
    assert steps(folder) == ["step_0000001", "step_0000002"]
    assert ranks(1, again, str(folder), [])[0]["step"] == 6


def test_full_while_numbers_are_written(ranks: Ranks, saved: Path, tmp_path: Path) -> None:
    folder = copy(saved, tmp_path)
    size = (folder / "metrics.jsonl").stat().st_size
    error = ranks(1, on_a_full_disk, str(folder), ["train.checkpointer.period=100"], size + 20)[0]["error"]
    assert "cannot be written" in error
    assert ranks(1, again, str(folder), [])[0]["step"] == 6
    assert [r["step"] for r in metrics(folder)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("size", [1, 2])
def test_a_thread_writes_the_same_as_the_loop(size: int, ranks: Ranks, text: Path, tmp_path: Path) -> None:
    for name in ("false", "true"):
        own = [*SHORT, "train.checkpointer.period=2", f"train.checkpointer.async_save={name}", "train.log_period=3"]
        ranks(size, run, str(tmp_path / name), str(text), own)
    assert steps(tmp_path / "true") == steps(tmp_path / "false") == ["step_0000002", "step_0000004", "step_0000006"]
    for step in steps(tmp_path / "true"):
        a, b = (whole_tensors(tmp_path / name / "checkpoints" / step) for name in ("true", "false"))
        assert a == b
    assert metrics(tmp_path / "true") == metrics(tmp_path / "false")
