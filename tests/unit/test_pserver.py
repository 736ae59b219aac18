"""One pserver: a pure function of the messages it gets."""

import math

import msgspec
import numpy as np
import pytest

from evergrad import init_rows
from evergrad.errors import InvariantError
from evergrad.kernels.hashing import slots_of
from evergrad.messages import (
    INIT_STEP,
    NEWEST,
    Attempt,
    CloseEpoch,
    Commit,
    Committed,
    CountRows,
    Deposed,
    EpochClosed,
    Export,
    Exported,
    ExportPart,
    Full,
    Generation,
    GroupGrads,
    GroupKind,
    GroupSpan,
    GroupSpec,
    Here,
    Joined,
    Member,
    Missing,
    ParameterSpec,
    Place,
    Pull,
    Pulled,
    Push,
    PushBatch,
    Pushed,
    Refused,
    Request,
    Restore,
    Restored,
    RowCounts,
    Schema,
    Send,
    Shutdown,
    Stale,
    TableGrads,
    TableKeys,
    TableSpec,
    Term,
    UpdateName,
    UpdateSpec,
    Where,
)
from evergrad.optim import SGD
from evergrad.placement import slots_owned
from evergrad.pserver.pserver import Pserver

replace = msgspec.structs.replace
SCHEMA = Schema(
    0,
    UpdateSpec(UpdateName.SYNC, 2),
    (TableSpec("user", 2, SGD().spec(), init_rows.constant(5.0), unseen_zero=True),),
    (GroupSpec(GroupKind.TRAINED, SGD().spec(), (ParameterSpec("w", (4,), "float32"),)),),
)
MASTER, A, B = "tcp://127.0.0.1:1", "a", "b"
FIRST, SECOND = Attempt(1, 1), Attempt(1, 2)
KEYS = np.array([0, -1, 2**63 - 1], np.int64)
WHOLE = GroupSpan(0, 0, 4)


def restore(term=1, generation=1, member="p0", place=0, places=1):
    return Restore(Term(term), Generation(generation), Member(member), Place(place), places, SCHEMA, None)


def commit(step, *chosen, term=1, generation=1):
    return Commit(Term(term), Generation(generation), step, chosen, None)


def pull(version=0, keys=KEYS, evaluating=False, request=1, generation=1):
    return Pull(Request(request), Generation(generation), version, evaluating, (TableKeys(0, keys),), (WHOLE,))


def rows(value=1.0, keys=KEYS, table=0):
    return TableGrads(table, 1.0, keys, np.full((keys.size, 2), value, np.float32))


def span(value=1.0, size=4):
    return GroupGrads(0, 1.0, np.full(size, value, np.float32), np.ones(1, np.uint8))


def push(step=0, task=0, attempt=FIRST, samples=1, value=1.0, request=1, generation=1):
    return Push(
        Request(request), Generation(generation), step, task, attempt, samples, (rows(value),), (span(value),)
    )  # fmt: skip


def batch(number, task=0, epoch=0, value=1.0, generation=1):
    return PushBatch(Request(1), Generation(generation), epoch, task, number, (rows(value),), (span(value),))


def ask(pserver, message, src=A):
    """The one answer to a message, or None."""
    sends = pserver.handle(src, message)
    assert len(sends) <= 1
    assert all(send.to == src for send in sends)
    return sends[0].message if sends else None


def fresh(place=0, places=1):
    """A pserver that holds a model without values."""
    pserver = Pserver(Member("p0"))
    pserver.handle(MASTER, restore(place=place, places=places))
    return pserver


def begun():
    """A pserver at version 0, all dense values 10."""
    pserver = fresh()
    ask(pserver, Push(Request(1), Generation(1), INIT_STEP, 0, FIRST, 1, (), (span(10.0),)))
    assert isinstance(ask(pserver, commit(INIT_STEP, (0, FIRST)), MASTER), Committed)
    return pserver


