"""LiBai's names that are others here, or mean nothing here: what to write instead. Other words that people reach for, and the key they mean."""

from __future__ import annotations

import re

_FUSED = "PyTorch chooses its kernels itself; remove the key"
_LOADER = (
    "give the files as dataloader.data (or --data) and the sample as dataloader.dataset; `dufu show dataloader` lists the keys"
)
_TOKENIZER = 'tokenization.tokenizer is one text: "bytes", a tokenizer.json, a vocab.txt, or a folder'

# A key, and what to write instead of it or of anything below it.
REPLACED = {
    "train.consumed_train_samples": "the data position lives in the checkpoint; remove the key",
    "train.consumed_valid_samples": "evaluation always sees each sample once; remove the key",
    "train.train_samples": "it follows from train.train_iter and the global batch; remove the key",
    "train.start_iter": "the step lives in the checkpoint; remove the key",
    "train.samples": "it follows from train.train_iter and the global batch; remove the key",
    "train.warmup_iter": "give train.warmup_ratio, or train.scheduler.warmup_iter",
    "train.topk": "give the evaluator its own: train.evaluation.evaluator",
    "train.resume": "say --resume on the command line",
    "train.eval_only": "say --eval-only on the command line",
    "train.dist.auto_pipeline_stage_id": "it is computed, never given; remove the key",
    "train.dist.actual_pipeline_stage_id": "it is computed, never given; remove the key",
    "train.dist.num_gpus_per_node": "torchrun knows it; remove the key",
    "train.dist.num_nodes": "torchrun knows it; remove the key",
    "graph.global_mode": "the layout is set under train.dist; remove the key",
    "graph.train_graph": "one loop serves eager and compiled; set graph.enabled",
    "graph.eval_graph": "one loop serves eager and compiled; set graph.enabled",
    "optim.parameters": "the key is optim.params",
    "scheduler": "the key is train.scheduler",
    "dataloader.train": _LOADER,
    "dataloader.test": f"{_LOADER}; test files are dataloader.test_data",
    "dataloader.valid": f"{_LOADER}; validation files are dataloader.valid_data",
    "tokenization.tokenizer.vocab_file": _TOKENIZER,
    "tokenization.tokenizer.merges_file": _TOKENIZER,
    "tokenization.tokenizer.do_lower_case": "the key is tokenization.lower_case",
    "tokenization.tokenizer.do_chinese_wwm": "the key is tokenization.chinese_wwm",
    "model.cfg.num_layers": "the key is model.cfg.hidden_layers",
    "model.cfg.intermediate_size": "the key is model.cfg.ffn_hidden_size",
    "model.cfg.max_position_embeddings": "the key is model.cfg.max_seq_length",
    "model.cfg.hidden_dropout_prob": "the keys are model.cfg.embedding_dropout_prob and model.cfg.output_dropout_prob",
    "model.cfg.attention_probs_dropout_prob": "the key is model.cfg.attention_dropout_prob",
    "model.cfg.layernorm_eps": "the key is model.cfg.layernorm_epsilon",
    "model.cfg.bias_gelu_fusion": _FUSED,
    "model.cfg.bias_dropout_fusion": _FUSED,
    "model.cfg.scale_mask_softmax_fusion": _FUSED,
    "model.cfg.apply_query_key_layer_scaling": "attention is computed without overflow in every precision; remove the key",
    "model.cfg.amp_enabled": "the key is train.amp.enabled",
    "model.cfg.loss_func": "the model's head computes the loss; set model.cfg.label_smoothing, and dataloader.dataset.mixup, or remove the key",
}

