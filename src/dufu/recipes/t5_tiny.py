"""A T5 of two and two layers for trials: bytes as tokens, spans hidden as in its pre-training, dropout everywhere."""

from dufu.config import LazyCall, get_config
from dufu.models.t5.sizes import SIZES

train = get_config("common/train.py").train
optim = get_config("common/optim.py").optim
graph = get_config("common/models/graph.py").graph
dataloader = get_config("common/data.py").dataloader
tokenization = get_config("common/data.py").tokenization

model = LazyCall("dufu.models.t5.T5")(
    cfg=dict(
        **SIZES["t5_tiny"],
        extra_ids=32,
        initializer_factor=0.5,  # at the published 1.0 gradients in half precision hold fewer digits than `dufu check` asks for
        embedding_dropout_prob=0.1,
        attention_dropout_prob=0.1,
        activation_dropout_prob=0.1,
        output_dropout_prob=0.1,
    )
)
dataloader.dataset = LazyCall("dufu.data.Seq2SeqDataset")(sequence_length=None)
dataloader.split = [0.95, 0.05, 0.0]

optim.lr = 1e-3
train.output_dir = "./output/t5_tiny"
train.train_micro_batch_size = None
train.global_batch_size = 16
train.train_iter = 200
train.warmup_ratio = 0.05
train.log_period = 10
train.evaluation.eval_period = 100
train.checkpointer.period = 100
train.checkpointer.max_to_keep = 3
