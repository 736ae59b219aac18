"""A pserver that goes on with a checkpoint: on any number of pservers, from any place, and what can go wrong."""

import numpy as np
import pytest
from pservers import (
    MASTER,
    A,
    ask,
    batch,
    begun,
    commit,
    content,
    hand_out,
    mark,
    of_version,
    push,
    readable,
    restore,
    running,
    write,
)

from evergrad.checkpoint.pieces import DensePiece, RowsPiece
from evergrad.errors import CheckpointError, ConfigError
from evergrad.kernels.hashing import slots_of
from evergrad.messages import (
    INIT_STEP,
    Committed,
    Generation,
    Hello,
    Here,
    Member,
    Obstacle,
    Place,
    Progress,
    Pull,
    Pulled,
    Pushed,
    Request,
    Restored,
    Source,
    Term,
    UpdateName,
    Where,
)
from evergrad.placement import slots_owned, span_owned
from evergrad.pserver.pserver import Pserver

SOURCE = Source("file:///somewhere", 4)


def cut_of(places, steps=6, update=UpdateName.SYNC):
    """All pieces of a model cut at a version (or, in `async`, after so many batches), and the updates of its tables."""
    pieces, updates = [], {}
    for place in range(places):
        if update is UpdateName.SYNC:
            pserver = begun(steps=steps, place=place, places=places)
            pserver.handle(MASTER, mark(4, version=steps))
        else:
            pserver = running((0, steps), (1, 2), place=place, places=places)
            pserver.handle(MASTER, mark(4, standing=((0, steps), (1, 2))))
        found, (send,) = write(pserver)
        pieces += found
        updates = send.message.updates
    return pieces, updates


def overlapping(pieces, place, places):
    """What of pieces falls to one of so many places."""
    owned = slots_owned(place, places)
    for piece in pieces:
        if isinstance(piece, RowsPiece):
            slots = range(max(piece.slots.start, owned.start), min(piece.slots.stop, owned.stop))
            if slots:
                rows, candidates = np.isin(slots_of(piece.keys), slots), np.isin(slots_of(piece.candidates), slots)
                notes = None if piece.notes is None else piece.notes[rows]
                kept = (piece.candidates[candidates], piece.candidate_notes[candidates])
                yield RowsPiece(piece.table, slots, piece.keys[rows], piece.rows[rows], notes, *kept)
        else:
            here = span_owned((9, 5)[piece.group], place, places)
            span = range(max(piece.span.start, here.start), min(piece.span.stop, here.stop))
            at = slice(span.start - piece.span.start, span.stop - piece.span.start)
            if span:
                yield DensePiece(piece.group, span, piece.values[at], piece.state[:, at], piece.updates)


def restoring(place=0, places=1, generation=2, source=SOURCE, update=UpdateName.SYNC, pserver=None):
    pserver = pserver or Pserver(Member("p"))
    assert ask(pserver, restore(generation, 1, place, places, source, update)) is None
    return pserver


def load(pserver, pieces, updates, progress, order=None):
    pieces = list(pieces)
    pserver.begin_load(progress, updates)
    for number in order.permutation(len(pieces)) if order is not None else range(len(pieces)):
        pserver.load(pieces[number])
    (send,) = pserver.loaded(1234, 0.5)
    assert send.to == MASTER
    return send.message


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("m", [1, 2, 3, 5])
def test_a_model_saved_on_n_pservers_goes_on_with_the_same_bits_on_m(n, m):
    pieces, updates = cut_of(n)
    found = []
    for place in range(m):
        pserver = restoring(place, m)
        answer = load(pserver, overlapping(pieces, place, m), updates, Progress(6), np.random.default_rng(place))
        assert (answer.version, answer.failure) == (6, None)
        for number in range(6, 10):
            assert isinstance(ask(pserver, push(number, None, 2, place, m), A), Pushed)
            assert isinstance(ask(pserver, commit(number, generation=2)), Committed)
        pserver.handle(MASTER, mark(9, version=10, generation=2))
        found += hand_out(pserver)
    assert content(found) == of_version(10)


def test_an_asynchronous_epoch_goes_on_where_it_stood():
    pieces, updates = cut_of(2, update=UpdateName.ASYNC)
    pserver = restoring(update=UpdateName.ASYNC)
    progress = Progress(epoch=0, standing=((0, 6), (1, 2)))
    assert load(pserver, overlapping(pieces, 0, 1), updates, progress).version == 0
    assert ask(pserver, batch(0, 5, generation=2), A) == Pushed(Request(1))
    assert ask(pserver, Where(Request(1), Generation(2), 0, 1), A) == Here(Request(1), 2)
    assert isinstance(ask(pserver, batch(1, 2, generation=2), A), Pushed)
    assert readable(pserver) == readable(running((0, 6), (1, 3)))


