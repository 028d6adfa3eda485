"""BERT base, as published (Devlin et al., 2018); a tokenizer's vocabulary may be up to 30,522 words."""

from dufu.config import LazyCall, get_config
from dufu.models.bert.sizes import SIZES

train = get_config("common/train.py").train
optim = get_config("common/optim.py").optim
graph = get_config("common/models/graph.py").graph
dataloader = get_config("common/data.py").dataloader
tokenization = get_config("common/data.py").tokenization

model = LazyCall("dufu.models.bert.Bert")(
    cfg=dict(
        **SIZES["bert_base"],
        num_tokentypes=2,
        embedding_dropout_prob=0.1,
        attention_dropout_prob=0.1,
        output_dropout_prob=0.1,
        layernorm_epsilon=1e-12,
        initializer_range=0.02,
        apply_residual_post_layernorm=True,
    )
)
dataloader.dataset = LazyCall("dufu.data.BertDataset")(sequence_length=None)
dataloader.split = [0.949, 0.05, 0.001]

optim.lr = 1e-4
train.output_dir = "./output/bert_base"
train.train_micro_batch_size = 16
train.global_batch_size = 256
train.train_iter = 1000000
train.warmup_ratio = 0.01
train.amp.enabled = True
