"""A Swin of two stages for small pictures and trials: 32 x 32 pixels, windows of 4 x 4 patches."""

from dufu.config import LazyCall, get_config
from dufu.models.swin.sizes import SIZES

train = get_config("vit_tiny.py").train
optim = get_config("common/optim.py").optim
graph = get_config("common/models/graph.py").graph
dataloader = get_config("vit_tiny.py").dataloader
tokenization = get_config("common/data.py").tokenization

model = LazyCall("dufu.models.swin.SwinTransformer")(cfg=dict(**SIZES["swin_tiny"], drop_path_rate=0.1))

optim.lr = 1e-3
optim.weight_decay = 0.05
train.output_dir = "./output/swin_tiny"