# The last part of LiBai's dotted path -> the path here.
TARGETS = {
    "GPTModel": "dufu.models.gpt2.GPT2",
    "GPTForPreTraining": "dufu.models.gpt2.GPT2",
    "BertModel": "dufu.models.bert.Bert",
    "BertForPreTraining": "dufu.models.bert.Bert",
    "BertForClassification": "dufu.models.bert.BertClassifier",
    "T5Model": "dufu.models.t5.T5",
    "T5ForPreTraining": "dufu.models.t5.T5",
    "MT5Model": "dufu.models.t5.MT5",
    "MT5ForPreTraining": "dufu.models.t5.MT5",
    "GPT2Dataset": "dufu.data.CausalLMDataset",
    "T5Dataset": "dufu.data.Seq2SeqDataset",
    "BertDataset": "dufu.data.BertDataset",
    "VisionTransformer": "dufu.models.vit.VisionTransformer",
    "SwinTransformer": "dufu.models.swin.SwinTransformer",
    "SwinTransformerV2": "dufu.models.swin.SwinTransformerV2",
    "ResMLP": "dufu.models.resmlp.ResMLP",
    "ImageNetDataset": "dufu.data.PictureDataset",
    "CIFAR10Dataset": "dufu.data.PictureDataset",
    "CIFAR100Dataset": "dufu.data.PictureDataset",
    "AdamW": "dufu.optim.AdamW",
    "Adam": "dufu.optim.Adam",
    "SGD": "dufu.optim.SGD",
    "LAMB": "dufu.optim.LAMB",
    "get_default_optimizer_params": "dufu.optim.get_default_optimizer_params",
    "WarmupCosineLR": "dufu.optim.WarmupCosineLR",
    "WarmupCosineAnnealingLR": "dufu.optim.WarmupCosineAnnealingLR",
    "WarmupStepLR": "dufu.optim.WarmupStepLR",
    "WarmupMultiStepLR": "dufu.optim.WarmupMultiStepLR",
    "WarmupExponentialLR": "dufu.optim.WarmupExponentialLR",
    "WarmupPolynomialLR": "dufu.optim.WarmupPolynomialLR",
    "PPLEvaluator": "the metric PPLEvaluator (train.evaluation.evaluator)",
    "ClsEvaluator": "the metric ClsEvaluator (train.evaluation.evaluator)",
    "RegEvaluator": "the metric RegEvaluator (train.evaluation.evaluator)",
}

# Arguments that the run gives to what a config records.
FILLED_IN = (
    "optim.params.model",
    "train.scheduler.optimizer",
    "dataloader.dataset.source",
    "dataloader.dataset.tokenizer",
    "dataloader.dataset.first_document",
    "dataloader.dataset.last_document",
)

# Words that other projects use -> the key here.
SYNONYMS = {
    "learning_rate": "optim.lr",
    "max_lr": "optim.lr",
    "base_lr": "optim.lr",
    "batch_size": "train.global_batch_size",
    "per_device_train_batch_size": "train.train_micro_batch_size",
    "micro_batch_size": "train.train_micro_batch_size",
    "gradient_accumulation_steps": "train.num_accumulation_steps",
    "accumulation_steps": "train.num_accumulation_steps",
    "epochs": "train.train_epoch",
    "num_epochs": "train.train_epoch",
    "num_train_epochs": "train.train_epoch",
    "steps": "train.train_iter",
    "max_steps": "train.train_iter",
    "train_steps": "train.train_iter",
    "max_iter": "train.train_iter",
    "warmup": "train.warmup_ratio",
    "warmup_steps": "train.scheduler.warmup_iter",
    "log_interval": "train.log_period",
    "logging_steps": "train.log_period",
    "save_interval": "train.checkpointer.period",
    "save_steps": "train.checkpointer.period",
    "eval_interval": "train.evaluation.eval_period",
    "eval_steps": "train.evaluation.eval_period",
    "max_grad_norm": "optim.params.clip_grad_norm",
    "gradient_clipping": "optim.params.clip_grad_norm",
    "clip_grad": "optim.params.clip_grad_norm",
    "data_path": "dataloader.data",
    "bf16": "train.amp.dtype",
    "fp16": "train.amp.dtype",
    "precision": "train.amp.level",
    "gradient_checkpointing": "train.activation_checkpoint.enabled",
    "compile": "graph.enabled",
    "num_layers": "model.cfg.hidden_layers",
    "n_layer": "model.cfg.hidden_layers",
    "num_hidden_layers": "model.cfg.hidden_layers",
    "n_head": "model.cfg.num_attention_heads",
    "n_embd": "model.cfg.hidden_size",
    "block_size": "model.cfg.max_seq_length",
    "seq_length": "model.cfg.max_seq_length",
}


def replacement(path: str) -> str:
    """Return what to write instead of a dotted key, or of the key above it that is gone; "" when nothing is known."""
    for key, advice in REPLACED.items():
        if path == key or path.startswith((key + ".", key + "[")):
            return advice
    return ""


def replacement_in(line: str) -> str:
    """Return what to write instead of the first replaced key that a line of Python mentions."""
    for key, advice in REPLACED.items():
        if re.search(rf"(?<![\w.]){re.escape(key)}\b", line):
            return advice
    return ""
