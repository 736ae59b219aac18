"""A pserver's part of checkpoints: what each message does, said once, twice, late and out of turn."""

import msgspec
import numpy as np
import pytest

from evergrad import init_rows
from evergrad.checkpoint.pieces import DensePiece, RowsPiece
from evergrad.errors import CheckpointError
from evergrad.kernels.hashing import slots_of
from evergrad.messages import (
    INIT_STEP,
    NEWEST,
    Abandon,
    Abandoned,
    Attempt,
    Commit,
    Committed,
    Deposed,
    Export,
    ExportPart,
    FileInfo,
    FileKind,
    Freeze,
    Frozen,
    Full,
    Generation,
    GroupGrads,
    GroupKind,
    GroupSpan,
    GroupSpec,
    Hello,
    HelloReply,
    Here,
    Mark,
    Marked,
    Member,
    ParameterSpec,
    Place,
    Progress,
    Pull,
    Pulled,
    Push,
    PushBatch,
    Pushed,
    Refused,
    Request,
    Restore,
    Restored,
    Schema,
    Source,
    TableGrads,
    TableSpec,
    Term,
    UpdateName,
    UpdateSpec,
    Where,
    Written,
    WrittenNoted,
)
from evergrad.optim import Adagrad, Adam
from evergrad.placement import slots_owned, span_owned
from evergrad.pserver.batches import MOST_WAITING
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


# -- a cut that rides in a commit --------------------------------------------------------------------------------------


def test_a_commit_with_a_serial_cuts_right_after_it_is_applied():
    pserver = begun(steps=2)
    step(pserver, 2, serial=7)
    assert pserver.serial == 7
    for number in range(3, 6):
        step(pserver, number)
    pieces, _ = write(pserver)
    assert content(pieces) == of_version(3)
    assert readable(pserver) == readable(begun(steps=6))


def test_version_zero_is_cut_with_the_commit_of_the_initial_values():
    pserver = begun(steps=-1)
    step(pserver, INIT_STEP, serial=0)
    step(pserver, 0)
    assert content(hand_out(pserver)) == of_version(0)


def test_a_repeated_commit_does_not_cut_again():
    pserver = begun(steps=1)
    step(pserver, 1, serial=3)
    pieces, _ = write(pserver)
    assert isinstance(ask(pserver, commit(1, 3)), Committed)
    assert pserver.serial is None
    assert content(pieces) == of_version(2)


def test_a_commit_whose_serial_was_abandoned_is_applied_without_a_cut():
    pserver = begun(steps=1)
    assert isinstance(ask(pserver, abandon(3)), Abandoned)
    step(pserver, 1, serial=3)
    assert pserver.serial is None
    assert readable(pserver) == readable(begun(steps=2))


def test_a_commit_that_lacks_a_push_does_not_cut():
    pserver = begun(steps=1)
    pserver.handle(MASTER, commit(1, 3))
    assert pserver.serial is None


# -- a mark ------------------------------------------------------------------------------------------------------------


def test_a_mark_cuts_at_its_version_and_is_answered_again_without_cutting_again():
    pserver = begun(steps=2)
    marked = Marked(Term(1), Generation(1), Place(0), 4)
    assert ask(pserver, mark(4, version=2)) == marked
    step(pserver, 2)
    assert ask(pserver, mark(4, version=2)) == marked
    assert content(hand_out(pserver)) == of_version(2)


def test_a_mark_of_a_version_to_come_is_left_to_be_said_again_and_of_a_past_one_abandoned():
    pserver = begun(steps=2)
    assert ask(pserver, mark(4, version=3)) is None
    step(pserver, 2)
    assert isinstance(ask(pserver, mark(4, version=3)), Marked)
    assert ask(pserver, mark(5, version=2)) == Abandoned(Term(1), Generation(1), Place(0), 5)
    assert pserver.serial is None
    assert isinstance(ask(pserver, mark(5, version=3)), Abandoned)