def state(pserver):
    """All that can be read of a pserver."""
    pieces = [
        ask(pserver, Export(Request(1), Generation(1), NEWEST, 0, part, 0, 1 << 30)).part.tolist()
        for part in ExportPart
    ]
    answer = ask(pserver, pull(NEWEST, KEYS[:0]))
    return answer.version, pieces, answer.groups[0].tolist()


def dense(pserver):
    return set(state(pserver)[2])


# -- restoring ---------------------------------------------------------------------------------------------------------


def test_a_restored_pserver_says_so_each_time_it_is_told():
    pserver = Pserver(Member("p0"))
    first = ask(pserver, restore(), MASTER)
    assert first == Restored(Term(1), Generation(1), Place(0), Member("p0"), INIT_STEP, rows=(0,))
    assert ask(pserver, restore(), MASTER) == first


def test_a_restore_said_again_changes_nothing():
    pserver = begun()
    ask(pserver, push())
    assert ask(pserver, restore(), MASTER).version == 0
    assert isinstance(ask(pserver, commit(0, (0, FIRST)), MASTER), Committed)


def test_a_restore_for_another_incarnation_is_ignored():
    pserver = Pserver(Member("p0"))
    assert ask(pserver, restore(member="p0.older"), MASTER) is None
    assert pserver.generation == 0


def test_a_new_generation_drops_the_model_and_what_is_staged():
    pserver = begun()
    ask(pserver, push())
    answer = ask(pserver, restore(generation=2), MASTER)
    assert (answer.generation, answer.version) == (2, INIT_STEP)
    missing = ask(pserver, commit(INIT_STEP, (0, FIRST), generation=2), MASTER)
    assert isinstance(missing, Missing)


def test_a_new_generation_answers_parked_pulls_that_their_version_has_passed():
    pserver = begun()
    assert ask(pserver, pull(1, request=8)) is None
    sends = pserver.handle(MASTER, restore(generation=2))
    assert (A, Stale(Request(8), Generation(2), INIT_STEP)) in sends


@pytest.mark.parametrize(
    "message",
    [pull(), push(), batch(0), Where(Request(1), Generation(1), 0, 0), CountRows(Request(1), Generation(1), 0)],
)
def test_a_request_of_an_older_generation_is_stale(message):
    pserver = begun()
    pserver.handle(MASTER, restore(generation=2))
    answer = ask(pserver, message)
    assert isinstance(answer, Stale)
    assert answer.generation == 2


@pytest.mark.parametrize("message", [pull(generation=2), push(generation=2), batch(0, generation=2)])
def test_a_request_of_a_generation_not_yet_heard_of_is_left_to_be_sent_again(message):
    pserver = begun()
    before = state(pserver)
    assert ask(pserver, message) is None
    assert state(pserver) == before


@pytest.mark.parametrize("message", [pull(), push(), batch(0), commit(0), CountRows(Request(1), Generation(1), 0)])
def test_before_it_is_restored_a_pserver_answers_nothing(message):
    assert Pserver(Member("p0")).handle(A, message) == []


# -- terms -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("message", [restore(term=1), commit(0, term=1), Shutdown(Term(1))])
def test_an_older_master_is_told_that_it_is_deposed_and_changes_nothing(message):
    pserver = begun()
    pserver.handle(MASTER, restore(term=2))
    before = state(pserver)
    assert ask(pserver, message, "old master") == Deposed(Term(2))
    assert state(pserver) == before
    assert not pserver.is_over
    assert pserver.counters["messages of an older master"] == 1


def test_the_masters_word_ends_it():
    pserver = begun()
    assert ask(pserver, Shutdown(Term(1)), MASTER) is None
    assert pserver.is_over


# -- pulls -------------------------------------------------------------------------------------------------------------


