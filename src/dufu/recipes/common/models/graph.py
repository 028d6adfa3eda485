"""The `graph` section with its defaults."""

from dufu.config.lazy import as_config
from dufu.config.schema import Graph, to_dict

graph = as_config(to_dict(Graph()))
