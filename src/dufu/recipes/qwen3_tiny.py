"""A Qwen 3 of two layers for trials: bytes as tokens, two key-value heads for four query heads, dropout everywhere."""

from dufu.config import LazyCall, get_config

train = get_config("common/train.py").train
optim = get_config("common/optim.py").optim
graph = get_config("common/models/graph.py").graph
dataloader = get_config("common/data.py").dataloader
tokenization = get_config("common/data.py").tokenization

model = LazyCall("dufu.models.qwen.Qwen3")(
    cfg=dict(
        vocab_size=None,
        hidden_layers=2,
        hidden_size=128,
        ffn_hidden_size=352,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_seq_length=128,
        embedding_dropout_prob=0.1,
        attention_dropout_prob=0.1,
        output_dropout_prob=0.1,
    )
)
dataloader.dataset = LazyCall("dufu.data.CausalLMDataset")(sequence_length=None)
dataloader.split = [0.95, 0.05, 0.0]

optim.lr = 1e-3
train.output_dir = "./output/qwen3_tiny"
train.train_micro_batch_size = None
train.global_batch_size = 16
train.train_iter = 200
train.warmup_ratio = 0.05
train.log_period = 10
train.evaluation.eval_period = 100
train.checkpointer.period = 100
train.checkpointer.max_to_keep = 3