def test_a_pull_changes_nothing():
    pserver = begun()
    before = state(pserver)
    answers = [ask(pserver, pull(evaluating=e)) for e in (False, True, False)]
    assert state(pserver) == before
    assert ask(pserver, CountRows(Request(1), Generation(1), 0)) == RowCounts(Request(1), (0,))
    assert answers[0].rows[0].tolist() == answers[2].rows[0].tolist() == [[5.0, 5.0]] * 3
    assert answers[1].rows[0].tolist() == [[0.0, 0.0]] * 3


def test_a_pull_yields_rows_in_the_order_asked_with_duplicates_and_the_dense_span():
    pserver = begun()
    ask(pserver, Push(Request(1), Generation(1), 0, 0, FIRST, 1, (rows(1.0, KEYS[:1]),), ()))
    ask(pserver, commit(0, (0, FIRST)), MASTER)
    answer = ask(pserver, pull(1, KEYS[[1, 0, 0]]))
    assert answer.rows[0].tolist() == [[5, 5], [4, 4], [4, 4]]
    assert answer.groups[0].tolist() == [10] * 4
    assert answer.version == 1


def test_a_pull_of_the_next_version_is_answered_at_its_commit():
    pserver = begun()
    ask(pserver, push())
    assert ask(pserver, pull(1, request=4), A) is None
    assert ask(pserver, pull(1, request=5), B) is None
    sends = pserver.handle(MASTER, commit(0, (0, FIRST)))
    assert isinstance(sends[0].message, Committed)
    assert {(s.to, s.message.request, s.message.version) for s in sends[1:]} == {(A, 4, 1), (B, 5, 1)}
    assert pserver.handle(MASTER, commit(0, (0, FIRST)))[1:] == []


def test_a_parked_pull_said_again_is_answered_once():
    pserver = begun()
    ask(pserver, pull(1, request=4))
    ask(pserver, pull(1, request=4))
    assert len(pserver.handle(MASTER, commit(0))) == 2


def test_a_pull_parked_for_a_later_version_stays_parked():
    pserver = begun()
    ask(pserver, pull(2))
    assert len(pserver.handle(MASTER, commit(0))) == 1
    assert len(pserver.handle(MASTER, commit(1))) == 2


def test_a_newer_master_lets_go_of_parked_pulls_since_what_they_wait_for_may_never_come():
    pserver = begun()
    ask(pserver, pull(1, request=8))
    assert pserver.handle("new master", commit(0, term=2)) == [
        Send(A, Stale(Request(8), Generation(1), 0)),
        Send("new master", Committed(Term(2), Generation(1), Place(0), 0)),
    ]


def test_a_pull_of_a_version_passed_is_stale():
    pserver = begun()
    ask(pserver, commit(0), MASTER)
    assert ask(pserver, pull(0, request=3)) == Stale(Request(3), Generation(1), 1)


@pytest.mark.parametrize("version", [0, NEWEST])
def test_a_pull_before_the_initial_values_waits_for_them(version):
    pserver = fresh()
    ask(pserver, Push(Request(1), Generation(1), INIT_STEP, 0, FIRST, 1, (), (span(10.0),)))
    assert ask(pserver, pull(version)) is None
    _, answer = pserver.handle(MASTER, commit(INIT_STEP, (0, FIRST)))
    assert isinstance(answer.message, Pulled)


def test_what_a_pull_was_answered_with_is_not_changed_by_later_commits():
    pserver = begun()
    answer = ask(pserver, pull())
    ask(pserver, push(value=3.0))
    ask(pserver, commit(0, (0, FIRST)), MASTER)
    assert set(answer.groups[0].tolist()) == {10.0}
    assert set(answer.rows[0].ravel().tolist()) == {5.0}


