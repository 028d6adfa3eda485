"""Every key of the `train` and `graph` sections: its type, its default, what it means. Names are LiBai's.

`common/train.py` and `common/models/graph.py` are made from these classes; the check and `dufu show train` read them.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeVar, get_type_hints

T = TypeVar("T")


def key(default: T, doc: str) -> T:
    """Declare one key with its default and its explanation."""
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: type(default)(default), metadata={"doc": doc})  # type: ignore[return-value]
    return field(default=default, metadata={"doc": doc})  # type: ignore[return-value]


def call(kind: str, default: Any, doc: str) -> Any:
    """Declare a key that holds a registered short name, a dotted path or a recorded call.

    Args:
        kind: the registry's kind.
        default: the recorded call as a dict; None where the key may be null.
    """
    return field(default_factory=lambda: deepcopy(default), metadata={"doc": doc, "kind": kind, "nullable": default is None})


def part(cls: type[T], doc: str) -> T:
    """Declare a nested section."""
    return field(default_factory=cls, metadata={"doc": doc})  # type: ignore[return-value]


@dataclass
class Dist:
    data_parallel_size: int | None = key(None, "processes that share the global batch; null = all that the other sizes leave")
    tensor_parallel_size: int = key(1, "processes that share each layer's matrices")
    pipeline_parallel_size: int = key(1, "processes that share the chain of layers")
    context_parallel_size: int = key(1, "processes that share each sequence")
    context_parallel_method: Literal["all_gather", "all_to_all", "ring"] = key(
        "all_gather", "how queries reach other processes' keys: all of them at once, heads exchanged for positions, or in turns"
    )
    expert_parallel_size: int = key(1, "of the data × context processes, those that share the experts of a mixture layer")
    timeout: str = key("30min", "how long an operation between processes may take before it is explained and all end")
    sequence_parallel: bool = key(False, "split norms and dropouts over the tensor-parallel processes by position")
    pipeline_num_layers: int | None = key(None, "number of layers that the pipeline divides; null = the model's")
    custom_pipeline_stage_id: list[int] | None = key(None, "the stage of each layer, non-decreasing; null = balanced by cost")
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev"] = (
        key("1f1b", "order of forward and backward passes in a pipeline")
    )
    pipeline_virtual_stages: int | None = key(None, "stages on each process; null = 1, or 2 for the schedules that need several")


@dataclass
class Amp:
    enabled: bool = key(False, "true alone means level O1")
    level: Literal["O0", "O1", "O2", "O3"] | None = key(
        None, "O0 fp32; O1 autocast; O2 half weights with fp32 master weights and states; O3 pure half"
    )
    dtype: Literal["bf16", "fp16"] | None = key(None, "null = bf16, or fp16 where bf16 is not supported")
    init_scale: float = key(65536.0, "fp16: first loss scale")
    growth_interval: int = key(2000, "fp16: steps without overflow before the scale doubles")
    min_scale: float = key(1.0, "fp16: the scale's floor")
    max_skips_at_floor: int = key(20, "fp16: skipped steps in a row at the floor before the run stops with an error")


@dataclass
class ActivationCheckpoint:
    enabled: bool = key(False, "recompute activations in backward instead of keeping them")
    mode: Literal["full", "selective"] = key("full", "full: the whole layer; selective: all but the matrix products")


@dataclass
class ZeroOptimization:
    enabled: bool = key(False, "shard optimizer state, gradients, weights over the data-parallel processes")
    stage: Literal[1, 2, 3] | None = key(None, "1 states; 2 and gradients; 3 and weights; null = 1")
    shard_size: int | None = key(None, "processes that share one copy, others repeating it (hybrid sharding); null = all")


@dataclass
class Checkpointer:
    period: int = key(5000, "steps between checkpoints")
    max_to_keep: int = key(100, "newest checkpoints kept; the best is kept besides")
    save_model_after_n_epoch: int | None = key(None, "epochs between checkpoints; sets the period")
    async_save: bool = key(False, "write in a thread while training goes on")


@dataclass
class Evaluation:
    enabled: bool = key(True, "evaluate on the validation samples during training")
    evaluator: Any = call("metric", None, "a metric's name or recorded call, or a list; null = the model's own")
    eval_period: int = key(5000, "steps between evaluations; one more at the end")
    eval_after_n_epoch: int | None = key(None, "epochs between evaluations; sets the period")
    eval_iter: int = key(100000, "most micro-batches in one evaluation")
    eval_metric: str = key("loss", "the metric that decides which checkpoint is best")
    eval_mode: Literal["min", "max"] | None = key(None, "whether a smaller or a larger metric is better; null = by its name")


@dataclass
class EarlyStopping:
    patience: int | None = key(None, "evaluations without a better metric before the run ends; null = never")
    min_delta: float = key(0.0, "smallest change that counts as better")


@dataclass
class Ema:
    enabled: bool = key(False, "keep an exponential moving average of the weights, and evaluate with it")
    decay: float = key(0.999, "share of the average kept at each step")


# LiBai's default schedule.
COSINE = {"_target_": "dufu.optim.WarmupCosineLR", "warmup_factor": 0.001, "alpha": 0.01, "warmup_method": "linear"}


@dataclass
class Train:
    output_dir: str = key("./output", "the run's folder")
    overwrite: bool = key(False, "let a new run replace one in output_dir")
    train_micro_batch_size: int | None = key(None, "samples of one forward pass on one process; null = derived, or 32")
    global_batch_size: int | None = key(None, "samples of one step over all processes")
    num_accumulation_steps: int | None = key(None, "micro-batches of one step on one process")
    train_iter: int = key(10000, "steps of the run")
    train_epoch: float = key(0, "epochs of the run; the larger of both counts")
    warmup_ratio: float = key(0.0, "share of train_iter used for warm-up, in [0, 1)")
    log_period: int = key(20, "steps between lines of metrics.jsonl")
    seed: int = key(1234, "the one seed: weights, data order and dropout are functions of it")
    load_weight: str = key("", "checkpoint, or Hugging Face folder, to take the first weights from")
    allow_missing: list[str] = key([], "patterns of weights that load_weight may lack; they begin anew")
    allow_unexpected: list[str] = key([], "patterns of weights of load_weight that the model may have no place for")
    stop_at_step: int | None = key(None, "end early, with a checkpoint, after this many steps")
    stop_after: str | None = key(None, 'end early, with a checkpoint, after this time, such as "50min"')
    input_placement_device: str | None = key(None, "device type; null = cuda where there is one, otherwise cpu")
    non_finite: Literal["stop", "skip"] = key("stop", "what a loss or gradient norm that is no number does")
    tensorboard: bool = key(True, "write TensorBoard files")
    deterministic: bool = key(True, "use PyTorch's deterministic algorithms where the device has a choice")
    rdma_enabled: bool = key(True, "false tells NCCL to leave InfiniBand alone")
    nccl_fusion_threshold_mb: int = key(
        16, "accepted for LiBai's configs, without effect: gradients are reduced in pieces of dufu's choice"
    )
    nccl_fusion_max_ops: int = key(
        24, "accepted for LiBai's configs, without effect: gradients are reduced in pieces of dufu's choice"
    )
    test_micro_batch_size: int = key(32, "samples of one forward pass in evaluation")
    dist: Dist = part(Dist, "layout")
    amp: Amp = part(Amp, "precision")
    activation_checkpoint: ActivationCheckpoint = part(ActivationCheckpoint, "recomputation")
    zero_optimization: ZeroOptimization = part(ZeroOptimization, "ZeRO")
    checkpointer: Checkpointer = part(Checkpointer, "checkpoints")
    evaluation: Evaluation = part(Evaluation, "evaluation during training")
    early_stopping: EarlyStopping = part(EarlyStopping, "early stopping")
    ema: Ema = part(Ema, "averaged weights")
    adapter: Any = call("adapter", None, "what is trained in the place of the model's own weights, such as lora: a recorded call")
    hooks: Any = call("hook", None, "hooks that run after dufu's own, such as sample_text: a recorded call, or a list of them")
    scheduler: Any = call("schedule", COSINE, "a learning-rate schedule's name or recorded call")


@dataclass
class AutoParallel:
    enabled: bool = key(False, "search a layout (not built)")
    prune_parallel_strategy_by_user: bool = key(False, "accepted for LiBai's configs, without effect: auto parallel is not built")
    enable_auto_parallel_ignore_user_sbp_config: bool = key(
        False, "accepted for LiBai's configs, without effect: auto parallel is not built"
    )
    trunk_algo: bool = key(True, "accepted for LiBai's configs, without effect: auto parallel is not built")
    sbp_collector: bool = key(False, "accepted for LiBai's configs, without effect: auto parallel is not built")


@dataclass
class Graph:
    enabled: bool = key(False, "compile the model block by block; needs a C++ compiler on CPU")
    debug: int = key(-1, "accepted for LiBai's configs, without effect: TORCH_LOGS shows what is compiled")
    auto_parallel: AutoParallel = part(AutoParallel, "auto parallel")


@dataclass
class Dataloader:
    data: list[Any] = key([], "files: raw text, JSON lines, or prefixes of preprocessed .bin/.idx pairs")
    weights: list[float] | None = key(None, "share of each file in the blend; null = by size, each sample once an epoch")
    valid_data: list[Any] = key([], "files of the validation split; empty = split by document from data")
    test_data: list[Any] = key([], "files of the test split")
    split: list[float] = key([0.98, 0.02, 0.0], "shares of documents for training, validation and test")
    dataset: Any = call("dataset", None, "a dataset's name or recorded call: what a sample is")
    documents: Literal["lines", "blank-lines"] = key("lines", "how raw text separates documents")
    text_key: str = key("text", "field of a JSON line that holds the text")
    split_sentences: bool = key(False, "raw text: make each sentence a sequence of its document, for sentence pairs")
    shuffle: bool = key(True, "permute the samples anew each epoch")
    cache_dir: str | None = key(None, "where tokenised raw files are kept; null = the user's cache folder")


@dataclass
class Tokenization:
    tokenizer: str = key("bytes", '"bytes", a tokenizer.json, a BERT vocab.txt, or a folder')
    append_eod: bool = key(True, "end each document with the end-of-document token")
    make_vocab_size_divisible_by: int = key(
        1, "accepted for LiBai's configs, without effect: rows are padded as the layout needs, and never saved"
    )
    chinese_wwm: bool = key(False, "mark Chinese whole words for masking (needs dufu[chinese])")
    lower_case: bool = key(True, "BERT vocabularies: lower-case and strip accents")


SECTIONS: dict[str, type] = {"train": Train, "graph": Graph, "dataloader": Dataloader, "tokenization": Tokenization}
# Sections that hold one recorded call, and its kind.
CALLS = {"model": "model", "optim": "optimizer"}
SECTION_NAMES = (*SECTIONS, *CALLS)


def to_dict(section: Any) -> dict[str, Any]:
    """Return a section's dataclass as a nested dict."""
    out: dict[str, Any] = {}
    for item in fields(section):
        value = getattr(section, item.name)
        out[item.name] = to_dict(value) if is_dataclass(value) else value
    return out


