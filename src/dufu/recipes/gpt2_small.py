"""GPT-2 with 124 million parameters, as published (Radford et al., 2019); a tokenizer's vocabulary may be up to 50,257 words."""

from dufu.config import LazyCall, get_config
from dufu.models.gpt2.sizes import SIZES

train = get_config("common/train.py").train
optim = get_config("common/optim.py").optim
graph = get_config("common/models/graph.py").graph
dataloader = get_config("common/data.py").dataloader
tokenization = get_config("common/data.py").tokenization

model = LazyCall("dufu.models.gpt2.GPT2")(
    cfg=dict(
        **SIZES["gpt2_small"],
        embedding_dropout_prob=0.1,
        attention_dropout_prob=0.1,
        output_dropout_prob=0.1,
        layernorm_epsilon=1e-5,
        initializer_range=0.02,
        activation="gelu_tanh",
    )
)
dataloader.dataset = LazyCall("dufu.data.CausalLMDataset")(sequence_length=None)
dataloader.split = [0.949, 0.05, 0.001]

optim.lr = 6e-4
optim.weight_decay = 0.1
optim.betas = (0.9, 0.95)
train.output_dir = "./output/gpt2_small"
train.train_micro_batch_size = 8
train.global_batch_size = 512
train.train_iter = 100000
train.warmup_ratio = 0.02
train.amp.enabled = True
