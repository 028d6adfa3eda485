"""The `train` section with its defaults."""

from dufu.config import LazyCall
from dufu.config.lazy import as_config
from dufu.config.schema import Train, to_dict

train = as_config(to_dict(Train()))
train.scheduler = LazyCall("dufu.optim.WarmupCosineLR")(warmup_factor=0.001, alpha=0.01, warmup_method="linear")
