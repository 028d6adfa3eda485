"""Pictures from folders, arrays and CIFAR's files: what is read, what is drawn for each, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy import stats

from dufu.data.augment import _OPERATIONS, Augmentation, Mixing, _stretch, beta
from dufu.data.masking import IGNORE, Draws
from dufu.data.picture_files import classes_of, open_pictures
from dufu.data.pictures import PictureDataset
from dufu.errors import ConfigError, DataError

SHAPE: dict[str, Any] = {"img_size": 8, "channels": 3, "tokens": 5}


def folder_of(path: Path, count: int = 6, classes: tuple[str, ...] = ("cat", "dog", "eel"), size: int = 10) -> Path:
    """Write classes of nearly uniform pictures; the colour tells the class, the brightness the picture."""
    for number, name in enumerate(classes):
        (path / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            array = np.zeros((size, size, 3), np.uint8)
            array[..., number] = 100 + 20 * i
            Image.fromarray(array).save(path / name / f"{i}.png")
    return path


def arrays(path: Path, count: int = 12, side: int = 8, **more: Any) -> Path:
    draw = np.random.default_rng(0)
    np.savez(path, images=draw.integers(0, 256, (count, side, side, 3), dtype=np.uint8), labels=np.arange(count) % 3, **more)
    return path


def dataset(source: Any, first: int = 0, last: int | None = None, **settings: Any) -> PictureDataset:
    return PictureDataset(source, first, source.document_count if last is None else last, **{**SHAPE, **settings})


def test_a_folder_gives_every_picture_once_with_the_class_of_its_sub_folder(tmp_path: Path) -> None:
    source = open_pictures(folder_of(tmp_path / "data"))
    found = dataset(source, crop_share=None, mean=[0.0], std=[1.0])
    seen = set()
    for index in range(len(found)):
        sample = found[index]
        assert sample["input_ids"].tolist() == [0, 1, 2, 3, 4] and sample["pixels"].shape == (3, 8, 8)
        colour = sample["pixels"].max((1, 2))
        assert colour.argmax() == sample["class_labels"]
        seen.add((int(sample["class_labels"]), round(float(colour.max()) * 255)))
    assert len(found) == 18 and seen == {(c, 100 + 20 * i) for c in range(3) for i in range(6)}
    # A contiguous share of the source is a mixture of classes, though the files lie class by class.
    assert len({source.label(number) for number in range(9)}) == 3


def test_arrays_and_cifar_files_hold_the_pictures_that_were_written(tmp_path: Path) -> None:
    source = open_pictures(arrays(tmp_path / "a.npz", classes=np.array(["x", "y", "z"])))
    images = np.load(tmp_path / "a.npz")["images"]
    found = dataset(source, crop_share=None, mean=[0.0], std=[1.0])
    assert source.classes == ["x", "y", "z"]
    recovered = sorted((found[i]["pixels"].transpose(1, 2, 0) * 255).round().astype(np.uint8).tobytes() for i in range(12))
    assert recovered == sorted(image.tobytes() for image in images)
    planes = np.random.default_rng(1).integers(0, 256, (5, 3, 32, 32), dtype=np.uint8)
    for name, head, classes in (("ten.bin", [[3]] * 5, 10), ("hundred.bin", [[1, 77]] * 5, 100)):
        rows = np.concatenate([np.array(head, np.uint8), planes.reshape(5, -1)], 1)
        (tmp_path / name).write_bytes(rows.tobytes())
        cifar = open_pictures(tmp_path / name)
        sample = dataset(cifar, img_size=32, crop_share=None, mean=[0.0], std=[1.0])
        assert len(cifar.classes) == classes and sample[0]["class_labels"] == head[0][-1]
        recovered = sorted((sample[i]["pixels"] * 255).round().astype(np.uint8).tobytes() for i in range(5))
        assert recovered == sorted(plane.tobytes() for plane in planes)


def test_evaluation_sees_the_middle_and_training_its_own_draws_of_each_epoch(tmp_path: Path) -> None:
    source = open_pictures(arrays(tmp_path / "a.npz", side=12))
    settings: dict[str, Any] = {"color_jitter": 0.4, "rand_augment": 2, "erase": 0.5, "mixup": 0.8, "cutmix": 1.0}
    one, again = dataset(source, **settings), dataset(source, **settings)
    other_seed = dataset(source, **settings, seed=1)
    still = dataset(source, **settings, training=False)
    alone = dataset(source, **{**settings, "mixup": 0.0, "cutmix": 0.0})
    for index in range(len(one)):
        first = one.item(index, 3)
        for name, value in again.item(index, 3).items():
            assert np.array_equal(value, first[name])  # a function of seed, epoch and sample: whoever asks, in whatever order
        for different in (one.item(index, 4), other_seed.item(index, 3), one.item((index + 1) % 12, 3)):
            assert not np.array_equal(different["pixels"], first["pixels"])
        assert not np.array_equal(alone.item(index, 3)["pixels"], alone.item(index, 4)["pixels"])
        assert np.array_equal(one[index]["pixels"], still.item(index, 3)["pixels"])
        assert set(one[index]) == {"input_ids", "pixels", "class_labels"}
    middle = dataset(source, crop_share=0.5, img_size=6, mean=[0.0], std=[1.0])
    place = source._order[0]
    wanted = np.load(tmp_path / "a.npz")["images"][place][3:9, 3:9]
    assert np.array_equal((middle[0]["pixels"].transpose(1, 2, 0) * 255).round(), wanted)


def test_mixtures_are_of_two_samples_of_the_split_and_say_their_shares(tmp_path: Path) -> None:
    source = open_pictures(arrays(tmp_path / "a.npz", count=30))
    plain = dataset(source, 3, 20)
    drawn = {i: plain.item(i, 1)["pixels"] for i in range(17)}
    kinds = {"mixup": 0, "cutmix": 0}
    mixed = dataset(source, 3, 20, mixup=0.8, cutmix=1.0)
    for index in range(17):
        sample = mixed.item(index, 1)
        share, own = float(sample["mixed_share"]), drawn[index]
        assert sample["class_labels"] == plain[index]["class_labels"]
        if share == 1.0:
            continue
        whole = [j for j in drawn if np.allclose(share * own + (1 - share) * drawn[j], sample["pixels"], atol=1e-5)]
        same = (sample["pixels"] == own).all(0)
        cut = [j for j in drawn if (sample["pixels"] == np.where(same, own, drawn[j])).all()]
        assert whole or cut
        kinds["mixup" if whole else "cutmix"] += 1
        assert int(sample["mixed_labels"]) in {int(plain[j]["class_labels"]) for j in whole + cut}
        if cut and not whole:
            assert share == pytest.approx(same.mean(), abs=0.02)
    assert min(kinds.values()) >= 3


def test_shares_follow_the_beta_distribution() -> None:
    for alpha in (0.2, 1.0, 3.0):
        drawn = [beta(alpha, Draws(1, 2, 3, i)) for i in range(2000)]
        assert stats.kstest(drawn, stats.beta(alpha, alpha).cdf).pvalue > 0.01


def test_random_stretches_lie_inside_and_have_the_areas_and_ratios_asked_for() -> None:
    areas = []
    for sample in range(500):
        top, left, rows, columns = _stretch(100, 160, (0.1, 0.6), (0.5, 2.0), Draws(0, 0, 0, sample))
        assert top >= 0 and left >= 0 and top + rows <= 100 and left + columns <= 160
        assert 0.09 < rows * columns / 16000 < 0.61 and 0.45 < columns / rows < 2.1
        areas.append(rows * columns / 16000)
    assert min(areas) < 0.15 and max(areas) > 0.5
    assert _stretch(10, 1000, (1.0, 1.0), (0.9, 1.1), Draws(0, 0, 0, 0))[2] == 10  # nothing fits: the largest in the middle


def test_every_operation_changes_a_picture_but_the_identity_and_keeps_its_size() -> None:
    draw = np.random.default_rng(0)
    for mode, shape in (("RGB", (40, 40, 3)), ("L", (40, 40))):
        image = Image.fromarray(draw.integers(20, 200, shape, dtype=np.uint8))
        assert image.mode == mode
        for name, operation in _OPERATIONS:
            changed = operation(image, 0.9)
            assert changed.size == image.size and changed.mode == mode
            same = np.array_equal(np.asarray(changed), np.asarray(image))
            assert same == (name == "identity" or (name == "color" and mode == "L")), name


def test_flips_and_erasing_happen_as_often_as_asked() -> None:
    image = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8))
    turned = Augmentation(8, 1, (0.0,), (1.0,), None, "none", flip=0.25)
    flips = sum(
        turned.drawn(image, Draws(0, 0, 0, i))[0, 0, 0] > turned.drawn(image, Draws(0, 0, 0, i))[0, 0, -1] for i in range(800)
    )
    assert abs(flips / 800 - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 800)
    erased = Augmentation(8, 1, (-1.0,), (1.0,), None, "none", flip=0.0, erase=0.5)
    holes = sum(bool((erased.drawn(image, Draws(0, 0, 0, i)) == 0).any()) for i in range(800))
    assert abs(holes / 800 - 0.5) < 4 * math.sqrt(0.25 / 800)
    assert not (erased.plain(image) == 0).any()


def test_a_broken_picture_is_named_or_skipped_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder_of(tmp_path / "data")
    whole = (path / "dog" / "3.png").read_bytes()
    (path / "dog" / "3.png").write_bytes(whole[: len(whole) // 2])
    (path / "cat" / "0.png").write_bytes(b"no picture at all")
    source = open_pictures(path)
    places = {source.files[source._order[i]].relative_to(path).as_posix(): i for i in range(18)}
    with pytest.raises(DataError, match=r"dog/3\.png: not readable as a picture .*broken=skip"):
        dataset(source)[places["dog/3.png"]]
    tolerant = dataset(source, broken="skip", mixup=1.0)
    for epoch in range(3):
        samples = [tolerant.item(i, epoch) for i in range(18)]
        assert sum(int(s["class_labels"]) == IGNORE for s in samples) == 2
        assert all(IGNORE not in (s["mixed_labels"], s["class_labels"]) or s["mixed_share"] == 1.0 for s in samples)
    assert len(tolerant.skipped) == 2 and capsys.readouterr().err.count("skipped, ") == 2


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: p / "nothing", "no such file or folder"),
        (lambda p: p, "no sub-folder"),
        (lambda p: folder_of(p / "d", classes=("train", "val")), "are splits rather than classes"),
        (lambda p: (folder_of(p / "d"), Image.new("RGB", (3, 3)).save(p / "d" / "x.png"), p / "d")[-1], "x.png: lies beside the classes"),
        (lambda p: (folder_of(p / "d"), (p / "d" / "cat" / "notes.txt").write_text("x"), p / "d")[-1], "notes.txt: no picture"),
        (lambda p: (folder_of(p / "d"), (p / "d" / "fox").mkdir(), p / "d")[-1], "fox: no picture"),
        (lambda p: (np.savez(p / "a.npz", x=1), p / "a.npz")[-1], "has no array images or labels; it holds x"),
        (lambda p: (np.savez(p / "a.npz", images=np.zeros((2, 4, 4)), labels=[0, 1]), p / "a.npz")[-1], "float64: bytes of shape"),
        (lambda p: (np.savez(p / "a.npz", images=np.zeros((2, 4, 4), np.uint8), labels=[0]), p / "a.npz")[-1], "2 images, but 1 labels"),
        (lambda p: (np.savez(p / "a.npz", images=np.zeros((1, 4, 4), np.uint8), labels=[-1]), p / "a.npz")[-1], "at least 0"),
        (lambda p: (np.savez(p / "a.npz", images=np.array([{}]), labels=[0]), p / "a.npz")[-1], "nothing is unpickled"),
        (lambda p: ((p / "a.npz").write_bytes(b"PK\3\4 torn"), p / "a.npz")[-1], "not readable as arrays"),
        (lambda p: ((p / "data_batch_1").write_bytes(b"\x80\x02}q\x01"), p / "data_batch_1")[-1], "a Python pickle, which is never unpickled"),
        (lambda p: ((p / "a.bin").write_bytes(b"\0" * 5000), p / "a.bin")[-1], "records of neither"),
    ],
)  # fmt: skip
def test_what_is_no_set_of_pictures_is_one_clear_line(make: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=said):
        dataset(open_pictures(make(tmp_path)))


def test_classes_are_those_of_all_files_and_another_source_may_hold_some_of_them(tmp_path: Path) -> None:
    first, second = folder_of(tmp_path / "a", classes=("cat", "dog")), folder_of(tmp_path / "b", classes=("bee", "dog"))
    assert classes_of([first, second]) == ["bee", "cat", "dog"]
    found = dataset(open_pictures(second), classes=["bee", "cat", "dog"])
    assert {int(found[i]["class_labels"]) for i in range(12)} == {0, 2}  # by name, not by place
    with pytest.raises(DataError, match="class 'bee' is none of the model's 2 \\(cat, dog\\)"):
        dataset(open_pictures(second), classes=["cat", "dog"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"img_size": None}, "img_size=None"), ({"crop": "middle"}, "random_resized, padded, none"), ({"flip": 1.5}, "flip=1.5: from 0 to 1"),
        ({"crop_scale": [0.9, 0.1]}, "the smaller one first"), ({"mean": [0.5, 0.5]}, "one for each of 3 colours"), ({"std": [0.0]}, "above 0"),
        ({"mixup": -1.0}, "mixup=-1.0"), ({"rand_augment_magnitude": 11.0}, "0 to 10"), ({"broken": "ignore"}, '"refuse" or "skip"'),
        ({"channels": 4}, "3, or 1 for grey"), ({"crop_share": 0.0}, "crop_share=0.0"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused_by_name(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        dataset(open_pictures(arrays(tmp_path / "a.npz")), **settings)


def test_nothing_is_mixed_unless_asked() -> None:
    assert not Mixing() and Mixing(0.1) and Mixing(0.0, 1.0)
