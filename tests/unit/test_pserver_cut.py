"""A pserver's part of checkpoints: what each message does, said once, twice, late and out of turn."""

import numpy as np
import pytest
from pservers import (
    KEYS,
    MASTER,
    NEXT_MASTER,
    SLICE,
    A,
    B,
    abandon,
    ask,
    batch,
    begun,
    commit,
    content,
    file_of,
    freeze,
    frozen,
    hand_out,
    mark,
    noted,
    of_standing,
    of_version,
    push,
    readable,
    replace,
    restore,
    running,
    step,
    tell,
    write,
)

from evergrad.checkpoint.pieces import DensePiece, RowsPiece
from evergrad.messages import (
    INIT_STEP,
    Abandoned,
    Committed,
    Deposed,
    Frozen,
    Full,
    Generation,
    Hello,
    HelloReply,
    Here,
    Marked,
    Member,
    Place,
    Pushed,
    Refused,
    Request,
    TableGrads,
    Term,
    UpdateName,
    Where,
    Written,
)
from evergrad.placement import slots_owned, span_owned
from evergrad.pserver.batches import MOST_WAITING
from evergrad.pserver.pserver import Pserver

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
        assert not pserver._promised
        applied += applied_at(pserver)
        assert pserver._held[0]._tables[0].updates == pserver._held[0]._tables[1].updates == applied_at(pserver)
        for of_serial, pieces in cuts[place].items():
            found = {max(p.updates) for p in pieces if isinstance(p, DensePiece) and p.group == 0}
            assert found <= {sum(batches for _, batches in told[of_serial])}
    assert applied > 0


def test_a_mark_of_a_later_epoch_leaves_the_parts_of_a_step_alone():
    pserver, whole = begun(steps=1), push(1)
    parts = [
        replace(whole, request=Request(1), groups=(), part=0, parts=2),
        replace(whole, request=Request(2), tables=(), part=1, parts=2),
    ]
    assert ask(pserver, parts[0], A) == Pushed(Request(1))
    tell(pserver, mark(1, version=1, epoch=1))
    assert pserver.serial == 1
    assert ask(pserver, parts[1], A) == Pushed(Request(2))
    assert isinstance(ask(pserver, commit(1)), Committed)
