"""The token files: Megatron's format, exact at every size, whole or absent."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dufu.data import CausalLMDataset, IndexedTokens, IndexedWriter, load_tokenizer
from dufu.data.indexed import last_at_most, token_type
from dufu.errors import DataError
from tests.data.made import write_fake_index, write_tokens

NAMES = (".bin", ".idx", ".json")


def test_the_written_bytes_are_the_formats(tmp_path: Path) -> None:
    """Two documents, the first of two sequences, byte by byte as Megatron's mmap format lays them out."""
    write_tokens(tmp_path / "x", [[[1, 2, 3], [4]], [[5, 6]]])
    assert (tmp_path / "x.bin").read_bytes() == struct.pack("<6H", 1, 2, 3, 4, 5, 6)
    assert (tmp_path / "x.idx").read_bytes() == (
        b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 3) + struct.pack("<3i", 3, 1, 2) + struct.pack("<3q", 0, 6, 8)
        + struct.pack("<3q", 0, 2, 3)
    )  # fmt: skip


def test_files_of_megatron_without_our_json_are_read(tmp_path: Path) -> None:
    """Code 4 is int32; an empty sequence in the middle owns no token."""
    write_fake_index(tmp_path / "m", 4, 4, [3, 0, 2], [0, 1, 3])
    np.arange(5, dtype=np.int32).tofile(tmp_path / "m.bin")
    tokens = IndexedTokens(tmp_path / "m")
    assert tokens.tokens.tolist() == [0, 1, 2, 3, 4]
    assert tokens.document_count == 2
    assert [tokens.document_start(i) for i in range(3)] == [0, 3, 5]
    assert tokens.document_of(np.arange(5)).tolist() == [0, 0, 0, 1, 1]
    assert tokens.sequence_of(np.arange(5)).tolist() == [0, 0, 0, 2, 2]
    assert tokens.note == {}
    dataset = CausalLMDataset(tokens, load_tokenizer("bytes"), 0, 2, 3)
    assert dataset[0]["input_ids"].tolist() == [0, 1, 2]
    assert dataset[1]["labels"].tolist() == [4, -100, -100]


@pytest.mark.parametrize(
    ("vocabulary", "kind"),
    [(65536, np.uint16), (65537, np.int32), (119547, np.int32), (1 << 31, np.int32), ((1 << 31) + 1, np.int64)],
)
def test_every_token_number_of_a_vocabulary_is_read_back_exactly(tmp_path: Path, vocabulary: int, kind: type) -> None:
    """B080: a number above 65,535 must not wrap."""
    assert token_type(vocabulary) == np.dtype(kind)
    numbers = [0, 1, 65535, min(70000, vocabulary - 1), vocabulary - 1]
    with IndexedWriter(tmp_path / "x", token_type(vocabulary)) as writer:
        writer.add_document(numbers)
    assert IndexedTokens(tmp_path / "x").tokens.tolist() == numbers


@pytest.mark.parametrize("number", [65536, 70000, -1])
def test_a_number_that_does_not_fit_is_an_error_and_leaves_nothing(tmp_path: Path, number: int) -> None:
    with pytest.raises(DataError, match=f"token number {number} does not fit into uint16"):
        write_tokens(tmp_path / "x", [[[1, number]]])
    assert not list(tmp_path.iterdir())


def test_positions_beyond_32_bits(tmp_path: Path) -> None:
    """B082: three documents of 2^30 tokens (a hole in the file), by the writer's own index and by samples of one token."""
    with IndexedWriter(tmp_path / "x", np.dtype(np.uint16)) as writer:
        for _ in range(3):
            writer._describe(np.array([1 << 30]), np.array([1]))
        writer._data.truncate(3 * (1 << 31))
    with (tmp_path / "x.bin").open("r+b") as file:
        file.seek(-4, 2)
        file.write(struct.pack("<2H", 7, 9))
    tokens = IndexedTokens(tmp_path / "x")
    assert [tokens.document_start(i) for i in range(4)] == [0, 1 << 30, 1 << 31, 3 << 30]
    assert tokens._offsets.tolist() == [0, 1 << 31, 1 << 32]
    dataset = CausalLMDataset(tokens, load_tokenizer("bytes"), 0, 3, 1)
    assert len(dataset) == (3 << 30) - 1 > (1 << 31) + 10
    assert dataset[len(dataset) - 1] == {"input_ids": [7], "labels": [9]}
    assert dataset[(1 << 31) + 10]["labels"].tolist() == [0]