def test_pieces_come_dense_groups_first_and_cover_the_place():
    for place in range(3):
        pserver = begun(steps=3, place=place, places=3)
        pserver.handle(MASTER, mark(1, version=3))
        pieces = hand_out(pserver)
        kinds = [isinstance(piece, DensePiece) for piece in pieces]
        assert kinds == sorted(kinds, reverse=True)
        for table in range(2):
            slots = [s for p in pieces if isinstance(p, RowsPiece) and p.table == table for s in p.slots]
            assert slots == list(slots_owned(place, 3))
        for group, size in enumerate((9, 5)):
            elements = [e for p in pieces if isinstance(p, DensePiece) and p.group == group for e in p.span]
            assert elements == list(span_owned(size, place, 3))


# -- what is written ---------------------------------------------------------------------------------------------------


def test_the_master_is_told_when_all_is_written_and_again_until_it_has_noted_that():
    pserver = begun(steps=2)
    pserver.handle(MASTER, mark(4, version=2))
    assert pserver.resend() == []
    pieces, sends = write(pserver)
    files = tuple(file_of(number) for number in range(len(pieces)))
    written = Written(Generation(1), Place(0), 4, files, {"user": 2, "item": 2})
    assert [(send.to, send.message) for send in sends] == [(MASTER, written)]
    assert [send.message for send in pserver.resend()] == [written]
    assert [message for _, message in tell(pserver, mark(4, version=2))][1:] == [written]
    pserver.handle(MASTER, noted(3))
    assert len(pserver.resend()) == 1
    pserver.handle(MASTER, noted(4))
    pserver.handle(MASTER, noted(4))
    assert pserver.resend() == []
    assert isinstance(ask(pserver, mark(4, version=2)), Marked)


def test_a_failure_is_told_the_same_way_and_gives_the_cut_up():
    pserver = begun(steps=1)
    pserver.handle(MASTER, mark(4, version=1))
    while pserver.next_piece(SLICE) is None:
        pass
    (send,) = pserver.write_failed(4, "the storage is full")
    assert send.message == Written(Generation(1), Place(0), 4, (), {"user": 1, "item": 1}, "the storage is full")
    assert pserver.serial is None
    assert pserver.piece_written(4, (file_of(0),)) == [send]
    assert pserver.write_failed(4, "later") == [send]
    pserver.handle(MASTER, noted(4))
    assert pserver.resend() == []
    step(pserver, 1, serial=5)
    assert content(write(pserver)[0]) == of_version(2)


def test_what_was_written_goes_to_the_master_that_leads_now():
    pserver = begun()
    pserver.handle(MASTER, mark(4))
    write(pserver)
    pserver.handle(NEXT_MASTER, Hello(Term(2)))
    assert [send.to for send in pserver.resend()] == [NEXT_MASTER]


def test_a_piece_written_late_counts_for_no_other_serial():
    pserver = begun()
    pserver.handle(MASTER, mark(4))
    hand_out(pserver)
    pserver.handle(MASTER, mark(5))
    pieces = hand_out(pserver)
    assert pserver.piece_written(4, (file_of(0),)) == []
    assert pserver.write_failed(4, "late") == []
    for _ in pieces[1:]:
        assert pserver.piece_written(5, (file_of(0),)) == []
    assert len(pserver.piece_written(5, (file_of(0),))) == 1


# -- giving up ---------------------------------------------------------------------------------------------------------


def test_an_abandoned_serial_is_given_up_for_ever():
    pserver = begun(steps=1)
    pserver.handle(MASTER, mark(4, version=1))
    assert pserver.next_piece(1) is not None
    gone = Abandoned(Term(1), Generation(1), Place(0), 4)
    assert ask(pserver, abandon(4)) == gone
    assert pserver.serial is None
    assert pserver.piece_written(4, (file_of(0),)) == []
    for late in (abandon(4), mark(4, version=1), freeze(4), mark(3, version=1), freeze(2)):
        assert ask(pserver, late).serial == late.serial
        assert isinstance(ask(pserver, late), Abandoned)
    assert pserver.serial is None
    step(pserver, 1)
    assert readable(pserver) == readable(begun(steps=2))


