"""The table of layouts: every pair of techniques that can meet does so in some row, and is compared with one process.

The names are those of `dufu check`. Pairs without half precision meet in a row in fp32, so that they are held to its tolerance. Rows with
`compile` are captured and divided by PyTorch's compiler, but run without generated code (its "aot_eager"): generating C++ for each row
would take minutes. `COMPILED` rows generate it.
"""

from __future__ import annotations

from itertools import combinations

from dufu.parallel.layout import CONTEXT_METHODS, SCHEDULES
from dufu.parallel.layout_text import parse_layout

LAYOUTS = (
    ("gpt2_tiny", "dp2:batch9"),
    ("gpt2_tiny", "tp2:batch8"),
    ("gpt2_tiny", "sp:batch8"),
    ("gpt2_tiny", "pp2(gpipe):batch8+micro2"),
    ("gpt2_tiny", "pp2:batch8+micro2"),
    ("gpt2_tiny", "pp2(interleaved_1f1b):batch8+micro2"),
    ("gpt2_tiny", "pp2(looped_bfs):batch8+micro2"),
    ("gpt2_tiny", "pp2(interleaved_zero_bubble):batch8+micro2"),
    ("gpt2_tiny", "pp2(zbv):batch8+micro2"),
    ("gpt2_tiny", "pp2(dualpipev):batch8+micro2"),
    ("gpt2_tiny", "cp2:batch8"),
    ("gpt2_tiny", "cp2(all_to_all):batch8"),
    ("gpt2_tiny", "cp2(ring):batch8"),
    ("gpt2_tiny", "zero1:batch9"),
    ("gpt2_tiny", "zero2:batch9"),
    ("gpt2_tiny", "zero3:batch9"),
    ("gpt2_tiny", "zero3(dp4,shard2):batch9"),
    ("gpt2_tiny", "dp2:recompute+batch9+micro2+O2"),
    ("gpt2_tiny", "zero3xpp2xcp2(ring):recompute+batch9+compile"),
    ("gpt2_tiny", "pp2(interleaved_1f1b):recompute+batch8+O1"),
    ("gpt2_tiny", "zero2xspxpp2(gpipe):selective+batch9+micro2"),
    ("gpt2_tiny", "spxpp2(zbv):selective+batch8+O2"),
    ("gpt2_tiny", "zero1(dp4,shard2):selective+batch9+O2"),
    ("gpt2_tiny", "dp2xpp2(dualpipev)xcp2(ring):selective+batch8"),
    ("gpt2_tiny", "pp2(looped_bfs):batch8+micro2+O2"),
    ("gpt2_tiny", "pp2(gpipe):recompute+batch8+micro2+O2"),
    ("gpt2_tiny", "pp2(interleaved_1f1b):selective+batch8+O2"),
    ("gpt2_tiny", "zero2xpp2(interleaved_zero_bubble)xcp2(ring):recompute+batch8+micro2"),
    ("gpt2_tiny", "zero1xpp2(interleaved_1f1b)xcp2(ring):recompute+batch9"),
    ("gpt2_tiny", "dp2xspxpp2:batch9"),
    ("gpt2_tiny", "zero3(dp4,shard2)xcp2(all_to_all):selective+batch8"),
    ("bert_tiny", "dp2:batch9"),
    ("bert_tiny", "tp2:batch8"),
    ("bert_tiny", "sp:batch8"),
    ("bert_tiny", "pp2:batch8+micro2"),
    ("bert_tiny", "cp2(ring):batch8"),
    ("bert_tiny", "zero2(dp4,shard2)xpp2(interleaved_1f1b):selective+batch9+micro2+compile"),
    ("bert_tiny", "zero1xpp2(dualpipev)xcp2(all_to_all):recompute+batch9+micro2+compile"),
    ("bert_tiny", "zero3xpp2(zbv)xcp2:selective+batch9"),
    ("bert_tiny", "zero1xpp2(interleaved_zero_bubble)xcp2:selective+batch9+micro2"),
    ("bert_tiny", "zero2xpp2(looped_bfs)xcp2(ring):recompute+batch9"),
    ("bert_tiny", "pp2(interleaved_zero_bubble)xcp2(all_to_all):batch8+micro2+O2"),
    ("bert_tiny", "spxpp2(dualpipev):recompute+batch8+O1"),
    ("bert_tiny", "zero3xtp2xpp2(gpipe):recompute+batch8+micro2+compile"),
    ("bert_tiny", "tp2xpp2:selective+batch8+O1+compile"),
    ("bert_tiny", "zero2xcp2(all_to_all):batch8+micro2+O1"),
    ("bert_tiny", "zero3xpp2(looped_bfs):selective+batch8+O1"),
    ("bert_tiny", "pp2(interleaved_zero_bubble)xcp2:recompute+batch8+O1"),
    ("bert_tiny", "tp2xpp2xcp2:batch8"),
    ("bert_tiny", "zero3xspxpp2(dualpipev):batch8+micro2"),
    ("bert_tiny", "zero2xpp2xcp2(all_to_all):recompute+batch9+micro2"),
    ("bert_tiny", "tp2xpp2(looped_bfs)xcp2(all_to_all):batch8+micro2"),
    ("bert_tiny", "zero3(dp4,shard2)xpp2(looped_bfs):recompute+batch9"),
    ("bert_tiny", "spxpp2(gpipe)xcp2(ring):selective+batch8"),
    ("bert_tiny", "pp2(zbv)xcp2(all_to_all):selective+batch8+micro2"),
    ("bert_tiny", "pp2(gpipe)xcp2(all_to_all):batch8"),
    ("bert_tiny", "zero2(dp4,shard2)xpp2(dualpipev):recompute+batch9"),
    ("bert_tiny", "zero1(dp4,shard2)xtp2:recompute+batch9+micro2"),
    ("gpt2_moe_tiny", "dp2xep2:batch9"),
    ("gpt2_moe_tiny", "zero2xcp2xep2:recompute+batch9+micro2+compile"),
    ("gpt2_moe_tiny", "zero3xcp2(all_to_all)xep2:selective+batch9+micro2"),
    ("gpt2_moe_tiny", "zero1xtp2xcp2(ring)xep2:selective+batch9+micro2"),
    ("gpt2_moe_tiny", "dp2xspxpp2(looped_bfs)xep2:selective+batch9+micro2+compile"),
    ("gpt2_moe_tiny", "dp2xep2:selective+batch9+micro2+O1"),
    ("gpt2_moe_tiny", "zero1(dp4,shard2)xpp2(gpipe)xep2:recompute+batch9+micro2"),
    ("gpt2_moe_tiny", "dp2xtp2xpp2(interleaved_zero_bubble)xep2:recompute+batch9+micro2"),
    ("gpt2_moe_tiny", "zero3xep2:selective+batch8+micro2+O2"),
    ("gpt2_moe_tiny", "spxpp2(interleaved_1f1b)xcp2xep2:recompute+batch8+micro2"),
    ("gpt2_moe_tiny", "zero1xpp2xep2:selective+batch8+micro2"),
    ("gpt2_moe_tiny", "zero2xtp2xpp2(zbv)xep2:recompute+batch8+micro2+compile"),
    ("gpt2_moe_tiny", "zero2xpp2(dualpipev)xep2:selective+batch8"),
    ("gpt2_moe_tiny", "zero2xcp2(ring)xep2:recompute+batch8+micro2+O2+compile"),
    ("gpt2_moe_tiny", "spxpp2(interleaved_zero_bubble)xcp2(all_to_all):selective+batch8+compile"),
    ("gpt2_moe_tiny", "pp2(zbv)xcp2(ring):batch8+micro2+O1"),
    ("gpt2_moe_tiny", "zero1(dp4,shard2):batch9+O1"),
    ("gpt2_moe_tiny", "tp2xpp2(dualpipev):batch8+micro2+O2"),
    ("gpt2_moe_tiny", "pp2xcp2:recompute+batch8+micro2+O2"),
    ("gpt2_moe_tiny", "dp2xpp2(interleaved_1f1b)xcp2(all_to_all):selective+batch9+micro2"),
    ("gpt2_moe_tiny", "dp2xpp2(gpipe)xcp2xep2:batch8+micro2"),
    ("gpt2_moe_tiny", "zero1xspxpp2(zbv):recompute+batch8+micro2"),
    ("gpt2_moe_tiny", "pp2(gpipe):recompute+batch8+micro2+O1"),
    ("gpt2_moe_tiny", "dp2xpp2(zbv)xcp2(ring)xep2:recompute+batch9"),
    ("gpt2_moe_tiny", "zero3xtp2xpp2(interleaved_1f1b):recompute+batch9"),
    ("gpt2_moe_tiny", "tp2xpp2(dualpipev)xcp2xep2:batch8+micro2"),
    ("gpt2_moe_tiny", "zero3(dp4,shard2)xpp2(interleaved_zero_bubble)xep2:selective+batch8"),
    ("gpt2_moe_tiny", "zero1xpp2(looped_bfs)xcp2:selective+batch9"),
    ("gpt2_moe_tiny", "zero3(dp4,shard2)xspxep2:selective+batch9+micro2"),
    ("gpt2_moe_tiny", "zero3(dp4,shard2)xpp2(zbv):recompute+batch9+micro2"),
    ("gpt2_moe_tiny", "zero1(dp4,shard2)xcp2:batch8"),
    ("gpt2_moe_tiny", "zero2(dp4,shard2)xcp2(ring)xep2:recompute+batch9+micro2"),
    ("gpt2_moe_tiny", "zero1(dp4,shard2)xpp2:recompute+batch8+micro2"),
)
COMPILED = (("gpt2_tiny", "tp2:batch8+compile"),)

