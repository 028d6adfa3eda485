"""A ResMLP of four layers for small pictures and trials: 32 x 32 pixels in patches of 4; with LAMB, as its authors train it."""

from dufu.config import LazyCall, get_config
from dufu.models.resmlp.sizes import SIZES

train = get_config("vit_tiny.py").train
graph = get_config("common/models/graph.py").graph
dataloader = get_config("vit_tiny.py").dataloader
tokenization = get_config("common/data.py").tokenization

model = LazyCall("dufu.models.resmlp.ResMLP")(cfg=dict(**SIZES["resmlp_tiny"]))
optim = LazyCall("dufu.optim.LAMB")(
    params=get_config("common/optim.py").optim.params,
    lr=5e-3,
    weight_decay=0.2,
)

train.output_dir = "./output/resmlp_tiny"