def test_abandoning_forgets_what_was_written_too():
    pserver = begun()
    pserver.handle(MASTER, mark(4))
    write(pserver)
    pserver.handle(MASTER, abandon(4))
    assert pserver.resend() == []


def test_a_higher_serial_takes_the_place_of_a_lower_one():
    pserver = begun(steps=1)
    pserver.handle(MASTER, mark(4, version=1))
    pserver.next_piece(1)
    step(pserver, 1, serial=6)
    assert content(write(pserver)[0]) == of_version(2)
    assert isinstance(ask(pserver, mark(5, version=2)), Abandoned)
    assert isinstance(tell(pserver, mark(6, version=1))[0][1], Marked)


def test_memory_of_cuts_that_are_over_is_given_back():
    pserver = begun(steps=1)
    pserver.handle(MASTER, mark(4, version=1))
    step(pserver, 1)
    pserver.handle(MASTER, abandon(4))
    turns = 0
    while pserver.release():
        turns += 1
    assert turns >= 1
    assert not pserver._cutting._over


def test_a_push_that_needs_the_memory_of_a_cut_has_it_given_up():
    rooms = iter([10**6, 10**6, 0, 10**6])
    pserver = begun(room=lambda: next(rooms, 10**6))
    pserver.handle(MASTER, mark(4))
    assert isinstance(ask(pserver, push(0), A), Pushed)
    assert isinstance(ask(pserver, replace(push(0), task=1), A), Pushed)
    assert pserver.serial is None
    (send,) = pserver.resend()
    assert "memory limit" in send.message.failure
    assert pserver.counters["checkpoints given up for lack of memory"] == 1


def test_a_push_that_does_not_fit_even_then_is_refused():
    rooms = iter([10**6, 0, 0])
    pserver = begun(room=lambda: next(rooms, 0))
    pserver.handle(MASTER, mark(4))
    assert isinstance(ask(pserver, push(0), A), Full)


# -- freezing an asynchronous epoch ------------------------------------------------------------------------------------


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


def test_a_frozen_pserver_says_how_far_it_is_and_applies_no_batch():
    pserver = running((0, 2), (3, 1))
    answer = Frozen(Term(1), Generation(1), Place(0), 4, 0, ((0, 2), (3, 1)))
    assert frozen(pserver, 4) == answer
    before = readable(pserver)
    assert ask(pserver, batch(0, 2), A) is None
    assert ask(pserver, batch(1, 0), B) is None
    assert frozen(pserver, 4) == answer
    assert readable(pserver) == before
    assert ask(pserver, Where(Request(1), Generation(1), 0, 0), A) == Here(Request(1), 2)
    assert ask(pserver, batch(0, 1), A) == Pushed(Request(1))


def test_a_mark_applies_what_waits_up_to_its_standing_then_cuts_and_goes_on():
    pserver = running((0, 2), (3, 1))
    frozen(pserver, 4)
    assert ask(pserver, batch(0, 2, request=8), A) is None
    assert ask(pserver, batch(3, 1, request=9), B) is None
    sends = tell(pserver, mark(4, standing=((0, 3), (3, 1))))
    assert sends[0] == (A, Pushed(Request(8)))
    assert sends[1] == (MASTER, Marked(Term(1), Generation(1), Place(0), 4))
    assert sends[2:] == [(B, Pushed(Request(9)))]
    assert isinstance(ask(pserver, batch(0, 3), A), Pushed)
    without = running((0, 2), (3, 1))
    ask(without, batch(0, 2), A)
    without.handle(MASTER, mark(1, standing=((0, 3), (3, 1))))
    assert content(write(pserver)[0]) == content(hand_out(without))


