"""The picture of a run's loss, `loss.png`, out of its metrics.jsonl."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

_LINES = {None: ("training", "-"), "valid": ("validation", "o-")}


def draw_losses(folder: Path) -> Path | None:
    """Draw the training and validation losses over the steps; None where there is nothing to draw.

    Args:
        folder: the run's folder; `loss.png` in it is replaced.
    """
    curves: dict[str | None, list[tuple[int, float]]] = {}
    with (folder / "metrics.jsonl").open(encoding="utf-8") as file:
        for line in file:
            record: dict[str, Any] = json.loads(line)
            if math.isfinite(record["loss"]):
                curves.setdefault(record.get("split"), []).append((record["step"], record["loss"]))
    if not curves:
        return None
    # The canvas that draws into memory, and no pyplot: nothing here touches a display or another program's figures.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for split, points in curves.items():
        label, style = _LINES.get(split, (str(split), "o-"))
        axes.plot(*zip(*points), style, label=label, markersize=4, linewidth=1.2)
    axes.set(xlabel="step", ylabel="loss", title=folder.resolve().name)
    axes.grid(alpha=0.3)
    axes.legend()
    path = folder / "loss.png"
    part = folder / ".loss.part.png"
    figure.savefig(part)
    part.replace(path)
    return path
