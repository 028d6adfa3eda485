"""Adapters: the numbers of one process in every layout, small checkpoints, PEFT's folders, and merged weights."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dufu.errors import CheckpointError, ConfigError, DufuError
from dufu.models import Batch, Llama, Lora
from dufu.parallel import faults
from tests.models.outside_models import make
from tests.models.test_huggingface import PIPELINE, SETTINGS, TENSOR
from tests.pool import Ranks
from tests.small import metrics

ALL = os.environ.get("DUFU_MODELS") == "all"
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "dp2": (2, []),
    "tp2": (2, TENSOR),
    "sp2": (2, [*TENSOR, "train.dist.sequence_parallel=true"]),
    "pp2": (2, PIPELINE),
    "zero3": (2, ["train.zero_optimization.enabled=true", "train.zero_optimization.stage=3"]),
    "recompute": (1, ["train.activation_checkpoint.enabled=true"]),
    "tp2xpp2": (4, [*TENSOR, *PIPELINE]),
}
OWN = ["query", "value", "contract"]
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {  # our model of a folder, or transformers' own; the adapters
    "llama": ("LlamaForCausalLM", "own", {"patterns": OWN, "rank": 4, "alpha": 8.0, "dropout": 0.1}),
    "llama dora": ("LlamaForCausalLM", "own", {"patterns": OWN, "rank": 4, "alpha": 8.0, "variant": "dora"}),
    "gpt2": ("GPT2LMHeadModel", "own", {"patterns": ["query", "value", "output"], "rank": 2, "alpha": 8.0}),
    "llama as it is": ("LlamaForCausalLM", "outside", {"patterns": ["q_proj", "v_proj", "down_proj"], "rank": 4, "dropout": 0.1}),
    "gpt2 as it is": ("GPT2LMHeadModel", "outside", {"patterns": ["c_attn", "c_proj"], "rank": 2, "variant": "dora"}),
}
QUICK = [("llama", "dp2"), ("llama", "tp2"), ("llama", "pp2"), ("llama", "zero3"), ("llama dora", "sp2"), ("gpt2 as it is", "tp2")]
FULL = [
    (kind, layout)
    for kind, (_, how, adapter) in KINDS.items()
    for layout in LAYOUTS
    if layout != "sp2" or (how == "own" and not adapter.get("dropout"))
]


def adapt(kind: str, folder: str, out: str, corpus: str, overrides: list[str], fault: str | None = None, **options: Any) -> int:
    """Train adapters on this rank; return how many numbers it trains."""
    from contextlib import nullcontext

    from dufu.training.effective import read_config
    from dufu.training.hooks import Hook
    from dufu.training.run import train

    class Witness(Hook):
        held = 0

        def after_step(self, trainer: Any) -> None:
            self.held = sum(e.tensor.numel() for e in trainer.train_step.distributed.store.entries)

    _, how, adapter = KINDS[kind]
    config = read_config("gpt2_tiny")
    if how == "outside":
        config.model = {"_target_": "dufu.models.HuggingFace", "folder": folder}
    else:
        overrides = [f"model={folder}", *overrides]
    config.train.adapter = {"_target_": "dufu.models.Lora", **adapter, **options.pop("adapter", {})}
    witness = Witness()
    with faults.inject(fault) if fault else nullcontext():
        train(config, [*SETTINGS, f"train.output_dir={out}", *overrides], data=[corpus], hooks=[witness], **options)
    return witness.held


def resumed(kind: str, folder: str, out: str, corpus: str, overrides: list[str]) -> int:
    return adapt(kind, folder, out, corpus, overrides, resume=True)


def begun(kind: str, folder: str, out: str, corpus: str, overrides: list[str], adapters: str) -> int:
    return adapt(kind, folder, out, corpus, overrides, adapter={"patterns": [], "folder": adapters})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    base = tmp_path_factory.mktemp("folders")

    def folder(kind: str) -> Path:
        name = KINDS[kind][0]
        if not (base / name).is_dir():
            length = "n_positions" if "GPT2" in name else "max_position_embeddings"
            make(name, vocab_size=300, **{length: 64}).save_pretrained(base / name)
        return base / name

    return folder


@pytest.fixture(scope="module")
def one(folders: Any, ranks: Ranks, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    base = tmp_path_factory.mktemp("one")
    known: dict[str, tuple[Path, int]] = {}

    def run(kind: str) -> tuple[Path, int]:
        if kind not in known:
            out = base / kind.replace(" ", "_")
            known[kind] = out, ranks(1, adapt, kind, str(folders(kind)), str(out), str(corpus), [])[0]
        return known[kind]

    return run


@pytest.mark.parametrize(("kind", "layout"), FULL if ALL else QUICK)
def test_adapters_train_alike_in_every_layout(
    kind: str, layout: str, one: Any, folders: Any, ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    size, overrides = LAYOUTS[layout]
    folder, whole = one(kind)
    held = ranks(size, adapt, kind, str(folders(kind)), str(tmp_path / "run"), str(corpus), overrides)
    for mine, alone in zip(metrics(tmp_path / "run"), metrics(folder)):
        assert mine["loss"] == pytest.approx(alone["loss"], rel=1e-5)  # fp32 sums in another order
        assert mine["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)
    if layout not in ("dp2", "recompute"):
        assert all(part < 0.9 * whole for part in held)  # A and B are divided


def test_a_seeded_fault_turns_it_red(one: Any, folders: Any, ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    folder, _ = one("llama")
    ranks(2, adapt, "llama", str(folders("llama")), str(tmp_path / "run"), str(corpus), TENSOR, "tensor.skip_enter")
    pairs = zip(metrics(tmp_path / "run"), metrics(folder))
    assert any(abs(a["grad_norm"] - b["grad_norm"]) > 1e-4 * b["grad_norm"] for a, b in pairs)


def test_a_checkpoint_holds_the_adapters_alone(one: Any, folders: Any) -> None:
    from dufu.training.checkpoint import CheckpointReader, find_checkpoint

    folder, _ = one("llama")
    reader = CheckpointReader(find_checkpoint(folder))
    assert {name.rsplit(".", 1)[-1] for name in reader.names()} == {"lora_a", "lora_b"}
    assert len(reader.names()) == 2 * 2 * 3  # A and B of two layers in each of three blocks
    weights = sum(path.stat().st_size for path in find_checkpoint(folder).glob("*.safetensors"))
    assert weights < 0.5 * (folders("llama") / "model.safetensors").stat().st_size  # with Adam's two moments


def test_a_run_goes_on_exactly_in_another_layout(one: Any, folders: Any, ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    arguments = ("llama", str(folders("llama")), str(tmp_path / "run"), str(corpus))
    ranks(2, adapt, *arguments, [*TENSOR, "train.stop_at_step=3"])
    ranks(2, resumed, *arguments, PIPELINE)
    assert [r["loss"] for r in metrics(tmp_path / "run")] == pytest.approx([r["loss"] for r in metrics(one("llama")[0])], rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_peft_and_merged_weights_give_the_runs_own_scores(kind: str, one: Any, folders: Any, tmp_path: Path) -> None:
    import peft
    import transformers

    import dufu
    from dufu.training.export_hf import export_folder
    from dufu.training.peft_folder import export_adapter

    folder, _ = one(kind)
    ids = torch.randint(3, 250, (2, 9), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ours = dufu.load(folder).distributed.model(Batch(ids))
        base = transformers.AutoModelForCausalLM.from_pretrained(folders(kind)).eval()
        before = base(input_ids=ids).logits
        adapted = peft.PeftModel.from_pretrained(base, str(export_adapter(folder, tmp_path / "peft"))).eval()
        theirs = adapted(input_ids=ids).logits
        export_folder(folder, tmp_path / "merged")
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()(input_ids=ids).logits
    assert (ours - before).abs().max() > 1e-2  # the adapters do something
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(merged, ours, rtol=1e-4, atol=1e-4)
    loaded = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert all(layer in dict(base.named_modules()) or "base_layer" for layer in loaded["target_modules"])


@pytest.mark.parametrize(("kind", "layout"), [("llama", "tp2"), ("llama dora", "zero3"), ("gpt2", "dp2")])
def test_a_folder_of_peft_goes_on(kind: str, layout: str, folders: Any, ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    """Adapters that PEFT made are what a run begins with: the first loss is that of PEFT's model."""
    import peft
    import transformers

    from dufu.training.peft_folder import export_adapter

    dora = "dora" in kind
    layers = ["c_attn", "c_proj"] if "gpt2" in kind else ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
    base = transformers.AutoModelForCausalLM.from_pretrained(folders(kind)).eval()
    torch.manual_seed(3)
    settings = peft.LoraConfig(r=3, lora_alpha=6, target_modules=layers, use_dora=dora, fan_in_fan_out="gpt2" in kind)
    adapted = peft.get_peft_model(base, settings).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
            elif "magnitude" in name:
                parameter.mul_(1.1)
    adapted.save_pretrained(tmp_path / "peft")
    size, overrides = LAYOUTS[layout]
    out = tmp_path / "run"
    still = [*overrides, "optim.lr=0.0", "train.train_iter=1"]
    ranks(size, begun, kind, str(folders(kind)), str(out), str(corpus), still, str(tmp_path / "peft"))
    again = transformers.AutoModelForCausalLM.from_pretrained(folders(kind)).eval()
    again = peft.PeftModel.from_pretrained(again, str(export_adapter(out, tmp_path / "again"))).eval()
    ids = torch.randint(3, 250, (2, 9), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=ids).logits, adapted(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


def test_other_base_weights_are_refused(one: Any, folders: Any, ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    import dufu

    folder, _ = one("llama")
    other = make("LlamaForCausalLM", vocab_size=300, max_position_embeddings=64)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[3, 5] += 0.25
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match="were trained with other base weights than"):
        dufu.load(folder, [f"train.load_weight={tmp_path / 'other'}"])
    with pytest.raises(CheckpointError, match=r"holds adapters only, and the weights they belong to are not at .*gone"):
        dufu.load(folder, [f"train.load_weight={tmp_path / 'gone'}"])
    shutil.copytree(folders("llama"), tmp_path / "moved")
    assert dufu.load(folder, [f"train.load_weight={tmp_path / 'moved'}"]).step == 5


def test_the_fingerprint_of_the_base_is_the_same_in_every_layout(
    one: Any, folders: Any, ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    from dufu.training.checkpoint import CheckpointReader, find_checkpoint

    def base(folder: Path) -> str:
        return str(CheckpointReader(find_checkpoint(folder)).state["adapter"]["base"])

    for layout in ("tp2", "zero3", "pp2") if ALL else ("tp2",):
        size, overrides = LAYOUTS[layout]
        ranks(size, adapt, "llama", str(folders("llama")), str(tmp_path / layout), str(corpus), [*overrides, "train.train_iter=1"])
        assert base(tmp_path / layout) == base(one("llama")[0])


SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_layers": 1, "hidden_size": 16, "ffn_hidden_size": 16, "num_attention_heads": 2}


def test_only_adapters_and_what_is_named_are_trained() -> None:
    model = Llama(**SMALL)
    Lora(["value"], rank=2, train=["head.norm.weight"]).apply(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    layer = "layers.0.block.attention.query_key_value"
    assert trained == {f"{layer}.lora_a", f"{layer}.lora_b", "head.norm.weight"}
    assert tuple(model.get_parameter(f"{layer}.lora_b").shape) == (16, 2)  # the rows of the values alone


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"patterns": ["qwery"]}, "qwery names no linear layer.*there are query, key, value, output, gate, up, contract"),
        ({"patterns": ["query"], "train": ["hat.weight"]}, "hat.weight names no parameter"),
        ({"patterns": []}, "a list of the layers to adapt"),
        ({"patterns": "query"}, "a list of the layers to adapt"),
        ({"patterns": ["query"], "rank": 0}, "train.adapter.rank=0: at least 1"),
        ({"patterns": ["query"], "variant": "lola"}, 'variant="lola"'),
        ({"patterns": ["query"], "folder": "x"}, "patterns or folder, not both"),
    ],
)
def test_what_names_nothing_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Lora(**arguments).apply(Llama(**SMALL))


def test_a_folder_of_another_method_is_refused(tmp_path: Path) -> None:
    from dufu.training.peft_folder import PeftFolder

    with pytest.raises(CheckpointError, match="it is no folder of PEFT"):
        PeftFolder(tmp_path)
    for fields, said in (
        ({"peft_type": "IA3"}, "peft_type='IA3' is not built"),
        ({"peft_type": "LORA", "bias": "all"}, "bias='all'"),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
        with pytest.raises(DufuError, match=said):
            PeftFolder(tmp_path)