def test_a_pull_of_what_is_not_there_is_refused_with_the_reason():
    pserver = begun()
    unknown = replace(pull(), tables=(TableKeys(1, KEYS),))
    assert "table number 1" in ask(pserver, unknown).reason
    assert "group number 4" in ask(pserver, replace(pull(), groups=(GroupSpan(4, 0, 1),))).reason
    assert "one dimension" in ask(pserver, pull(keys=KEYS.reshape(3, 1))).reason
    assert pserver.counters["refused requests"] == 3


def test_a_pull_of_another_pservers_keys_is_refused():
    pserver = Pserver(Member("p0"))
    pserver.handle(MASTER, restore(place=0, places=2))
    ask(pserver, Push(Request(1), Generation(1), INIT_STEP, 0, FIRST, 1, (), (span(10.0, 2),)))
    ask(pserver, commit(INIT_STEP, (0, FIRST)), MASTER)
    keys, half = np.arange(50), (GroupSpan(0, 0, 2),)
    assert "another pserver" in ask(pserver, replace(pull(keys=keys), groups=half)).reason
    owned = keys[[s in slots_owned(0, 2) for s in slots_of(keys)]]
    assert isinstance(ask(pserver, replace(pull(keys=owned), groups=half)), Pulled)


# -- staging and commits -----------------------------------------------------------------------------------------------


def test_a_push_is_held_and_not_applied():
    pserver = begun()
    before = state(pserver)
    assert ask(pserver, push()) == Pushed(Request(1))
    assert state(pserver) == before


def test_a_resent_push_is_acknowledged_and_not_applied_twice():
    pserver = begun()
    assert ask(pserver, push()) == ask(pserver, push()) == Pushed(Request(1))
    ask(pserver, commit(0, (0, FIRST)), MASTER)
    assert dense(pserver) == {9.0}
    assert pserver.counters["repeated pushes"] == 1


def test_two_attempts_of_a_task_are_both_held_and_the_one_named_is_applied():
    for chosen, expected in ((FIRST, 9.0), (SECOND, 7.0)):
        pserver = begun()
        ask(pserver, push(attempt=FIRST, value=1.0), A)
        ask(pserver, push(attempt=SECOND, value=3.0), B)
        ask(pserver, commit(0, (0, chosen)), MASTER)
        assert dense(pserver) == {expected}


def test_a_commit_applies_the_mean_over_samples_of_the_tasks_it_names():
    pserver = begun()
    ask(pserver, push(task=1, attempt=SECOND, samples=3, value=5.0))
    ask(pserver, push(task=0, attempt=FIRST, samples=1, value=1.0))
    ask(pserver, push(task=2, attempt=Attempt(1, 3), samples=9, value=99.0))
    ask(pserver, commit(0, (0, FIRST), (1, SECOND)), MASTER)
    assert dense(pserver) == {6.0}
    assert ask(pserver, pull(1)).rows[0].tolist() == [[1.0, 1.0]] * 3


def test_a_repeated_commit_is_acknowledged_and_not_applied():
    pserver = begun()
    ask(pserver, push())
    first = ask(pserver, commit(0, (0, FIRST)), MASTER)
    before = state(pserver)
    assert ask(pserver, commit(0, (0, FIRST)), MASTER) == first
    assert ask(pserver, commit(INIT_STEP, (0, FIRST)), MASTER).step == INIT_STEP
    assert state(pserver) == before


def test_a_commit_of_a_later_step_is_ignored():
    pserver = begun()
    ask(pserver, push())
    before = state(pserver)
    assert ask(pserver, commit(1, (0, FIRST)), MASTER) is None
    assert state(pserver) == before


def test_a_commit_that_names_a_push_not_held_applies_nothing():
    pserver = begun()
    ask(pserver, push())
    before = state(pserver)
    answer = ask(pserver, commit(0, (0, FIRST), (1, SECOND)), MASTER)
    assert answer == Missing(Term(1), Generation(1), Place(0), 0)
    assert state(pserver) == before
    assert isinstance(ask(pserver, commit(0, (0, FIRST)), MASTER), Committed)