def test_a_mark_waits_for_batches_that_are_not_here_yet_and_holds_those_beyond_it_back():
    pserver = running((0, 1), (1, 1))
    frozen(pserver, 4)
    wanted = mark(4, standing=((0, 1), (1, 3)))
    assert ask(pserver, wanted) is None
    assert ask(pserver, batch(0, 1, request=7), A) is None
    assert ask(pserver, batch(1, 1), B) == Pushed(Request(1))
    assert ask(pserver, wanted) is None
    sends = tell(pserver, batch(1, 2), B)
    assert (sends[0], sends[2]) == ((B, Pushed(Request(1))), (A, Pushed(Request(7))))
    assert sends[1] == (MASTER, Marked(Term(1), Generation(1), Place(0), 4))
    assert isinstance(ask(pserver, wanted), Marked)
    assert content(hand_out(pserver)) == of_standing((0, 1), (1, 3))


def test_a_mark_alone_is_enough_where_all_stand_there_already():
    pserver = running((0, 2))
    assert isinstance(ask(pserver, mark(4, standing=((0, 2), (5, 0)))), Marked)
    assert isinstance(ask(pserver, batch(0, 2), A), Pushed)


def test_a_mark_behind_where_this_pserver_is_is_abandoned():
    for wrong in (mark(4, standing=((0, 1),)), mark(4, standing=((1, 2),)), mark(4, epoch=-1)):
        pserver = running((0, 2))
        assert isinstance(ask(pserver, wrong), Abandoned)
        assert isinstance(ask(pserver, batch(0, 2), A), Pushed)


def test_a_mark_of_an_epoch_that_has_not_begun_here_begins_it():
    pserver = running((0, 2))
    frozen(pserver, 4)
    assert ask(pserver, batch(0, 0, epoch=1, request=5), A) is None
    sends = tell(pserver, mark(4, epoch=1, standing=((0, 1),)))
    assert [to for to, _ in sends] == [A, MASTER]
    assert ask(pserver, Where(Request(1), Generation(1), 1, 0), A) == Here(Request(1), 1)
    assert ask(pserver, batch(0, 2), B) == Pushed(Request(1))  # of an epoch that has passed


def test_abandoning_thaws_and_what_waited_is_applied():
    pserver = running((0, 1))
    frozen(pserver, 4)
    ask(pserver, batch(0, 1, request=7), A)
    assert tell(pserver, abandon(4)) == [
        (MASTER, Abandoned(Term(1), Generation(1), Place(0), 4)),
        (A, Pushed(Request(7))),
    ]
    assert readable(pserver) == readable(running((0, 2)))


def test_a_freeze_said_again_after_the_cut_freezes_nothing():
    pserver = running((0, 1))
    frozen(pserver, 4)
    pserver.handle(MASTER, mark(4, standing=((0, 1),)))
    assert frozen(pserver, 4) is None
    assert isinstance(ask(pserver, batch(0, 1), A), Pushed)


def test_a_freeze_said_again_after_the_mark_does_not_stop_what_the_mark_waits_for():
    pserver = running((0, 1))
    frozen(pserver, 4)
    pserver.handle(MASTER, mark(4, standing=((0, 2),)))
    assert frozen(pserver, 4) is None
    assert [to for to, _ in tell(pserver, batch(0, 1), A)] == [A, MASTER]


def test_a_later_freeze_goes_on_freezing():
    pserver = running((0, 1))
    frozen(pserver, 4)
    assert frozen(pserver, 6).serial == 6
    assert isinstance(ask(pserver, abandon(4)), Abandoned)
    assert ask(pserver, batch(0, 1), A) is None
    assert isinstance(ask(pserver, mark(4, standing=((0, 1),))), Abandoned)


def test_a_new_master_thaws_what_the_old_one_froze():
    pserver = running((0, 1))
    frozen(pserver, 4)
    ask(pserver, batch(0, 1), A)
    (a, first), (b, second) = tell(pserver, Hello(Term(2)), NEXT_MASTER)
    assert (a, first) == (A, Pushed(Request(1)))
    assert b == NEXT_MASTER
    assert second.standing == ((0, 2),)
    assert ask(pserver, mark(4, standing=((0, 2),))) == Deposed(Term(2))
    assert isinstance(ask(pserver, mark(4, standing=((0, 2),), term=2), NEXT_MASTER), Abandoned)


