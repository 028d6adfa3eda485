"""Lazy configuration: record a call, load a file, override, check, save, build.

The names are LiBai's, so that its configuration files run with one import line changed.
"""

from dufu.config.configurable import configurable
from dufu.config.instantiate import instantiate
from dufu.config.lazy import LazyCall
from dufu.config.load import LazyConfig, get_config, try_get_key
from dufu.config.trusted import trust

__all__ = ["LazyCall", "LazyConfig", "configurable", "get_config", "instantiate", "trust", "try_get_key"]