def test_a_commit_of_the_same_attempt_of_another_task_is_missing():
    pserver = begun()
    ask(pserver, push(task=0))
    assert isinstance(ask(pserver, commit(0, (1, FIRST)), MASTER), Missing)


def test_a_commit_of_another_generation_is_ignored():
    pserver = begun()
    ask(pserver, push())
    before = state(pserver)
    for generation in (0, 2):
        assert ask(pserver, commit(0, (0, FIRST), generation=generation), MASTER) is None
    assert state(pserver) == before


def test_a_step_decided_in_two_ways_is_a_bug_that_is_said():
    pserver = begun()
    ask(pserver, push())
    ask(pserver, commit(0, (0, FIRST)), MASTER)
    with pytest.raises(InvariantError, match="step 0"):
        pserver.handle(MASTER, commit(0))


def test_a_commit_of_nothing_goes_on_to_the_next_version():
    pserver = begun()
    version, *before = state(pserver)
    ask(pserver, commit(0), MASTER)
    assert state(pserver) == (version + 1, *before)


def test_a_push_for_a_step_committed_is_stale_and_for_a_later_one_is_left_to_be_sent_again():
    pserver = begun()
    ask(pserver, commit(0), MASTER)
    assert isinstance(ask(pserver, push(step=0)), Stale)
    assert ask(pserver, push(step=2)) is None
    assert isinstance(ask(pserver, commit(1, (0, FIRST)), MASTER), Missing)


def test_what_is_staged_is_dropped_at_the_commit():
    pserver = begun()
    ask(pserver, push(attempt=FIRST))
    ask(pserver, push(attempt=SECOND))
    ask(pserver, commit(0, (0, FIRST)), MASTER)
    assert isinstance(ask(pserver, commit(1, (0, SECOND)), MASTER), Missing)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tables": (rows(math.nan),)},
        {"tables": (rows(math.inf),)},
        {"tables": (rows(table=3),)},
        {"tables": (replace(rows(), grads=np.ones((3, 3), np.float32)),)},
        {"tables": (replace(rows(), lr=math.nan),)},
        {"groups": (span(math.nan),)},
        {"groups": (span(size=3),)},
        {"samples": 0},
    ],
)
def test_a_push_that_does_not_fit_is_refused_whole_and_counted(wrong):
    pserver = begun()
    before = state(pserver)
    assert isinstance(ask(pserver, replace(push(), **wrong)), Refused)
    assert isinstance(ask(pserver, commit(0, (0, FIRST)), MASTER), Missing)
    assert state(pserver) == before
    assert pserver.counters["refused requests"] == 1


def test_the_values_do_not_depend_on_the_order_in_which_pushes_come():
    found = []
    for order in ((0, 1, 2), (2, 0, 1)):
        pserver = begun()
        for task in order:
            ask(pserver, push(task=task, attempt=Attempt(1, task), samples=task + 1, value=0.1 * (task + 1)))
        ask(pserver, commit(0, *((task, Attempt(1, task)) for task in range(3))), MASTER)
        found.append(state(pserver))
    assert found[0] == found[1]


# -- asynchronous batches ----------------------------------------------------------------------------------------------


def test_a_batch_is_applied_when_it_is_the_next_of_its_task():
    pserver = begun()
    for number in range(3):
        assert ask(pserver, batch(number)) == Pushed(Request(1))
    assert dense(pserver) == {7.0}
    assert ask(pserver, Where(Request(1), Generation(1), 0, 0)) == Here(Request(1), 3)


def test_a_batch_applied_before_is_acknowledged_and_not_applied():
    pserver = begun()
    ask(pserver, batch(0))
    ask(pserver, batch(1))
    before = state(pserver)
    assert ask(pserver, batch(0)) == ask(pserver, batch(1)) == Pushed(Request(1))
    assert state(pserver) == before
    assert pserver.counters["repeated pushes"] == 2