def test_an_index_of_a_hundred_million_sequences_opens_at_once_in_flat_memory(tmp_path: Path) -> None:
    """Opening, finding a document and reading a token touch a few pages; searchsorted would copy the whole unaligned index."""
    count = 100_000_000
    with (tmp_path / "x.idx").open("wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, count, 2))
        file.truncate(34 + 12 * count + 16)
        for place, value in ((34 + 4 * (count - 1), struct.pack("<i", 8)), (34 + 12 * count, struct.pack("<qq", 0, count))):
            file.seek(place)
            file.write(value)
    (tmp_path / "x.bin").write_bytes(bytes(16))
    code = f"""
import time
import numpy as np
from dufu.data import IndexedTokens
def peak():
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
before = peak()
times = []
for _ in range(5):
    start = time.perf_counter()
    tokens = IndexedTokens({str(tmp_path / "x")!r})
    assert len(tokens) == {count} and tokens.document_of(np.array([0])).tolist() == [0]
    times.append(time.perf_counter() - start)
print(min(times), peak() - before)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout.split()
    assert float(out[0]) < 0.05, f"{out[0]} s"
    assert int(out[1]) < 16 * 1024, f"{out[1]} KiB more; the index is 1.2 GB"


def test_last_at_most_is_searchsorted() -> None:
    random = np.random.default_rng(0)
    for size in (0, 1, 2, 7, 100):
        ascending = np.sort(random.integers(0, 50, size))
        values = random.integers(-2, 55, 200)
        assert last_at_most(ascending, values).tolist() == (np.searchsorted(ascending, values, "right") - 1).tolist()


def _damage(tmp_path: Path, name: str) -> None:
    index, data = tmp_path / "x.idx", tmp_path / "x.bin"
    content = index.read_bytes()
    if name == "no index":
        index.unlink()
    elif name == "cut index":
        index.write_bytes(content[:-3])
    elif name == "cut tokens":
        data.write_bytes(data.read_bytes()[:-2])
    elif name == "other format":
        index.write_bytes(b"TNTIDX\x00\x00" + content[8:])
    elif name == "version":
        index.write_bytes(content[:9] + struct.pack("<Q", 2) + content[17:])
    elif name == "float tokens":
        index.write_bytes(content[:17] + bytes([6]) + content[18:])
    elif name == "documents":
        index.write_bytes(content[:-8] + struct.pack("<q", 2))
    elif name == "empty index":
        index.write_bytes(b"")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no index", "no such file"),
        ("cut index", "its header announces"),
        ("cut tokens", "do not belong together"),
        ("other format", "TNTIDX is the older format"),
        ("version", "version 2"),
        ("float tokens", "type code 6"),
        ("documents", "its documents run from sequence 0 to 2, but it has sequences 0 to 3"),
        ("empty index", "does not begin with MMIDIDX"),
    ],
)
def test_a_damaged_pair_is_refused_by_name(tmp_path: Path, name: str, message: str) -> None:
    write_tokens(tmp_path / "x", [[[1, 2, 3], [4]], [[5, 6]]])
    _damage(tmp_path, name)
    with pytest.raises(DataError, match=message):
        IndexedTokens(tmp_path / "x")


def test_a_json_of_other_tokens_is_refused(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "x", [[[1, 2, 3]]])
    (tmp_path / "x.json").write_text(json.dumps({"tokenizer": {}, "tokens": 4}))
    with pytest.raises(DataError, match=r"speaks of 4 tokens, but .* holds 3"):
        _ = tokens.note


def test_an_error_while_writing_leaves_the_old_files_alone(tmp_path: Path) -> None:
    write_tokens(tmp_path / "x", [[[1, 2, 3]]])
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(RuntimeError), IndexedWriter(tmp_path / "x", np.dtype(np.uint16)) as writer:
        writer.add_document([4, 5])
        raise RuntimeError
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_two_writers_of_one_prefix_do_not_mix(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "x", np.dtype(np.uint16)) as first:
        first.add_document([1, 2])
        with pytest.raises(DataError, match="another process is writing it"):
            IndexedWriter(tmp_path / "x", np.dtype(np.uint16))
    assert IndexedTokens(tmp_path / "x").tokens.tolist() == [1, 2]


def test_a_killed_writer_leaves_only_a_part_which_the_next_one_takes_over(tmp_path: Path) -> None:
    code = f"""
import os, numpy as np
from dufu.data import IndexedWriter
writer = IndexedWriter({str(tmp_path / "x")!r}, np.dtype(np.uint16))
writer.add_document(list(range(60000)))
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == -9
    assert [p.name for p in tmp_path.iterdir()] == ["x.bin.part"]
    write_tokens(tmp_path / "x", [[[1, 2]]])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.bin", "x.idx"]
    assert IndexedTokens(tmp_path / "x").tokens.tolist() == [1, 2]


def test_new_files_never_pair_with_old_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped between the two renames, the prefix is incomplete, and not the new tokens with the old index."""
    import os

    write_tokens(tmp_path / "x", [[[1, 2]]])
    replace = os.replace

    def stop(source: str, target: str) -> None:
        replace(source, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        write_tokens(tmp_path / "x", [[[3, 4]]])
    monkeypatch.undo()
    with pytest.raises(DataError, match=r"x\.idx: no such file"):
        IndexedTokens(tmp_path / "x")


def test_a_tokens_file_of_another_tokenizer_is_refused_when_read(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "x", [[[5, 300, 6]]])
    with pytest.raises(DataError, match="token 1 is number 300, but the tokenizer has 261 tokens"):
        CausalLMDataset(tokens, load_tokenizer("bytes"), 0, 1, 4)[0]


def test_the_fingerprint_follows_content_and_not_place_or_time(tmp_path: Path) -> None:
    base = write_tokens(tmp_path / "a", [[[1, 2, 3]], [[4, 5]]]).fingerprint
    assert write_tokens(tmp_path / "b", [[[1, 2, 3]], [[4, 5]]]).fingerprint == base
    assert write_tokens(tmp_path / "c", [[[1, 2, 3]], [[4, 6]]]).fingerprint != base
    assert write_tokens(tmp_path / "d", [[[1, 2]], [[3, 4, 5]]]).fingerprint != base
