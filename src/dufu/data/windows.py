"""Documents cut into stretches of at most so many tokens, each token in exactly one, boundaries at sequence ends where there are any."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from dufu.data.indexed import IndexedTokens, last_at_most

Rows = npt.NDArray[np.int64]

_DOCUMENTS, _SEQUENCES, _ROWS = 1 << 16, 1 << 20, 1 << 20


def windows(
    source: IndexedTokens, first: int, last: int, limit: int, end_token: int | None, halves: bool = False
) -> Iterator[Rows]:
    """Yield the stretches of documents `first` to `last`, piece by piece.

    A document of n tokens becomes about n / limit stretches of nearly equal length, so that none is left as a short remainder. A document
    of several sequences is cut at their ends, a sequence longer than the limit also inside. A document shorter than that is one stretch.

    Args:
        source: tokens.
        first, last: half-open range of documents.
        limit: most tokens of a stretch; with `halves`, of each half.
        end_token: left out where it ends a document: it marks an end and is no text.
        halves: whether to yield rows (start, cut, stop) of two halves, the second empty only where there is a single token; otherwise rows
            are (start, stop).
    """
    while first < last:
        bounds = np.array(source.documents[first : min(first + _DOCUMENTS, last) + 1], np.int64)
        taken = max(1, int(np.searchsorted(bounds, bounds[0] + _SEQUENCES, side="right")) - 1)
        bounds = bounds[: taken + 1]
        first += taken
        edges = source.sequence_starts(int(bounds[0]), int(bounds[-1]))
        starts, stops = edges[bounds[:-1] - bounds[0]], edges[bounds[1:] - bounds[0]]
        if end_token is not None:
            ending = np.flatnonzero(stops > starts)
            ending = ending[np.asarray(source.tokens[stops[ending] - 1]) == end_token]
            stops[ending] -= 1
        there = stops > starts
        whole = there & (np.diff(bounds) == 1)
        yield from _evenly(starts[whole], stops[whole], limit, halves)
        parted = there & ~whole
        if parted.any():
            yield _at_edges(edges, starts[parted], stops[parted], limit, halves)


def _evenly(starts: Rows, stops: Rows, limit: int, halves: bool) -> Iterator[Rows]:
    """Cut documents without inner boundaries, a slice of all their stretches at a time: a document may have millions."""
    sizes = stops - starts
    counts = -(-sizes // (2 * limit if halves else limit))
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    for begin in range(0, total, _ROWS):
        number = np.arange(begin, min(begin + _ROWS, total))
        document = np.searchsorted(ends, number, side="right")
        place = number - (ends - counts)[document]
        size, count, start = sizes[document], counts[document], starts[document]
        left, right = start + place * size // count, start + (place + 1) * size // count
        yield np.stack([left, (left + right + 1) // 2, right] if halves else [left, right], 1)


def _at_edges(edges: Rows, starts: Rows, stops: Rows, limit: int, halves: bool) -> Rows:
    """Cut documents of several sequences, all of them one stretch further at a time."""
    found = []
    while len(starts):
        left = stops - starts
        if halves:
            share = -(-left // (2 * -(-left // (2 * limit))))
            cuts = _advance(edges, starts, stops, limit, share)
            ends = np.where(cuts < stops, _advance(edges, cuts, stops, limit, share), stops)
            alone = cuts == stops
            cuts[alone] = _middle(edges, starts[alone], stops[alone])
            found.append(np.stack([starts, cuts, ends], 1))
        else:
            ends = _advance(edges, starts, stops, limit, -(-left // -(-left // limit)))
            found.append(np.stack([starts, ends], 1))
        more = ends < stops
        starts, stops = ends[more], stops[more]
    return np.concatenate(found)


def _advance(edges: Rows, starts: Rows, stops: Rows, limit: int, share: Rows) -> Rows:
    """Return where a stretch ends: the first edge at or after its fair share, else the last one within the limit, else inside a sequence."""
    after = edges[np.minimum(np.searchsorted(edges, starts + share), len(edges) - 1)]
    after = np.minimum(after, stops)
    before = edges[last_at_most(edges, starts + limit)]
    before = np.minimum(before, stops)
    inside = np.minimum(starts + np.minimum(share, limit), stops)
    return np.where((after <= starts + limit) & (after > starts), after, np.where(before > starts, before, inside))


def _middle(edges: Rows, starts: Rows, stops: Rows) -> Rows:
    """Return the edge nearest to the middle of a stretch, or the middle where there is none inside."""
    middle = (starts + stops + 1) // 2
    place = np.searchsorted(edges, middle)
    lower, upper = edges[np.maximum(place - 1, 0)], edges[np.minimum(place, len(edges) - 1)]
    lower_fits, upper_fits = lower > starts, upper < stops
    nearer_upper = upper_fits & (~lower_fits | (upper - middle <= middle - lower))
    return np.where(nearer_upper, upper, np.where(lower_fits, lower, middle))
