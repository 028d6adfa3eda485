"""`dataloader` and `tokenization` for causal language modelling: `get_config("common/data/gpt_dataset.py")`; set `dataloader.data`."""

from dufu.config import LazyCall, get_config

dataloader = get_config("common/data.py").dataloader
tokenization = get_config("common/data.py").tokenization
dataloader.dataset = LazyCall("dufu.data.CausalLMDataset")(sequence_length=None)
dataloader.split = [949.0, 50.0, 1.0]
