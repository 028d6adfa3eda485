"""The bytes that a step hands to other processes are counted, and are those of the closed formula of each dimension."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pool import Ranks
from tests.small import TINY

H, T, V, LAYERS, BATCH, MICRO = 32, 24, 258, 5, 8, 2
N = BATCH * T // MICRO  # tokens of a micro-batch, where the batch is not shared
F32 = 4


def run(folder: str, corpus: str, overrides: list[str]) -> dict[str, Any]:
    """Return what this process handed over in the last step, by communicator and operation, and the sizes of the units."""
    from collections import Counter

    from dufu.training.hooks import Hook
    from dufu.training.run import train

    class Difference(Hook):
        before: Counter[tuple[str, str]] = Counter()  # noqa: RUF012
        difference: Counter[tuple[str, str]] = Counter()  # noqa: RUF012
        sizes: dict[str, int] = {}  # noqa: RUF012

        def _now(self, trainer: Any) -> Counter[tuple[str, str]]:
            p = trainer.train_step.distributed.processes
            members = {c.name: c for c in (p.world, p.data, p.tensor, p.pipeline, p.context) if c.size > 1}
            return Counter({(name, what): count for name, c in members.items() for what, count in c.sent.items()})

        def before_step(self, trainer: Any) -> None:
            self.before = self._now(trainer)

        def after_step(self, trainer: Any) -> None:
            if trainer.step != 2:
                return  # the last step reports besides
            self.difference = self._now(trainer) - self.before
            infos = trainer.train_step.distributed.infos
            self.sizes = Counter()
            for info in infos:
                count = 1
                for length in info.shape:
                    count *= length
                self.sizes["tied" if len(info.units) > 1 else info.unit] += count

    hook = Difference()
    sizes = [
        f"model.cfg.hidden_layers={LAYERS}",
        f"train.num_accumulation_steps={MICRO}",
        "train.train_iter=3",
        "train.log_period=100",
    ]
    train(
        "gpt2_tiny",
        [*TINY, *sizes, "train.evaluation.enabled=false", f"train.output_dir={folder}", *overrides],
        data=[corpus],
        hooks=[hook],
    )
    return {"sent": dict(hook.difference), "sizes": dict(hook.sizes)}


def test_data_parallel_sends_each_gradient_once(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    for rank in ranks(2, run, str(tmp_path / "run"), str(corpus), []):
        assert rank["sent"]["data", "all_reduce"] == F32 * sum(rank["sizes"].values())
        assert rank["sent"]["world", "all_reduce"] == 8 * 4  # the count of tokens and three wishes to stop


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_sends_gradients_scattered_and_weights_gathered(stage: int, ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    zero = ["train.zero_optimization.enabled=true", f"train.zero_optimization.stage={stage}"]
    for rank in ranks(2, run, str(tmp_path / "run"), str(corpus), zero):
        sizes = rank["sizes"]
        assert all(size % 2 == 0 for size in sizes.values())  # nothing is padded
        total = sum(sizes.values())
        assert rank["sent"]["data", "reduce_scatter"] == F32 * total * (1 if stage == 1 else MICRO)
        gathered = total  # after the update
        if stage == 3:
            # Each unit before its forward; before its backward those whose memory another one took meanwhile, all but the last three
            # layers; the embedding's once more, and its tied weight for the head too.
            layers = LAYERS + LAYERS - 3
            gathered = MICRO * (layers * sizes["layers.0"] + 2 * sizes["embedding"] + 2 * sizes["tied"] + sizes["head"])
            gathered -= (MICRO - 1) * 3 * sizes["layers.0"]  # the first three layers are still there from the micro-batch before
        assert rank["sent"]["data", "all_gather"] == F32 * gathered // 2


def test_tensor_parallel_sums_what_enters_and_leaves_split_layers(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    for rank in ranks(2, run, str(tmp_path / "run"), str(corpus), ["train.dist.tensor_parallel_size=2"]):
        hidden = F32 * N * H
        # forward: the embedding and two a layer; backward: two a layer and the head; the loss: a maximum and two sums a token
        assert rank["sent"]["tensor", "all_reduce"] == MICRO * (hidden * (1 + 2 * LAYERS + 2 * LAYERS + 1) + 3 * F32 * N)


def test_sequence_parallel_gathers_and_scatters_instead(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    sp = ["train.dist.tensor_parallel_size=2", "train.dist.sequence_parallel=true"]
    for rank in ranks(2, run, str(tmp_path / "run"), str(corpus), sp):
        hidden, partial = F32 * N * H, F32 * (rank["sizes"]["embedding"] + LAYERS * 6 * H)
        # scattered: what leaves forward (an embedding, two a layer), what enters backward (two a layer)
        assert rank["sent"]["tensor", "reduce_scatter"] == MICRO * hidden * (1 + 4 * LAYERS)
        # gathered, half a hidden state each: what enters forward, what left backward, and the state for the head
        assert rank["sent"]["tensor", "all_gather"] == MICRO * hidden // 2 * (1 + 4 * LAYERS + 1)
        # the head as without; and the gradients of norms, biases and positions, once a step
        assert rank["sent"]["tensor", "all_reduce"] == MICRO * (hidden + 3 * F32 * N) + partial


def test_a_pipeline_sends_each_state_and_its_gradient_once(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    first, last = ranks(2, run, str(tmp_path / "run"), str(corpus), ["train.dist.pipeline_parallel_size=2"])
    for rank in (first, last):
        sent = rank["sent"]
        assert sent["pipeline", "send"] == MICRO * F32 * N * H
        assert sent["pipeline", "all_reduce"] == F32 * rank["sizes"]["tied"]  # the gradient of the weight that both hold


def test_context_parallel_gathers_keys_and_values(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    for rank in ranks(2, run, str(tmp_path / "run"), str(corpus), ["train.dist.context_parallel_size=2"]):
        assert rank["sent"]["context", "all_gather"] == MICRO * LAYERS * 2 * F32 * (N // 2) * H
        assert rank["sent"]["context", "reduce_scatter"] == MICRO * LAYERS * 2 * F32 * N * H
