"""Fused query-key-value projections, in the orders in which programs have stored their rows."""

from __future__ import annotations

from dufu.models.names import Part, Rule, by_head, same

KINDS = 3


def fused(ours: str, theirs: str, heads: int, head_size: int, order: str = "head", shards: int = 1) -> Rule:
    """Return the rule of a fused projection; ours has all queries, then all keys, then all values.

    Args:
        order: how each shard's rows go: "head": (heads, 3, size), LiBai's and Megatron-LM's since its version 2; "size":
            (heads, size, 3), version 1; "kind": (3, heads, size), version 0.
        shards: tensor-parallel processes whose rows follow each other.
    """
    if order == "head":
        parts = by_head(ours, theirs, heads, head_size).parts
        return Rule(ours, tuple(sorted(parts, key=lambda part: part.row)))  # printed in the order of our rows
    if order == "kind" and shards == 1:
        return same(ours, theirs)
    local, parts = heads // shards, ()
    for kind in range(KINDS):
        for head in range(heads):
            row = (kind * heads + head) * head_size
            if order == "kind":
                shard, inner = divmod(head, local)
                parts += (Part(theirs, row, head_size, ((shard * KINDS + kind) * local + inner) * head_size),)
            else:
                parts += tuple(Part(theirs, row + f, 1, (head * head_size + f) * KINDS + kind) for f in range(head_size))
    return Rule(ours, parts)