def test_a_batch_that_is_not_the_next_is_left_to_be_sent_again():
    pserver = begun()
    before = state(pserver)
    assert ask(pserver, batch(1)) is None
    assert state(pserver) == before


def test_the_batches_of_each_task_are_counted_apart():
    pserver = begun()
    ask(pserver, batch(0, task=4))
    ask(pserver, batch(0, task=9))
    ask(pserver, batch(1, task=4))
    where = [ask(pserver, Where(Request(1), Generation(1), 0, task)).batches for task in (4, 9, 5)]
    assert where == [2, 1, 0]
    assert dense(pserver) == {7.0}


def test_a_new_epoch_counts_from_nothing_and_an_old_ones_batches_are_all_applied():
    pserver = begun()
    ask(pserver, batch(0))
    ask(pserver, batch(0, epoch=1))
    before = state(pserver)
    assert ask(pserver, batch(1, epoch=0)) == Pushed(Request(1))
    assert state(pserver) == before
    assert ask(pserver, Where(Request(1), Generation(1), 0, 0)).batches > 10**9
    assert ask(pserver, Where(Request(1), Generation(1), 1, 0)).batches == 1


def test_no_batch_is_applied_before_the_initial_values():
    assert ask(fresh(), batch(0)) is None


def test_a_refused_batch_changes_nothing_and_is_still_the_next():
    pserver = begun()
    assert isinstance(ask(pserver, batch(0, value=math.nan)), Refused)
    assert isinstance(ask(pserver, batch(0)), Pushed)
    assert dense(pserver) == {9.0}


def test_several_batches_that_come_as_one_count_as_so_many():
    pserver = begun()
    assert ask(pserver, replace(batch(0), batches=3)) == Pushed(Request(1))
    assert dense(pserver) == {9.0}, "they are one update"
    assert ask(pserver, Where(Request(1), Generation(1), 0, 0)).batches == 3
    assert ask(pserver, batch(2)) == Pushed(Request(1)), "it is applied already"
    assert ask(pserver, batch(4)) is None
    assert ask(pserver, replace(batch(3), batches=2)) == Pushed(Request(1))
    assert ask(pserver, Where(Request(1), Generation(1), 0, 0)).batches == 5


def test_batches_some_of_which_are_applied_are_refused():
    pserver = begun()
    ask(pserver, replace(batch(0), batches=3))
    before = state(pserver)
    refused = ask(pserver, replace(batch(2), batches=2))
    assert "batches 2 to 3 of a task of which 3 are applied" in refused.reason
    assert state(pserver) == before


def test_no_batch_of_an_epoch_that_is_over_is_applied_any_more():
    pserver = begun()
    ask(pserver, batch(0))
    closed = EpochClosed(Term(1), Generation(1), 0, 0)
    assert ask(pserver, CloseEpoch(Term(1), Generation(1), 0), MASTER) == closed
    before = state(pserver)
    assert ask(pserver, batch(1)) == ask(pserver, batch(0, task=9)) == Pushed(Request(1))
    assert state(pserver) == before
    assert ask(pserver, Where(Request(1), Generation(1), 0, 0)).batches > 10**9


def test_the_end_of_an_epoch_is_acknowledged_again_and_does_not_touch_a_later_one():
    pserver = begun()
    close = CloseEpoch(Term(1), Generation(1), 0)
    ask(pserver, close, MASTER)
    ask(pserver, batch(0, epoch=1))
    assert ask(pserver, close, MASTER) == EpochClosed(Term(1), Generation(1), 0, 0)
    assert ask(pserver, Where(Request(1), Generation(1), 1, 0)).batches == 1
    assert pserver.handle(MASTER, replace(close, generation=Generation(2))) == []


