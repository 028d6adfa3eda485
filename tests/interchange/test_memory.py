"""A folder is read in parts: no process needs more memory than its share and one tensor, and each byte is read about once."""

from __future__ import annotations

import gc
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dufu.data.tokenizer import byte_tokenizer
from dufu.interchange.export import foreign_tensors
from dufu.interchange.files import write_tensors
from dufu.models.hf import complete, family_of
from dufu.training.export_hf import export_folder
from tests.pool import Ranks

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's RLIMIT_DATA")

TARGET = "dufu.models.llama.Llama"
# 47 million parameters, 188 MB in float32; the largest tensor has 16 MB.
CFG: dict[str, Any] = {
    "vocab_size": 8192, "hidden_layers": 12, "hidden_size": 512, "ffn_hidden_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4,
    "max_seq_length": 64,
}  # fmt: skip
LARGEST = 4 * 8192 * 512
SLACK = 48 << 20  # threads' stacks, buffers of messages, what allocators keep


def held() -> int:
    """Return the bytes of this process's own memory."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmData")).split()[1])


def limited(room: int) -> int:
    """Let this process take `room` bytes more than it has; return the limit that there was."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (held() + room, before[1]))
    return before[0]


def load_within(folder: str, overrides: list[str], room: int) -> tuple[str, int]:
    """Load a folder within a limit; return what stopped it, and the bytes of weights that lie here."""
    from dufu.training.load import load

    load(str(Path(folder).parent / "tiny"), overrides)  # what is imported and connected once does not count
    before = limited(room)
    try:
        loaded = load(folder, overrides)
    except (RuntimeError, MemoryError) as error:
        return str(error) or type(error).__name__, 0
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    store = loaded.distributed.store
    return "", sum(entry.tensor.numel() * 4 for entry in (*store.entries, *store.frozen))


def export_within(folder: str, out: str, room: int) -> str:
    before = limited(room)
    try:
        export_folder(folder, out)
    except (RuntimeError, MemoryError) as error:
        return str(error) or type(error).__name__
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    return ""


def write_folder(folder: Path, cfg: dict[str, Any]) -> int:
    """Write a folder of small random numbers; return the bytes of the weights in float32."""
    import json

    from dufu.config.instantiate import resolve

    whole = complete(TARGET, cfg)
    with torch.device("meta"):
        model = resolve(TARGET)(**cfg)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    table = family_of(TARGET).table(TARGET, whole)
    needed = table.foreign_shapes(shapes)
    folder.mkdir()
    made = foreign_tensors(table, shapes, lambda name, shape, region, memory: memory.normal_(0, 0.02))
    forms: dict[str, tuple[str, tuple[int, ...]]] = {name: ("F32", needed[name]) for name in needed}
    order = list(dict.fromkeys(part.name for rule in table.rules for part in rule.parts))
    write_tensors(folder / "model.safetensors", {n: forms[n] for n in order}, (v.numpy() for _, v in made), {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(family_of(TARGET).write(TARGET, whole)))
    byte_tokenizer().save(folder)
    return 4 * sum(p.numel() for p in model.parameters())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    base = tmp_path_factory.mktemp("large")
    write_folder(base / "tiny", {**CFG, "hidden_layers": 4, "hidden_size": 32, "ffn_hidden_size": 64, "vocab_size": 264})
    return base / "large", write_folder(base / "large", CFG)


@pytest.fixture
def fresh() -> Iterator[Ranks]:
    """Processes of its own, whose memory no other test has filled."""
    ranks = Ranks()
    yield ranks
    ranks.close()


def test_one_process_cannot_hold_a_quarter_of_it(folder: tuple[Path, int], fresh: Ranks) -> None:
    path, whole = folder
    ((said, _),) = fresh(1, load_within, str(path), [], whole // 4 + LARGEST + SLACK)
    assert "alloc" in said or "memory" in said.lower(), said


@pytest.mark.parametrize(
    "overrides", [["train.dist.tensor_parallel_size=4"], ["train.dist.pipeline_parallel_size=4"]], ids=["tp4", "pp4"]
)
def test_four_processes_need_their_share_and_one_tensor_each(overrides: list[str], folder: tuple[Path, int], fresh: Ranks) -> None:
    path, whole = folder
    # Stages are balanced by their work, not by their bytes: the ends hold the embedding and the head too.
    share = int(whole * (0.26 if "tensor" in overrides[0] else 0.36))
    found = fresh(4, load_within, str(path), overrides, share + LARGEST + SLACK)
    assert [said for said, _ in found] == [""] * 4
    assert all(0 < here <= share for _, here in found)
    assert sum(here for _, here in found) >= whole


def test_an_export_needs_one_tensor(folder: tuple[Path, int], fresh: Ranks, tmp_path: Path) -> None:
    path, whole = folder
    assert whole > 3 * LARGEST + SLACK
    assert fresh(1, export_within, str(path), str(tmp_path / "out"), 3 * LARGEST + SLACK) == [""]
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > whole


@pytest.mark.parametrize("layers", [4, 8])
def test_what_is_read_grows_with_the_layers_alone(layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Converting n layers takes time in proportion to n: every byte is read once, whatever the number of tensors."""
    from dufu.interchange.tensor_file import SafetensorsFile

    size = write_folder(
        tmp_path / "in", {**CFG, "hidden_layers": layers, "hidden_size": 64, "ffn_hidden_size": 96, "vocab_size": 264}
    )
    read = 0
    original = SafetensorsFile.read_into

    def counting(self: SafetensorsFile, name: str, first: int, out: torch.Tensor) -> None:
        nonlocal read
        read += out.numel() * out.element_size()
        original(self, name, first, out)

    monkeypatch.setattr(SafetensorsFile, "read_into", counting)
    export_folder(tmp_path / "in", tmp_path / "out")
    assert read == size