# A cover for every run of the tests; `make test-layouts` runs all.
QUICK = (
    ("gpt2_tiny", "dp2:batch9"),
    ("gpt2_tiny", "tp2:batch8"),
    ("gpt2_tiny", "sp:batch8"),
    ("gpt2_tiny", "pp2(zbv):batch8+micro2"),
    ("gpt2_tiny", "cp2(all_to_all):batch8"),
    ("gpt2_tiny", "zero3:batch9"),
    ("bert_tiny", "cp2(ring):batch8"),
    ("bert_tiny", "pp2:batch8+micro2"),
    ("gpt2_moe_tiny", "dp2xep2:batch9"),
)

_EXCLUSIVE = (
    {"dp", "zero1", "zero2", "zero3"}, {"dp", "hybrid"}, {"tp", "sp"}, {"recompute", "selective"}, {"O1", "O2"},
    {f"pp {name}" for name in SCHEDULES}, {f"cp {name}" for name in CONTEXT_METHODS},
)  # fmt: skip
TECHNIQUES = tuple(
    [
        "dp",
        "tp",
        "sp",
        "ep",
        "zero1",
        "zero2",
        "zero3",
        "hybrid",
        "recompute",
        "selective",
        "accumulation",
        "O1",
        "O2",
        "compile",
        "unequal",
    ]
    + [f"pp {name}" for name in SCHEDULES]
    + [f"cp {name}" for name in CONTEXT_METHODS]
)


