"""Pservers of a small model, what they are told, and what their cuts hold."""

import msgspec
import numpy as np

from evergrad import init_rows
from evergrad.checkpoint.pieces import DensePiece, RowsPiece
from evergrad.kernels.hashing import slots_of
from evergrad.messages import (
    INIT_STEP,
    NEWEST,
    Abandon,
    Attempt,
    Commit,
    Committed,
    Export,
    ExportPart,
    FileInfo,
    FileKind,
    Freeze,
    Generation,
    GroupGrads,
    GroupKind,
    GroupSpan,
    GroupSpec,
    Mark,
    Member,
    ParameterSpec,
    Place,
    Pull,
    Push,
    PushBatch,
    Pushed,
    Request,
    Restore,
    Schema,
    TableGrads,
    TableSpec,
    Term,
    UpdateName,
    UpdateSpec,
    WrittenNoted,
)
from evergrad.optim import Adagrad, Adam
from evergrad.placement import slots_owned, span_owned
from evergrad.pserver.pserver import Pserver

replace = msgspec.structs.replace
MASTER, NEXT_MASTER, A, B = "master.1", "master.2", "a", "b"
KEYS = np.array([0, 5, -1, 2**63 - 1, -7, 40], np.int64)
SLICE = 1 << 20


def schema(update=UpdateName.SYNC):
    dense = (ParameterSpec("w", (6,), "float32"), ParameterSpec("b", (3,), "float32"))
    return Schema(
        0,
        UpdateSpec(update, 2),
        (
            TableSpec("user", 2, Adagrad().spec(), init_rows.normal()),
            TableSpec("item", 3, Adam().spec(), init_rows.normal(), min_count=2, ttl=40),
        ),
        (
            GroupSpec(GroupKind.TRAINED, Adam().spec(), dense),
            GroupSpec(GroupKind.LOWEST, None, (ParameterSpec("n", (5,), "int64"),)),
        ),
    )


def restore(generation=1, term=1, place=0, places=1, source=None, update=UpdateName.SYNC):
    model = schema(update)
    return Restore(Term(term), Generation(generation), Member("p"), Place(place), places, model, source)


def commit(step, serial=None, term=1, generation=1):
    return Commit(Term(term), Generation(generation), step, ((0, Attempt(1, 1)),), serial)


def mark(serial, version=0, epoch=0, standing=(), term=1, generation=1):
    return Mark(Term(term), Generation(generation), serial, version, epoch, standing)


def freeze(serial, term=1, generation=1):
    return Freeze(Term(term), Generation(generation), serial)


def abandon(serial, term=1, generation=1):
    return Abandon(Term(term), Generation(generation), serial)


def noted(serial, term=1):
    return WrittenNoted(Term(term), serial)


def contribution(seed, place=0, places=1):
    """What a batch brings to one place: keys and values that follow from `seed`."""
    rng = np.random.default_rng(seed)
    keys = rng.permutation(KEYS)[: rng.integers(2, 6)]
    owned = slots_owned(place, places)
    grads = [rng.standard_normal((keys.size, dim)).astype(np.float32) for dim in (2, 3)]
    here = np.isin(slots_of(keys), owned)
    tables = tuple(TableGrads(t, 0.1, keys[here], g[here]) for t, g in enumerate(grads))
    values = [rng.standard_normal(9).astype(np.float32), np.arange(seed, seed + 5)]
    groups = []
    for number, whole in enumerate(values):
        span = span_owned(whole.size, place, places)
        flags = np.ones(2 - number, np.uint8)
        groups.append(GroupGrads(number, 0.1, whole[span.start : span.stop], flags))
    return tables, tuple(groups)


def push(step, seed=None, generation=1, place=0, places=1):
    tables, groups = contribution(step + 1 if seed is None else seed, place, places)
    if step == INIT_STEP:
        tables = ()
    return Push(Request(1), Generation(generation), step, 0, Attempt(1, 1), 1, tables, groups)


