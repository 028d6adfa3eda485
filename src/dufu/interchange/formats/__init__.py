"""Other programs' checkpoints, one module a format: how they are opened, what they say of the model, how its weights are called."""

from __future__ import annotations

from dufu.interchange.formats.base import Format
from dufu.interchange.formats.fairseq import FAIRSEQ
from dufu.interchange.formats.libai import LIBAI
from dufu.interchange.formats.megatron import MEGATRON
from dufu.interchange.formats.uer import TENCENTPRETRAIN, UER

FORMATS: dict[str, Format] = {each.name: each for each in (LIBAI, UER, TENCENTPRETRAIN, MEGATRON, FAIRSEQ)}