def test_buffers_of_the_last_batch_stand():
    pserver = fresh_with_buffers()
    for number, value in enumerate((5.0, 2.5, 3.0)):
        spans = (GroupGrads(0, 0.0, np.full(1, value, np.float32), ON), GroupGrads(1, 0.0, np.array([number]), ON))
        pushed = PushBatch(Request(1), Generation(1), 0, number % 2, number // 2, (), spans)
        assert isinstance(ask(pserver, pushed), Pushed)
    pulled = ask(pserver, Pull(Request(1), Generation(1), NEWEST, False, (), (GroupSpan(0, 0, 1), GroupSpan(1, 0, 1))))
    assert [values.tolist() for values in pulled.groups] == [[3.0], [2]]


ON = np.ones(1, np.uint8)


def fresh_with_buffers():
    """A pserver of a float and an integer buffer, both zero."""
    named = [(GroupKind.AVERAGED, "float32"), (GroupKind.LOWEST, "int64")]
    groups = tuple(GroupSpec(kind, None, (ParameterSpec("b", (1,), dtype),)) for kind, dtype in named)
    pserver = Pserver(Member("p0"))
    pserver.handle(MASTER, replace(restore(), schema=replace(restore().schema, tables=(), groups=groups)))
    zeros = (GroupGrads(0, 0.0, np.zeros(1, np.float32), ON), GroupGrads(1, 0.0, np.zeros(1, np.int64), ON))
    ask(pserver, Push(Request(1), Generation(1), INIT_STEP, 0, FIRST, 1, (), zeros))
    ask(pserver, commit(INIT_STEP, (0, FIRST)), MASTER)
    return pserver


# -- reading it all ----------------------------------------------------------------------------------------------------


def test_an_export_and_the_count_of_rows_are_of_the_version_asked_or_stale():
    pserver = begun()
    ask(pserver, push())
    ask(pserver, commit(0, (0, FIRST)), MASTER)
    assert ask(pserver, CountRows(Request(1), Generation(1), 1)) == RowCounts(Request(1), (3,))
    assert isinstance(ask(pserver, CountRows(Request(1), Generation(1), 0)), Stale)
    export = Export(Request(1), Generation(1), 1, 0, ExportPart.VALUES, 0, 1 << 20)
    exported = ask(pserver, export)
    assert isinstance(exported, Exported)
    assert exported.part.tolist() == [[4.0, 4.0]] * 3
    assert isinstance(ask(pserver, replace(export, version=0)), Stale)
    assert "table number 7" in ask(pserver, replace(export, table=7)).reason


@pytest.mark.parametrize("slot", [-1, 16_384, 2**40])
def test_an_export_from_a_slot_that_is_not_its_own_is_refused(slot):
    pserver = begun()
    answer = ask(pserver, Export(Request(1), Generation(1), 0, 0, ExportPart.KEYS, slot, 1 << 20))
    assert isinstance(answer, Refused)


def test_a_message_it_does_not_expect_is_counted_and_nothing_else():
    pserver = begun()
    before = state(pserver)
    assert pserver.handle(A, Joined(Request(1), Term(1), Generation(1), 5.0)) == []
    assert pserver.counters["unexpected messages"] == 1
    assert state(pserver) == before


def test_rows_are_not_counted_or_exported_before_their_version_is_there():
    pserver = Pserver(Member("p0"))
    pserver.handle(MASTER, restore())
    count = CountRows(Request(1), Generation(1), 1)
    export = Export(Request(1), Generation(1), 1, 0, ExportPart.KEYS, 0, 100)
    assert pserver.handle(A, count) == []
    ask(pserver, Push(Request(1), Generation(1), INIT_STEP, 0, FIRST, 1, (), (span(0.0),)))
    ask(pserver, commit(INIT_STEP, (0, FIRST)), MASTER)
    assert pserver.handle(A, count) == pserver.handle(A, export) == []
    ask(pserver, push())
    ask(pserver, commit(0, (0, FIRST)), MASTER)
    assert ask(pserver, count).counts == (3,)
    assert sorted(ask(pserver, export).part) == sorted(KEYS)


def test_memory_is_promised_to_what_is_staged():
    row = 2 * 4 + 40 + 2 * 12
    pserver = Pserver(Member("p0"), room=lambda: 3 * row * 1.5)
    pserver.handle(MASTER, restore())
    ask(pserver, Push(Request(1), Generation(1), INIT_STEP, 0, FIRST, 1, (), (span(0.0),)))
    ask(pserver, commit(INIT_STEP, (0, FIRST)), MASTER)
    assert isinstance(ask(pserver, push()), Pushed)
    assert isinstance(ask(pserver, push(task=1, attempt=SECOND)), Full)
    ask(pserver, commit(0, (0, FIRST)), MASTER)
    assert isinstance(ask(pserver, push(step=1, attempt=SECOND)), Pushed)


def test_rows_that_take_the_place_of_evicted_ones_need_no_memory():
    row, sums = 2 * 4 + 40, 2 * 12
    room = 3 * (row + sums)
    pserver = Pserver(Member("p0"), room=lambda: room)
    pserver.handle(MASTER, restore())
    ask(pserver, Push(Request(1), Generation(1), INIT_STEP, 0, FIRST, 1, (), (span(0.0),)))
    ask(pserver, commit(INIT_STEP, (0, FIRST)), MASTER)
    ask(pserver, push())
    ask(pserver, commit(0, (0, FIRST)), MASTER)
    room = 3 * (row + sums) - 1
    assert isinstance(ask(pserver, push(step=1)), Full)
    evicting = Push(Request(1), Generation(1), 1, 0, FIRST, 1, (), (), (TableKeys(0, KEYS),))
    assert isinstance(ask(pserver, evicting), Pushed)
    ask(pserver, commit(1, (0, FIRST)), MASTER)
    assert isinstance(ask(pserver, push(step=2)), Pushed)
    # three rows are free and six are promised now
    assert isinstance(ask(pserver, push(step=2, task=1, attempt=SECOND)), Full)
    room = 3 * row + 6 * sums
    assert isinstance(ask(pserver, push(step=2, task=1, attempt=SECOND)), Pushed)


def test_parts_of_a_batch_that_was_applied_are_forgotten():
    pserver = begun()
    half = replace(batch(0), part=0, parts=2)
    assert isinstance(ask(pserver, half), Pushed)
    assert isinstance(ask(pserver, batch(0), B), Pushed)
    assert pserver._parts._open == {}


def test_the_first_batch_of_an_epoch_keeps_the_parts_that_have_come_of_others_of_it():
    pserver = begun()
    ask(pserver, batch(0))
    first, second = (replace(batch(0, task=1, epoch=1), part=i, parts=2, tables=(), groups=()) for i in (0, 1))
    assert isinstance(ask(pserver, first), Pushed)
    assert isinstance(ask(pserver, batch(0, task=0, epoch=1), B), Pushed)
    assert isinstance(ask(pserver, second), Pushed)
    assert ask(pserver, Where(Request(1), Generation(1), 1, 1)).batches == 1


def test_memory_is_promised_once_to_a_part_that_comes_twice():
    row = 2 * 4 + 40 + 2 * 12
    pserver = Pserver(Member("p0"), room=lambda: 6 * row)
    pserver.handle(MASTER, restore())
    ask(pserver, Push(Request(1), Generation(1), INIT_STEP, 0, FIRST, 1, (), (span(0.0),)))
    ask(pserver, commit(INIT_STEP, (0, FIRST)), MASTER)
    first, second = (replace(push(), part=i, parts=2, groups=(span(),) * i) for i in (0, 1))
    assert all(isinstance(ask(pserver, part), Pushed) for part in (first, first, second, second))
    assert pserver.counters["repeated pushes"] == 2
    assert isinstance(ask(pserver, commit(0, (0, FIRST)), MASTER), Committed)
