"""Requests and pushes cut so that no message is larger than a limit."""

from collections.abc import Sequence
from typing import NamedTuple

from evergrad.messages import GroupGrads, GroupSpan, Keys, TableGrads, TableKeys
from evergrad.trainer.collected import Wanted

MESSAGE_BYTES = 256 << 20
"""About how large a message may be; a table's row or a dense element is never cut."""
PIECE_BYTES = 4 << 20
"""A larger pull is asked for in pieces, none smaller: one is on its way while the next is put together."""
PIECES = 16
"""So many are asked for at once of each pserver at most, of about the size of one message together."""


class Piece(NamedTuple):
    """Units [start, stop) of an item."""

    item: int
    start: int
    stop: int


def packed(items: Sequence[tuple[int, int]], limit: int) -> list[list[Piece]]:
    """Cut items, each so many units of so many bytes, into bins of at most `limit` bytes; at least one bin.

    Every item is in some bin, an empty one too; a unit larger than the limit has a bin of its own.
    """
    if sum(count * unit_bytes for count, unit_bytes in items) <= limit:
        return [[Piece(item, 0, count) for item, (count, _) in enumerate(items)]]
    bins: list[list[Piece]] = [[]]
    room = limit
    for item, (count, unit_bytes) in enumerate(items):
        start = 0
        while True:
            fitting = min(count - start, max(room // unit_bytes, 1 if room == limit else 0))
            if fitting or not count:
                bins[-1].append(Piece(item, start, start + fitting))
                room -= fitting * unit_bytes
                start += fitting
            if start >= count:
                break
            bins.append([])
            room = limit
    return bins


def cut_pull(
    keys: Sequence[tuple[int, Keys, int]],
    spans: Sequence[tuple[int, int, int]],
    message_bytes: int,
    piece_bytes: int = PIECE_BYTES,
) -> tuple[list[Wanted], int]:
    """What to ask one pserver for, request by request, and how many of these to have under way at a time.

    Args:
        keys: table, keys, and bytes of a row.
        spans: group, size of the pserver's span, and bytes of an element.
        message_bytes: replies under way have about so many bytes together, and no reply has more.
        piece_bytes: a reply has at least so many, if there are several.
    """
    items = [(k.size, row_bytes) for _, k, row_bytes in keys] + [(size, item_bytes) for _, size, item_bytes in spans]
    total_bytes = min(sum(count * unit_bytes for count, unit_bytes in items), message_bytes)
    limit = min(max(piece_bytes, -(-total_bytes // PIECES)), message_bytes)
    requests = []
    for pieces in packed(items, limit):
        tables = (p for p in pieces if p.item < len(keys))
        groups = (p for p in pieces if p.item >= len(keys))
        requests.append(
            Wanted(
                tuple(TableKeys(keys[p.item][0], keys[p.item][1][p.start : p.stop]) for p in tables),
                tuple(GroupSpan(spans[p.item - len(keys)][0], p.start, p.stop) for p in groups),
            )
        )
    return requests, min(-(-message_bytes // limit), PIECES)


def cut_push(
    tables: Sequence[TableGrads], groups: Sequence[GroupGrads], limit: int
) -> list[tuple[tuple[TableGrads, ...], tuple[GroupGrads, ...]]]:
    """What to send one pserver, message by message."""
    items = [(t.keys.size, 8 + t.grads.shape[1] * t.grads.itemsize) for t in tables]
    items += [(g.values.size, g.values.itemsize) for g in groups]
    messages = []
    for pieces in packed(items, limit):
        rows, spans = [], []
        for item, start, stop in pieces:
            if item < len(tables):
                t = tables[item]
                rows.append(TableGrads(t.table, t.lr, t.keys[start:stop], t.grads[start:stop]))
            else:
                g = groups[item - len(tables)]
                spans.append(GroupGrads(g.group, g.lr, g.values[start:stop], g.present, start))
        messages.append((tuple(rows), tuple(spans)))
    return messages