def defaults(path: str) -> list[str]:
    """Return the overrides that set every key of a nested section, such as `train.dist`, to its default."""
    first, *rest = path.split(".")
    values: Any = to_dict(SECTIONS[first]())
    for name in rest:
        values = values[name]
    texts = {None: "null", True: "true", False: "false"}
    return [
        f"{path}.{name}={texts[value] if value is None or isinstance(value, bool) else value}" for name, value in values.items()
    ]


def section_at(path: str) -> tuple[type, str] | None:
    """Return the class that declares a dotted key, and the key's last part ("" for a section itself); None for no such key."""
    first, *rest = path.split(".")
    cls = SECTIONS.get(first)
    for depth, name in enumerate(rest):
        if cls is None or name not in {item.name for item in fields(cls)}:
            return None
        kind = get_type_hints(cls)[name]
        if not is_dataclass(kind):
            return (cls, name) if depth == len(rest) - 1 else None
        cls = kind  # type: ignore[assignment]
    return (cls, "") if cls is not None else None


def section_paths(name: str = "", cls: type | None = None) -> list[str]:
    """Return the dotted path of every key of every section, or of one section."""
    if cls is None:
        return [path for section, kind in SECTIONS.items() for path in section_paths(section, kind)]
    hints = get_type_hints(cls)
    out = []
    for item in fields(cls):
        path = f"{name}.{item.name}"
        out.append(path)
        if is_dataclass(hints[item.name]):
            out += section_paths(path, hints[item.name])  # type: ignore[arg-type]
    return out