def test_an_epoch_that_was_over_is_not_begun_again():
    pieces, updates = cut_of(1, update=UpdateName.ASYNC)
    pserver = restoring(update=UpdateName.ASYNC)
    load(pserver, pieces, updates, Progress(epoch=0, is_closed=True))
    assert ask(pserver, Where(Request(1), Generation(2), 0, 7), A).batches > 10**9
    assert ask(pserver, Where(Request(1), Generation(2), 1, 7), A) == Here(Request(1), 0)


def test_a_warm_start_takes_the_model_and_begins_with_version_zero_of_the_first_epoch():
    pieces, updates = cut_of(1)
    pserver = restoring(source=Source("file:///somewhere", 4, warm=True))
    answer = load(pserver, pieces, updates, Progress(6, epoch=3))
    assert answer.version == 0
    assert readable(pserver) == readable(begun(steps=6))
    pserver.handle(MASTER, mark(9, generation=2))
    assert content(hand_out(pserver)) == of_version(6)
    reply = ask(pserver, Hello(Term(1)))
    assert (reply.version, reply.epoch, reply.standing) == (0, 0, ())


def test_restored_says_what_was_loaded_and_again_when_asked():
    pieces, updates = cut_of(1)
    pserver = restoring()
    answer = load(pserver, pieces, updates, Progress(6))
    rows = tuple(sum(p.keys.size for p in pieces if isinstance(p, RowsPiece) and p.table == t) for t in range(2))
    assert min(rows) > 0
    assert answer == Restored(Term(1), Generation(2), Place(0), Member("p"), 6, rows, 1234, 0.5)
    assert ask(pserver, restore(2, source=SOURCE)) == answer


def test_while_it_loads_a_pserver_says_nothing_of_its_model_and_has_dropped_the_old_one():
    pserver = begun(steps=3)
    pserver.handle(MASTER, mark(4, version=3))
    restoring(pserver=pserver)
    assert pserver.loading == restore(2, source=SOURCE)
    assert pserver._held is None
    assert pserver.serial is None
    assert ask(pserver, restore(2, source=SOURCE)) is None
    for message in (mark(9, generation=2), commit(3, generation=2), push(3, generation=2)):
        assert ask(pserver, message) is None
    assert ask(pserver, Hello(Term(1))).version == INIT_STEP


def test_a_later_generation_is_loaded_instead():
    pieces, updates = cut_of(1)
    pserver = restoring()
    pserver.begin_load(Progress(6), updates)
    pserver.load(pieces[0])
    restoring(generation=3, source=Source("file:///elsewhere", 3), pserver=pserver)
    assert pserver.loading.source.url == "file:///elsewhere"
    assert load(pserver, pieces, updates, Progress(6)).generation == 3
    assert isinstance(ask(pserver, Pull(Request(1), Generation(3), 6, True, (), ()), A), Pulled)


def test_a_failure_to_load_is_told_and_told_again():
    pserver = restoring()
    (send,) = pserver.load_failed("the file is gone", Obstacle.AWAY)
    assert send.message == Restored(
        Term(1), Generation(2), Place(0), Member("p"), INIT_STEP, failure="the file is gone", obstacle=Obstacle.AWAY
    )
    assert pserver.loading is None
    assert ask(pserver, restore(2, source=SOURCE)) == send.message
    pieces, updates = cut_of(1)
    restoring(generation=3, pserver=pserver)
    assert load(pserver, pieces, updates, Progress(6)).failure is None


@pytest.mark.parametrize(("kind", "what"), [(RowsPiece, "slots of table 'user'"), (DensePiece, "dense group 0")])
def test_a_checkpoint_that_lacks_something_is_refused(kind, what):
    pieces, updates = cut_of(1)
    without = next(i for i, piece in enumerate(pieces) if isinstance(piece, kind))
    pserver = restoring()
    answer = load(pserver, pieces[:without] + pieces[without + 1 :], updates, Progress(6))
    assert what in answer.failure
    assert answer.version == INIT_STEP
    assert ask(pserver, Pull(Request(1), Generation(2), 6, True, (), ()), A) is None


@pytest.mark.parametrize(
    "wrong", [{"values": np.zeros(9, np.float64)}, {"state": np.zeros((1, 9), np.float32)}, {"span": range(1, 10)}]
)
def test_dense_elements_that_do_not_fit_are_an_error(wrong):
    pieces, updates = cut_of(1)
    piece = next(p for p in pieces if isinstance(p, DensePiece))
    pserver = restoring()
    pserver.begin_load(Progress(6), updates)
    with pytest.raises(CheckpointError, match="dense group"):
        pserver.load(piece._replace(**wrong))


def test_a_checkpoint_that_does_not_fit_into_memory_is_an_error_that_says_what_to_do():
    pieces, updates = cut_of(1)
    pserver = Pserver(Member("p"), room=lambda: 10.0)
    restoring(pserver=pserver)
    pserver.begin_load(Progress(6), updates)
    rows = next(piece for piece in pieces if isinstance(piece, RowsPiece))
    with pytest.raises(ConfigError, match="--pservers"):
        pserver.load(rows)