def test_a_new_master_does_not_stop_a_cut_that_is_taken():
    pserver = running((0, 1))
    pserver.handle(MASTER, mark(4, standing=((0, 1),)))
    pserver.handle(NEXT_MASTER, Hello(Term(2)))
    assert content(write(pserver)[0]) == of_standing((0, 1))


def test_batches_that_wait_are_bounded_and_the_others_are_left_to_be_sent_again():
    pserver = running()
    frozen(pserver, 4)
    for task in range(MOST_WAITING + 5):
        assert ask(pserver, batch(task, 0, request=task), A) is None
        assert ask(pserver, batch(task, 0, request=task), A) is None
    answered = [m.request for to, m in tell(pserver, abandon(4)) if to == A]
    assert answered == list(range(MOST_WAITING))
    assert isinstance(ask(pserver, batch(MOST_WAITING, 0), A), Pushed)


def test_a_batch_in_parts_waits_whole_and_is_applied_once():
    pserver = running()
    frozen(pserver, 4)
    whole = batch(0, 0)
    parts = [
        replace(whole, request=Request(1), groups=(), part=0, parts=2),
        replace(whole, request=Request(2), tables=(), part=1, parts=2),
    ]
    assert ask(pserver, parts[0], A) == Pushed(Request(1))
    assert ask(pserver, parts[1], A) is None
    assert ask(pserver, parts[1], A) is None
    assert tell(pserver, abandon(4))[1:] == [(A, Pushed(Request(2)))]
    assert readable(pserver) == readable(running((0, 1)))
    assert pserver._parts._open == {}


def test_the_same_batch_of_two_trainers_waits_twice_and_is_applied_once():
    pserver = running()
    frozen(pserver, 4)
    ask(pserver, batch(0, 0, request=1), A)
    ask(pserver, batch(0, 0, request=2), B)
    assert tell(pserver, abandon(4))[1:] == [(A, Pushed(Request(1))), (B, Pushed(Request(2)))]
    assert readable(pserver) == readable(running((0, 1)))


def test_a_wrong_batch_is_refused_while_frozen_too():
    pserver = running()
    frozen(pserver, 4)
    wrong = replace(batch(0, 0), tables=(TableGrads(9, 0.1, KEYS[:0], np.zeros((0, 2), np.float32)),))
    assert isinstance(ask(pserver, wrong, A), Refused)
    assert tell(pserver, abandon(4))[1:] == []


@pytest.mark.parametrize("message", [freeze(4), mark(4), abandon(4)])
def test_what_is_of_another_generation_or_before_a_model_is_held_is_ignored(message):
    assert ask(Pserver(Member("p")), message) is None
    pserver = begun()
    for generation in (0, 2):
        assert ask(pserver, replace(message, generation=Generation(generation))) is None
    assert isinstance(ask(pserver, message), Frozen | Marked | Abandoned)


@pytest.mark.parametrize("message", [freeze(4), mark(4), abandon(4), noted(4), Hello(Term(1))])
def test_an_older_master_is_told_that_it_is_deposed(message):
    pserver = begun()
    pserver.handle(NEXT_MASTER, Hello(Term(3)))
    assert ask(pserver, message) == Deposed(Term(3))
    assert pserver.serial is None
    assert isinstance(ask(pserver, push(0), A), Pushed)


def test_a_new_generation_forgets_the_cut_and_what_waited():
    pserver = running((0, 1))
    pserver.handle(MASTER, mark(4, standing=((0, 1),)))
    frozen(pserver, 5)
    ask(pserver, batch(0, 1), A)
    pserver.handle(MASTER, restore(generation=2, update=UpdateName.ASYNC))
    assert pserver.serial is None
    assert pserver.resend() == []
    assert not pserver.release()
    assert ask(pserver, mark(5, version=-1, generation=2)) == Abandoned(Term(1), Generation(2), Place(0), 5)
    assert isinstance(ask(pserver, mark(6, version=-1, generation=2)), Marked)


