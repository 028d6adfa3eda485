"""A model larger than what one process may hold starts and trains on four: no process ever makes more than its part."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pool import Ranks
from tests.small import TINY

# 76 million parameters: 300 MB of weights, as much of gradients, twice as much of Adam's moments. Besides them a process needs
# stacks for its threads, the parameters and gradients of a layer at work, and a copy of what it writes into a checkpoint.
LARGE = [
    *[o for o in TINY if "model.cfg" not in o], "model.cfg.hidden_size=512", "model.cfg.ffn_hidden_size=2048", "model.cfg.hidden_layers=24",
    "model.cfg.num_attention_heads=8", "model.cfg.max_seq_length=16", "train.train_iter=2", "train.global_batch_size=4",
    "train.evaluation.enabled=false", "train.checkpointer.period=1",
]  # fmt: skip
ROOM = 960 << 20


def within_limit(folder: str, corpus: str, overrides: list[str], resume: bool = False) -> str:
    """Train where this process may take `ROOM` bytes more than it has; return what stopped it, or nothing."""
    import gc

    from dufu.training.run import train

    gc.collect()
    status = Path("/proc/self/status").read_text()
    held = 1024 * int(next(line for line in status.splitlines() if line.startswith("VmData")).split()[1])
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (held + ROOM, before[1]))
    try:
        train("gpt2_tiny", [*LARGE, f"train.output_dir={folder}", *overrides], data=[corpus], resume=resume)
    except (RuntimeError, MemoryError) as error:
        return str(error) or type(error).__name__
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    return ""


pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's RLIMIT_DATA")


@pytest.fixture
def fresh() -> Iterator[Ranks]:
    """Processes of its own, whose memory no other test has filled."""
    ranks = Ranks()
    yield ranks
    ranks.close()


def test_one_process_cannot_hold_it(fresh: Ranks, corpus: Path, tmp_path: Path) -> None:
    (found,) = fresh(1, within_limit, str(tmp_path / "run"), str(corpus), [], timeout=400)
    assert "allocate" in found or "memory" in found.lower(), found


@pytest.mark.parametrize(
    "layout",
    [
        ["train.zero_optimization.enabled=true", "train.zero_optimization.stage=3"],
        ["train.dist.pipeline_parallel_size=4", "train.num_accumulation_steps=4"],
        ["train.dist.tensor_parallel_size=4"],
    ],
    ids=["zero3", "pp4", "tp4"],
)
def test_four_processes_train_and_resume_it(layout: list[str], fresh: Ranks, corpus: Path, tmp_path: Path) -> None:
    stop = ["train.stop_at_step=1"]
    assert fresh(4, within_limit, str(tmp_path / "run"), str(corpus), [*layout, *stop], timeout=400) == [""] * 4
    assert fresh(4, within_limit, str(tmp_path / "run"), str(corpus), layout, True, timeout=400) == [""] * 4
