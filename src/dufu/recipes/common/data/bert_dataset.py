"""`dataloader` and `tokenization` for masked words and sentence pairs: `get_config("common/data/bert_dataset.py")`; set `dataloader.data`."""

from dufu.config import LazyCall, get_config

dataloader = get_config("common/data.py").dataloader
tokenization = get_config("common/data.py").tokenization
dataloader.dataset = LazyCall("dufu.data.BertDataset")(sequence_length=None)
dataloader.split = [949.0, 50.0, 1.0]
