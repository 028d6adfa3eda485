"""A LiBai config with its import line changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from dufu.cli.main import run
from dufu.config import LazyConfig, get_config, instantiate
from dufu.config.renamed import REPLACED, TARGETS
from dufu.config.resolve import resolve
from dufu.config.schema import section_at
from dufu.errors import ConfigError
from dufu.training.effective import effective_config
from tests.small import dufu, metrics

SEED = """
from dufu.config import get_config
train = get_config("common/train.py").train; optim = get_config("common/optim.py").optim
graph = get_config("common/models/graph.py").graph
train.dist.data_parallel_size = 2; train.dist.tensor_parallel_size = 2; train.dist.pipeline_parallel_size = 2
train.dist.pipeline_num_layers = 24; train.dist.custom_pipeline_stage_id = [0] * 14 + [1] * 10
graph.auto_parallel.enabled = True; train.amp.enabled = True
optim.params.clip_grad_norm = 1.0; optim.params.clip_grad_norm_type = 2.0
train.num_accumulation_steps = 8; train.activation_checkpoint.enabled = True
train.zero_optimization.enabled = True; train.zero_optimization.stage = 2
"""

# LiBai's default table, less the differences that docs/libai.md lists.
DEFAULTS = {
    "train.output_dir": "./output", "train.global_batch_size": None, "train.num_accumulation_steps": None,
    "train.train_iter": 10000, "train.train_epoch": 0, "train.warmup_ratio": 0, "train.amp.enabled": False,
    "train.activation_checkpoint.enabled": False, "train.nccl_fusion_threshold_mb": 16, "train.nccl_fusion_max_ops": 24,
    "train.zero_optimization.enabled": False, "train.checkpointer.period": 5000, "train.checkpointer.max_to_keep": 100,
    "train.checkpointer.save_model_after_n_epoch": None, "train.test_micro_batch_size": 32, "train.evaluation.enabled": True,
    "train.evaluation.eval_period": 5000, "train.evaluation.eval_after_n_epoch": None, "train.evaluation.eval_iter": 1e5,
    "train.load_weight": "", "train.log_period": 20, "train.seed": 1234, "train.rdma_enabled": True,
    "train.dist.tensor_parallel_size": 1, "train.dist.pipeline_parallel_size": 1, "train.dist.pipeline_num_layers": None,
    "train.dist.custom_pipeline_stage_id": None, "train.scheduler._target_": "dufu.optim.WarmupCosineLR",
    "train.scheduler.warmup_factor": 0.001, "train.scheduler.alpha": 0.01, "train.scheduler.warmup_method": "linear",
    "graph.debug": -1, "graph.auto_parallel.enabled": False, "graph.auto_parallel.trunk_algo": True,
    "graph.auto_parallel.sbp_collector": False, "graph.auto_parallel.enable_auto_parallel_ignore_user_sbp_config": False,
    "optim.lr": 1e-4, "optim.weight_decay": 0.01, "optim.betas": [0.9, 0.999], "optim.eps": 1e-8,
    "optim.do_bias_correction": True, "optim.params.clip_grad_norm_type": 2.0, "optim.params.weight_decay_norm": 0.0,
    "optim.params.weight_decay_bias": 0.0,
}  # fmt: skip
# The rest of that table: keys whose default differs here.
DIFFERENT = {
    "train.train_micro_batch_size": None, "train.dist.data_parallel_size": None, "train.input_placement_device": None,
    "train.zero_optimization.stage": None, "train.evaluation.evaluator": None, "train.evaluation.eval_metric": "loss",
    "train.evaluation.eval_mode": None, "graph.enabled": False,
}  # fmt: skip
# Keys of that table that mean nothing here.
GONE = (
    "train.start_iter",
    "train.consumed_train_samples",
    "train.consumed_valid_samples",
    "train.train_samples",
    "graph.global_mode",
)


def page() -> str:
    return (Path(__file__).parents[2] / "docs" / "libai.md").read_text(encoding="utf-8")


def test_the_seed_config_loads_prints_and_validates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "seed.py").write_text(SEED)
    config = effective_config(tmp_path / "seed.py")
    assert (config.train.dist.pipeline_num_layers, len(config.train.dist.custom_pipeline_stage_id)) == (24, 24)
    assert (config.optim.params.clip_grad_norm, config.train.zero_optimization.stage) == (1.0, 2)
    shown = dufu("show", "seed.py", cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    (tmp_path / "shown.yaml").write_text(shown.stdout)
    assert effective_config(tmp_path / "shown.yaml") == config
    assert run(["show", str(tmp_path / "seed.py"), "--py"]) == 0
    assert "cfg.train.dist.pipeline_parallel_size = 2\n" in capsys.readouterr().out


def test_the_seed_config_does_not_start_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "seed.py").write_text(SEED)
    monkeypatch.chdir(tmp_path)
    for processes in ([], ["--nproc", "8"]):
        assert run(["train", "seed.py", *processes]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: auto parallel is not built yet") and error.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["seed.py"]


def test_the_seed_config_runs_on_eight_processes(corpus: Path, tmp_path: Path) -> None:
    # its 24 layers on two stages as it lists them, tensor and data parallel, ZeRO-2, recomputed, in half precision
    (tmp_path / "seed.py").write_text(f'{SEED}model = get_config("common/models/gpt.py").pretrain_model\n')
    small = [
        "graph.auto_parallel.enabled=false", "model.cfg.hidden_layers=24", "model.cfg.hidden_size=32", "model.cfg.num_attention_heads=4",
        "model.cfg.ffn_hidden_size=64", "model.cfg.max_seq_length=24", "train.train_micro_batch_size=1", "train.train_iter=2",
        "train.log_period=1", "train.tensorboard=false", "train.evaluation.enabled=false", "dataloader.dataset=causal_lm",
    ]  # fmt: skip
    layout = ["train.dist.data_parallel_size=1", "train.dist.tensor_parallel_size=1", "train.dist.pipeline_parallel_size=1"]
    one = [
        *layout,
        "train.zero_optimization.enabled=false",
        "train.zero_optimization.stage=null",
        "train.num_accumulation_steps=16",
    ]
    for name, given, processes in (("eight", [], ["--nproc", "8"]), ("one", one, [])):
        done = dufu("train", "seed.py", *small, *given, "--data", str(corpus), f"train.output_dir={name}", *processes, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    eight, alone = metrics(tmp_path / "eight"), metrics(tmp_path / "one")
    assert "zero2xtp2xpp2" in (tmp_path / "eight" / "log.txt").read_text()
    assert [r["tokens"] for r in eight] == [r["tokens"] for r in alone]
    for a, b in zip(alone, eight):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)  # bf16 sums in another order


def test_the_defaults_are_libais_but_for_those_that_the_page_lists() -> None:
    parts = {"train": "common/train.py", "optim": "common/optim.py", "graph": "common/models/graph.py"}
    for key, default in {**DEFAULTS, **DIFFERENT}.items():
        section, _, rest = key.partition(".")
        node = get_config(parts[section])[section]
        for name in rest.split("."):
            node = node[name]
        assert node == default, key
    for key in DIFFERENT:
        assert key in page() or key.rpartition(".")[2] in page(), key


@pytest.mark.parametrize("key", GONE)
def test_a_key_that_means_nothing_says_what_to_write(key: str) -> None:
    with pytest.raises(ConfigError, match="set under train.dist" if "global" in key else "remove the key"):
        effective_config("gpt2_tiny", [f"{key}=0"])


def test_the_page_lists_every_key_that_is_gone_and_every_name_that_changed() -> None:
    for key, advice in REPLACED.items():
        assert f"| `{key}` | {advice} |" in page()
        assert section_at(key) is None  # no advice against a key that exists
    for name, path in TARGETS.items():
        assert f"| `{name}` |" in page()
        if " " not in path:
            assert callable(resolve(path))


def test_libais_ways_of_setting_what_is_gone_say_what_to_write(tmp_path: Path) -> None:
    head = 'from dufu.config import get_config\npart = get_config("common/data/gpt_dataset.py")\n'
    for line, message in (
        (
            'tokenization = part.tokenization\ntokenization.tokenizer.vocab_file = "v.json"',
            r"c\.py:4: tokenization\.tokenizer is one text",
        ),
        (
            'dataloader = part.dataloader\ndataloader.train.dataset[0].data_prefix = "p"',
            r"c\.py:4: give the files as dataloader\.data",
        ),
    ):
        (tmp_path / "c.py").write_text(f"{head}{line}\n")
        with pytest.raises(ConfigError, match=message):
            effective_config(tmp_path / "c.py")


def test_the_packaged_parts_make_a_config(tmp_path: Path) -> None:
    for model, data in (("gpt", "gpt_dataset"), ("bert", "bert_dataset")):
        (tmp_path / "c.py").write_text(
            "from dufu.config import get_config\n"
            f'model = get_config("common/models/{model}.py").pretrain_model\n'
            f'data = get_config("common/data/{data}.py")\n'
            "dataloader, tokenization = data.dataloader, data.tokenization\n"
            'optim = get_config("common/optim.py").optim\n'
            "model.cfg.hidden_size = 96\nmodel.cfg.hidden_layers = 1\nmodel.cfg.vocab_size = 300\n"
        )
        config = effective_config(tmp_path / "c.py", ["train.amp.enabled=true"])
        built = instantiate(config.model)
        assert built.units()
        assert list(LazyConfig.load(tmp_path / "c.py").dataloader.split) == [949.0, 50.0, 1.0]
