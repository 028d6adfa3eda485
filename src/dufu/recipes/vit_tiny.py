"""A ViT of four layers for small pictures and trials: 32 x 32 pixels in patches of 4, dropout everywhere."""

from dufu.config import LazyCall, get_config
from dufu.models.vit.sizes import SIZES

train = get_config("common/train.py").train
optim = get_config("common/optim.py").optim
graph = get_config("common/models/graph.py").graph
dataloader = get_config("common/data.py").dataloader
tokenization = get_config("common/data.py").tokenization

model = LazyCall("dufu.models.vit.VisionTransformer")(
    cfg=dict(
        **SIZES["vit_tiny"],
        drop_rate=0.1,
        attn_drop_rate=0.1,
        drop_path_rate=0.1,
    )
)
dataloader.dataset = LazyCall("dufu.data.PictureDataset")(crop="padded", crop_share=None)
dataloader.split = [0.9, 0.1, 0.0]

optim.lr = 1e-3
optim.weight_decay = 0.05
train.output_dir = "./output/vit_tiny"
train.train_micro_batch_size = None
train.global_batch_size = 32
train.train_iter = 300
train.warmup_ratio = 0.05
train.log_period = 10
train.evaluation.eval_period = 100
train.evaluation.eval_metric = "accuracy@1"
train.checkpointer.period = 100
train.checkpointer.max_to_keep = 3