def batch(task, number, request=1, epoch=0, generation=1, place=0, places=1):
    tables, groups = contribution(1000 * epoch + 100 * task + number, place, places)
    return PushBatch(Request(request), Generation(generation), epoch, task, number, tables, groups)


def tell(pserver, message, src=MASTER):
    """The messages that follow, by whom they go to."""
    return [(send.to, send.message) for send in pserver.handle(src, message)]


def ask(pserver, message, src=MASTER):
    """The one answer, or None."""
    sends = tell(pserver, message, src)
    assert len(sends) <= 1, sends
    assert all(to == src for to, _ in sends)
    return sends[0][1] if sends else None


def step(pserver, number, serial=None, place=0, places=1):
    assert isinstance(ask(pserver, push(number, place=place, places=places), A), Pushed)
    assert isinstance(ask(pserver, commit(number, serial)), Committed)


def begun(update=UpdateName.SYNC, steps=0, place=0, places=1, room=None):
    """A pserver at version `steps`."""
    pserver = Pserver(Member("p")) if room is None else Pserver(Member("p"), room)
    pserver.handle(MASTER, restore(place=place, places=places, update=update))
    for number in range(INIT_STEP, steps):
        step(pserver, number, place=place, places=places)
    return pserver


def hand_out(pserver):
    """All pieces that are still to come."""
    pieces = []
    while pserver.serial is not None:
        piece = pserver.next_piece(SLICE)
        pieces += [piece] if piece is not None else []
    return pieces


def file_of(number):
    return FileInfo(f"file {number}", 1, "00", FileKind.ROWS, Place(0))


def write(pserver):
    """Write all of the cut; returns its pieces and what is sent at the end."""
    serial, pieces, sends = pserver.serial, hand_out(pserver), []
    for number in range(len(pieces)):
        assert not sends
        sends = pserver.piece_written(serial, (file_of(number),))
    return pieces, sends


def content(pieces):
    """What pieces hold, in a form that can be compared."""
    found = {}
    for piece in pieces:
        if isinstance(piece, RowsPiece):
            notes = [None] * piece.keys.size if piece.notes is None else piece.notes.tolist()
            for key, row, note in zip(piece.keys.tolist(), piece.rows, notes, strict=True):
                found["row", piece.table, key] = (row.tobytes(), note)
            for key, note in zip(piece.candidates.tolist(), piece.candidate_notes.tolist(), strict=True):
                found["candidate", piece.table, key] = note
        else:
            assert isinstance(piece, DensePiece)
            for at, value, state in zip(piece.span, piece.values.tolist(), piece.state.T, strict=True):
                found["element", piece.group, at] = (value, state.tobytes())
            for parameter, updates in enumerate(piece.updates):
                found["updates", piece.group, parameter] = max(
                    updates, found.get(("updates", piece.group, parameter), 0)
                )
    return found


def of_version(steps):
    """What a cut at this version shows, taken of a pserver that does nothing else."""
    pserver = begun(steps=steps)
    pserver.handle(MASTER, mark(1, version=steps))
    return content(hand_out(pserver))


def readable(pserver):
    """All that can be pulled and exported."""
    parts = [
        ask(pserver, Export(Request(1), pserver.generation, NEWEST, table, part, 0, 1 << 30), A).part.tolist()
        for table in range(2)
        for part in ExportPart
    ]
    spans = (GroupSpan(0, 0, 9), GroupSpan(1, 0, 5))
    pulled = ask(pserver, Pull(Request(1), pserver.generation, NEWEST, True, (), spans), A)
    return parts, [values.tolist() for values in pulled.groups]


def frozen(pserver, serial):
    return ask(pserver, freeze(serial))


def running(*applied, place=0, places=1):
    """An asynchronous pserver that has applied these (task, number of batches)."""
    pserver = begun(UpdateName.ASYNC, place=place, places=places)
    for task, batches in applied:
        for number in range(batches):
            assert isinstance(ask(pserver, batch(task, number, place=place, places=places), A), Pushed)
    return pserver


def of_standing(*applied):
    pserver = running(*applied)
    pserver.handle(MASTER, mark(1, standing=applied))
    return content(hand_out(pserver))
