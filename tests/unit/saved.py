"""Models as checkpoints hold them, made at random, cut for any number of pservers, and put together again."""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from evergrad import init_rows
from evergrad.checkpoint.files import write_piece
from evergrad.checkpoint.manifest import Manifest, write_manifest
from evergrad.checkpoint.pieces import DensePiece, Piece, RowsPiece
from evergrad.checkpoint.storage import Retry, Storage
from evergrad.kernels.hashing import slots_of
from evergrad.messages import (
    DataSpec,
    FileInfo,
    GroupKind,
    GroupSpec,
    ParameterSpec,
    Progress,
    Schema,
    TableSpec,
    UpdateName,
    UpdateSpec,
)
from evergrad.optim import FTRL, SGD, Adagrad, Adam, AdamW, RowWiseAdagrad
from evergrad.placement import slots_owned, span_owned

RULES = {
    "sgd": SGD(),
    "momentum": SGD(momentum=0.9),
    "dampened": SGD(momentum=0.9, dampening=0.5),
    "adagrad": Adagrad(),
    "rowwise": RowWiseAdagrad(),
    "adam": Adam(),
    "adamw": AdamW(),
    "ftrl": FTRL(),
}
NEVER = Retry(tries=1)


def table(name="user", dim=3, rule=None, **options) -> TableSpec:
    return TableSpec(name, dim, (rule or Adagrad()).spec(), init_rows.zeros(), **options)


def group(kind=GroupKind.TRAINED, rule=None, **shapes) -> GroupSpec:
    dtype = "int64" if kind is GroupKind.LOWEST else "float32"
    parameters = tuple(ParameterSpec(name.replace("_", "."), shape, dtype) for name, shape in shapes.items())
    return GroupSpec(kind, (rule or Adam()).spec() if kind is GroupKind.TRAINED else None, parameters)


GROUPS = (
    group(head_weight=(4, 5), head_bias=(4,), scale=(), empty=(0, 3)),
    group(GroupKind.FROZEN, fixed=(7,)),
    group(GroupKind.AVERAGED, norm_mean=(5,)),
    group(GroupKind.LOWEST, norm_count=()),
)


def schema(tables=(), groups=GROUPS) -> Schema:
    tables = tables or (table("user", 3, Adam(), min_count=2, ttl=9), table("item", 2, RowWiseAdagrad()))
    return Schema(5, UpdateSpec(UpdateName.SYNC, 4), tuple(tables), tuple(groups))


class Whole(NamedTuple):
    """A whole model: pieces of all slots and spans."""

    tables: list[RowsPiece]
    groups: list[DensePiece]


def by_slot(keys):
    return keys[np.lexsort((keys, slots_of(keys)))]


def some_floats(random, *shape):
    """Floats of all kinds, nan, infinity and -0.0 too: a checkpoint keeps bits."""
    return random.integers(0, 2**32, shape, np.uint32).view(np.float32)


def whole(of: Schema, rows=1000, candidates=40, seed=0) -> Whole:
    """A model with random bits in every place."""
    random = np.random.default_rng(seed)
    tables = []
    for number, spec in enumerate(of.tables):
        keys = np.unique(random.integers(-(2**63), 2**63 - 1, rows + candidates, np.int64))
        random.shuffle(keys)
        mine, waiting = by_slot(keys[:rows]), by_slot(keys[rows:])
        has_notes = spec.ttl is not None or spec.max_rows is not None
        tables.append(
            RowsPiece(
                number, range(16_384), mine,
                some_floats(random, mine.size, spec.rule.row_width(spec.dim)),
                random.integers(0, 99, (mine.size, 2), np.int32) if has_notes else None,
                waiting, random.integers(0, 99, (waiting.size, 2), np.int32),
            )
        )  # fmt: skip
    groups = []
    for number, spec in enumerate(of.groups):
        width = spec.rule.state_width if spec.rule else 0
        values = some_floats(random, spec.size)
        if spec.kind is GroupKind.LOWEST:
            values = random.integers(-(2**63), 2**63 - 1, spec.size, np.int64)
        updates = tuple(int(n) if p.size and spec.rule else 0 for n, p in enumerate(spec.parameters, 7))
        groups.append(DensePiece(number, range(spec.size), values, some_floats(random, width, spec.size), updates))
    return Whole(tables, groups)