def techniques(text: str) -> set[str]:
    """Return what a row combines."""
    layout = parse_layout(text)
    settings = dict(setting.split("=", 1) for setting in layout.overrides)
    words = text.partition(":")[2].split("+")
    found = {word for word in words if word in ("recompute", "selective", "O1", "O2", "compile")}
    if settings["train.zero_optimization.enabled"] == "true":
        found.add(f"zero{settings['train.zero_optimization.stage']}")
        found |= {"hybrid"} if settings["train.zero_optimization.shard_size"] != "null" else set()
    elif layout.data > 1:
        found.add("dp")
    if settings["train.dist.tensor_parallel_size"] != "1":
        found.add("sp" if settings["train.dist.sequence_parallel"] == "true" else "tp")
    if settings["train.dist.pipeline_parallel_size"] != "1":
        found.add(f"pp {settings.get('train.dist.pipeline_schedule', '1f1b')}")
    if settings["train.dist.context_parallel_size"] != "1":
        found.add(f"cp {settings.get('train.dist.context_parallel_method', 'all_gather')}")
    if settings["train.dist.expert_parallel_size"] != "1":
        found.add("ep")
    if "micro2" in words:
        found.add("accumulation")
    if int(settings["train.global_batch_size"]) % layout.data:
        found.add("unequal")
    return found


def pairs_wanted() -> set[frozenset[str]]:
    """Return every pair of techniques that can meet."""
    return {frozenset(pair) for pair in combinations(TECHNIQUES, 2) if not any(set(pair) <= group for group in _EXCLUSIVE)}


def pairs_met() -> set[frozenset[str]]:
    """Return every pair that meets in a row; beside half precision only those that it is one of."""
    met: set[frozenset[str]] = set()
    for _, text in (*LAYOUTS, *COMPILED):
        found = techniques(text)
        half = found & {"O1", "O2"}
        met |= {frozenset(pair) for pair in combinations(sorted(found), 2) if not half or set(pair) & half}
    return met
