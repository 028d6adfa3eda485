"""What each process of a pipeline does, in order: PyTorch's schedule tables, for any number of micro-batches.

GPipe (Huang et al., 2019) and 1F1B (Narayanan et al., 2019) are a few lines here. PyTorch computes the tables of interleaved 1F1B
(Narayanan et al., 2021), looped BFS (Lamy-Poirier, 2023), interleaved zero bubble and ZBV (Qi et al., 2023) and DualPipeV (DeepSeek, 2025), and
places the messages between stages so that no two processes wait for each other. Its tables want certain numbers of micro-batches; we take
the next larger table and leave out the micro-batches that there are not, which keeps the order of all others.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from dufu.compat import Computations, pipeline_computations, with_messages
from dufu.parallel.layout import ParallelLayout, Pipelining


class Action(NamedTuple):
    """One thing to do.

    Args:
        kind: F forward, B backward, I backward to the inputs, W backward to the weights; SEND_F, RECV_F, SEND_B, RECV_B messages.
        stage: of the pipeline.
        micro: number of the micro-batch.
    """

    kind: str
    stage: int
    micro: int


_CLASSES = {
    "interleaved_1f1b": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}


@lru_cache(maxsize=64)
def schedule_table(pipelining: Pipelining, processes: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of each process of the pipeline."""
    layout = ParallelLayout(pipeline=processes, pipelining=pipelining)
    # Every schedule is content with a multiple of the processes that is no smaller than the number of stages.
    rounded = max(-(-micro_batches // processes) * processes, layout.stages)
    if pipelining.schedule in _CLASSES:
        order = pipeline_computations(_CLASSES[pipelining.schedule], processes, pipelining.virtual, rounded)
    else:
        order = _one_stage_each(pipelining.schedule, processes, micro_batches)
    chosen = {p: [a for a in actions if a[2] < micro_batches] for p, actions in order.items()}
    table = with_messages(chosen, layout.stage_owner, layout.stages)
    return tuple(tuple(Action(*a) for a in table[p]) for p in range(processes))


def _one_stage_each(schedule: str, processes: int, micro_batches: int) -> Computations:
    """Return GPipe's order, all forwards before all backwards, or that of 1F1B: as few micro-batches under way as keep all stages busy."""
    order: Computations = {}
    for p in range(processes):
        ahead = micro_batches if schedule == "gpipe" else min(micro_batches, processes - p)
        steps = [("F", p, m) for m in range(ahead)]
        for m in range(micro_batches):
            steps.append(("B", p, m))
            if ahead + m < micro_batches:
                steps.append(("F", p, ahead + m))
        order[p] = steps
    return order


def received_for_certain(table: tuple[tuple[Action, ...], ...], layout: ParallelLayout, p: int) -> dict[Action, list[Action]]:
    """Return, for each message that process `p` receives, which of its own messages the sender had asked for before it sent that one.

    Those need not be kept any longer. (gloo does not say when a message has been taken.)
    """
    where = [{action: index for index, action in enumerate(actions)} for actions in table]

    def partner(action: Action) -> tuple[int, Action]:
        step = 1 if action.kind in ("SEND_F", "RECV_B") else -1
        other = {"SEND_F": "RECV_F", "RECV_F": "SEND_F", "SEND_B": "RECV_B", "RECV_B": "SEND_B"}[action.kind]
        return layout.stage_owner(action.stage + step), Action(other, action.stage + step, action.micro)

    sends = [(action, *partner(action)) for action in table[p] if action.kind.startswith("SEND")]
    free: dict[Action, list[Action]] = {}
    told: set[Action] = set()
    for action in table[p]:
        if action.kind.startswith("RECV"):
            peer, sent = partner(action)
            limit = where[peer][sent]
            mine = [own for own, to, taken in sends if to == peer and own not in told and where[peer][taken] < limit]
            told.update(mine)
            free[action] = mine
    return free
