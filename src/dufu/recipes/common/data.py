"""The `dataloader` and `tokenization` sections with their defaults."""

from dufu.config.lazy import as_config
from dufu.config.schema import Dataloader, Tokenization, to_dict

dataloader = as_config(to_dict(Dataloader()))
tokenization = as_config(to_dict(Tokenization()))