def cut(of: Schema, model: Whole, place=0, places=1, files=2) -> Iterator[Piece]:
    """What a pserver hands out: each table in so many pieces, each group in two."""
    slots = slots_owned(place, places)
    bounds = np.linspace(slots.start, slots.stop, files + 1).astype(int)
    for piece in model.tables:
        of_rows, of_candidates = slots_of(piece.keys), slots_of(piece.candidates)
        for a, b in pairwise(bounds.tolist()):
            mine, waiting = (of_rows >= a) & (of_rows < b), (of_candidates >= a) & (of_candidates < b)
            notes = None if piece.notes is None else piece.notes[mine]
            yield RowsPiece(
                piece.table, range(a, b), piece.keys[mine], piece.rows[mine], notes,
                piece.candidates[waiting], piece.candidate_notes[waiting],
            )  # fmt: skip
    for piece in model.groups:
        span = span_owned(of.groups[piece.group].size, place, places)
        middle = (span.start + span.stop) // 2
        for part in (range(span.start, middle), range(middle, span.stop)):
            here = slice(part.start, part.stop)
            yield DensePiece(piece.group, part, piece.values[here], piece.state[:, here], piece.updates)


def manifest_of(of: Schema, files: Iterable[FileInfo], serial=1, places=1, **more) -> Manifest:
    progress = Progress(version=120, epoch=3, data=DataSpec(10, "ten", 2), is_closed=True)
    fields = {
        "job": "films",
        "lineage": "first",
        "created": "2025-01-01T00:00:00+00:00",
        "generation": 2,
        "progress": progress,
        **more,
    }
    updates = {spec.name: 100 + n for n, spec in enumerate(of.tables)}
    return Manifest(serial=serial, places=places, schema=of, updates=updates, files=tuple(files), **fields)


def save(storage: Storage, of: Schema, model: Whole, serial=1, places=1, files=2, **more) -> Manifest:
    """What pservers and master do together."""
    infos = [
        info
        for place in range(places)
        for piece in cut(of, model, place, places, files)
        for info in write_piece(storage, serial, of, place, piece)
    ]
    manifest = manifest_of(of, infos, serial, places, **more)
    write_manifest(storage, manifest)
    return manifest


def together(of: Schema, pieces: Iterable[Piece]) -> Whole:
    """One model of the pieces of all places, in any order."""
    rows, spans = {n: [] for n in range(len(of.tables))}, {n: [] for n in range(len(of.groups))}
    for piece in pieces:
        (rows[piece.table] if isinstance(piece, RowsPiece) else spans[piece.group]).append(piece)
    return Whole([_rows(n, found) for n, found in rows.items()], [_span(n, found) for n, found in spans.items()])


def _rows(number, pieces):
    pieces = sorted(pieces, key=lambda p: p.slots.start)
    assert [p.slots.start for p in pieces] == [0, *(p.slots.stop for p in pieces[:-1])]
    notes = None if pieces[0].notes is None else np.concatenate([p.notes for p in pieces])
    whole = [np.concatenate([getattr(p, what) for p in pieces]) for what in ("keys", "rows", *RowsPiece._fields[5:])]
    return RowsPiece(number, range(pieces[-1].slots.stop), *whole[:2], notes, *whole[2:])


def _span(number, pieces):
    pieces = sorted((p for p in pieces if p.span), key=lambda p: p.span.start)
    assert [p.span.start for p in pieces] == [0, *(p.span.stop for p in pieces[:-1])]
    updates = tuple(map(max, *(p.updates for p in pieces))) if len(pieces) > 1 else pieces[0].updates
    values, state = np.concatenate([p.values for p in pieces]), np.concatenate([p.state for p in pieces], axis=1)
    return DensePiece(number, range(pieces[-1].span.stop), values, state, updates)


def bits(model: Whole) -> list[object]:
    """What two models that are the same to the bit have in common."""
    return [
        [(f.dtype.str, f.shape, f.tobytes()) if isinstance(f, np.ndarray) else f for f in piece]
        for piece in (*model.tables, *model.groups)
    ]


def replaced(manifest: Manifest, **fields) -> Manifest:
    return msgspec.structs.replace(manifest, **fields)