def test_hello_is_answered_with_where_the_pserver_stands():
    pserver = begun(steps=2)
    at = (Term(2), Generation(1), Member("p"), Place(0))
    assert ask(pserver, Hello(Term(2)), NEXT_MASTER) == HelloReply(*at, 2, commit(1), 0, ())
    pserver = running((3, 1), (0, 2))
    assert ask(pserver, Hello(Term(2)), NEXT_MASTER).standing == ((0, 2), (3, 1))
    fresh = HelloReply(Term(1), Generation(0), Member("p"), Place(0), INIT_STEP, None, 0, ())
    assert ask(Pserver(Member("p")), Hello(Term(1))) == fresh


# -- restoring ---------------------------------------------------------------------------------------------------------

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
    (send,) = pserver.load_failed("the file is gone")
    assert send.message == Restored(
        Term(1), Generation(2), Place(0), Member("p"), INIT_STEP, failure="the file is gone"
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
    with pytest.raises(CheckpointError, match="--pservers"):
        pserver.load(rows)


# -- any course of events ----------------------------------------------------------------------------------------------


def applied_at(pserver):
    return sum(batches for _, batches in pserver._batches.standing)


@pytest.mark.parametrize("seed", range(40))
def test_in_any_course_of_events_batches_count_once_and_cuts_show_what_was_agreed_on(seed):
    """Two pservers, batches sent in any order and again, a master that freezes, marks and abandons at any time."""
    rng = np.random.default_rng(seed)
    pservers = [running(place=place, places=2) for place in range(2)]
    serial, applied = 0, 0
    told: dict[int, tuple] = {}
    cuts: list[dict[int, list]] = [{}, {}]
    for _ in range(400):
        place = int(rng.integers(2))
        pserver = pservers[place]
        match rng.choice(["batch", "batch", "freeze", "mark", "abandon", "piece", "again"]):
            case "batch":
                task = int(rng.integers(4))
                number = pserver._batches.at.of(0, task) + int(rng.integers(-1, 2))
                if number >= 0:
                    pserver.handle(str(rng.choice([A, B])), batch(task, number, place=place, places=2))
            case "freeze":
                serial += 1
                standings = [ask(p, freeze(serial)).standing for p in pservers if rng.random() < 0.8]
                if len(standings) == 2:
                    most = {task: max(dict(s).get(task, 0) for s in standings) for task in range(4)}
                    told[serial] = tuple(most.items())
            case "mark" if told:
                chosen = int(rng.choice(list(told)))
                pserver.handle(MASTER, mark(chosen, standing=told[chosen]))
            case "abandon" if rng.random() < 0.3:
                pserver.handle(MASTER, abandon(int(rng.integers(serial + 1))))
            case "again" if serial:
                late = int(rng.integers(1, serial + 1))
                pserver.handle(MASTER, freeze(late))
            case "piece" if pserver.serial is not None:
                now = pserver.serial
                if (piece := pserver.next_piece(1)) is not None:
                    cuts[place].setdefault(now, []).append(piece)
                    pserver.piece_written(now, (file_of(0),))
    for place, pserver in enumerate(pservers):
        pserver.handle(MASTER, abandon(serial + 1))
        assert pserver._batches._waiting == {}
        assert pserver._promised_bytes == 0
        applied += applied_at(pserver)
        assert pserver._held[0]._tables[0].updates == pserver._held[0]._tables[1].updates == applied_at(pserver)
        for of_serial, pieces in cuts[place].items():
            found = {max(p.updates) for p in pieces if isinstance(p, DensePiece) and p.group == 0}
            assert found <= {sum(batches for _, batches in told[of_serial])}
    assert applied > 0
