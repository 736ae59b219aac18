"""A trainer's flows, driven by hand: what they ask, and what they make of the answers."""

import msgspec
import numpy as np
import pytest

from evergrad import init_rows
from evergrad.errors import ConfigError, InvariantError
from evergrad.kernels.hashing import slots_of
from evergrad.messages import (
    INIT_STEP,
    Address,
    Agree,
    Agreed,
    Ask,
    AskLeader,
    AsyncTask,
    Attempt,
    Begin,
    BreakDone,
    CountRows,
    DataSpec,
    Ended,
    EpochIs,
    Export,
    Exported,
    ExportPart,
    Generation,
    GiveUp,
    GroupKind,
    GroupSpec,
    Here,
    InitTask,
    Join,
    Joined,
    LeaderIs,
    Leave,
    Left,
    MayBegin,
    Member,
    Noted,
    Over,
    ParameterSpec,
    Place,
    PserverAt,
    Pull,
    Pulled,
    Push,
    PushBatch,
    Pushed,
    Raised,
    Refused,
    ReportMetrics,
    Request,
    RowCounts,
    SaveTask,
    Schema,
    Send,
    Stale,
    SyncTask,
    TableSpec,
    Term,
    Unknown,
    UpdateName,
    UpdateSpec,
    WantBatch,
    WantEnd,
    WantEpoch,
    Where,
)
from evergrad.optim import SGD
from evergrad.placement import slots_owned, span_owned
from evergrad.trainer.exchange import Exchange
from evergrad.trainer.trainer import Identity, JobOver, PushRefused, RowGrads, SpanGrads, Trainer, Void

MASTER = Address("tcp://127.0.0.1:1")
TABLES = tuple(TableSpec(f"t{i}", 2, SGD().spec(), init_rows.zeros()) for i in range(5))
GROUPS = (GroupSpec(GroupKind.FROZEN, None, (ParameterSpec("w", (27,), "float32"),)),) * 4
SCHEMA = Schema(0, UpdateSpec(UpdateName.SYNC, 1), TABLES, GROUPS)
TASK = SyncTask(Request(1), Term(1), Generation(1), Attempt(1, 1), 0, 6, 2, 0, 4)
ASYNC_TASK = AsyncTask(Request(1), Term(1), Generation(1), Attempt(1, 1), 0, 3, 0, 4, 0)
SAVE_TASK = SaveTask(Request(1), Term(1), Generation(1), Attempt(1, 1), 9)
KEYS = np.arange(40, dtype=np.int64)


class Peer:
    """The rest of the job: answers what flows ask by a function of the message."""

    def __init__(self, places=1):
        self.asked: list[Send] = []
        self.exchange = Exchange()
        self._members = iter(f"t.{n}" for n in range(1, 100))
        identity = Identity("t", 7, "numerics")
        self.trainer = Trainer(self.exchange, MASTER, identity, lambda: Member(next(self._members)))
        at = tuple(PserverAt(Place(p), Member(f"p{p}"), Address(f"tcp://127.0.0.1:{10 + p}")) for p in range(places))
        self.agreed = lambda m: Agreed(m.request, Term(1), Generation(1), at)

    def run(self, flow, answer):
        """Run a flow to its end; `answer` gives the answer to each message, or a list says it one after the other."""
        answers = iter(answer) if isinstance(answer, list) else None
        for _ in range(1000):
            try:
                next(flow)
            except StopIteration as stop:
                return stop.value
            for send in self.exchange.due(0.0):
                self.asked.append(send)
                self.exchange.receive((next(answers) if answers else answer)(send.message))
        raise AssertionError("the flow does not end")

    def messages(self, kind=object):
        return [send.message for send in self.asked if isinstance(send.message, kind)]


def joined(message):
    return Joined(message.request, Term(1), Generation(1), 5.0)


def answer_with(kind, *values):
    return lambda message: kind(message.request, *values)


def ready(places=1):
    """A trainer that has joined and agreed."""
    peer = Peer(places)
    peer.run(peer.trainer.join(), joined)
    peer.run(peer.trainer.agree(SCHEMA), peer.agreed)
    peer.asked.clear()
    return peer


def test_of_a_large_pull_a_bounded_number_of_pieces_is_asked_for_at_once():
    peer = ready()
    peer.trainer._message_bytes, peer.trainer._piece_bytes = 48, 16  # two rows of two floats
    flow = peer.trainer.pull(Generation(1), 0, [(0, KEYS[:14])], [], evaluating=False)
    rounds = []
    for _ in range(3):
        next(flow)
        asked = [send.message for send in peer.exchange.due(0.0)]
        rounds.append(len(asked))
        for message in reversed(asked):
            peer.exchange.receive(pulled(message))
    assert rounds == [3, 3, 1]
    assert peer.run(flow, []).rows[0].tolist() == [[key, -key] for key in range(14)]


def test_an_answer_of_another_size_than_was_asked_for_is_not_used():
    peer = ready()
    flow = peer.trainer.pull(Generation(1), 0, [(0, KEYS)], [], evaluating=False)
    short = (np.zeros((3, 2), np.float32),)
    with pytest.raises(InvariantError, match="more or less than it was asked for"):
        peer.run(flow, lambda message: Pulled(message.request, 0, short, ()))


def pulled(message):
    rows = tuple(np.stack([asked.keys, -asked.keys], 1).astype(np.float32) for asked in message.tables)
    groups = tuple(np.arange(span.start, span.stop, dtype="f4") for span in message.groups)
    return Pulled(message.request, message.version, rows, groups)


# -- the master --------------------------------------------------------------------------------------------------------


def test_to_join_is_to_say_who_one_is():
    peer = Peer()
    peer.run(peer.trainer.join(), joined)
    (join,) = peer.messages(Join)
    assert (join.member, join.name, join.pid, join.numerics) == ("t.1", "t", 7, "numerics")
    assert peer.trainer.member == "t.1"


def test_a_refusal_is_a_configuration_error_with_its_reason():
    peer = ready()
    with pytest.raises(ConfigError, match="another model"):
        peer.run(peer.trainer.agree(SCHEMA), answer_with(Refused, "another model"))


@pytest.mark.parametrize("failure", [None, "it failed"])
def test_the_end_of_the_job_unwinds_the_script_with_the_jobs_status(failure):
    peer = ready()
    with pytest.raises(JobOver) as over:
        peer.run(peer.trainer.ask(WantEnd(), None), answer_with(Ended, failure))
    assert over.value.code == (0 if failure is None else 1)
    assert over.value.failure == failure


def test_one_who_is_unknown_joins_under_a_new_incarnation_agrees_and_asks_again():
    peer = ready()
    answers = [answer_with(Unknown), joined, peer.agreed, answer_with(EpochIs, 4)]
    assert peer.run(peer.trainer.ask(WantEpoch(-1, 9), None), answers).epoch == 4
    assert [type(m) for m in peer.messages()] == [Ask, Join, Agree, Ask]
    assert [m.member for m in peer.messages()] == ["t.1", "t.2", "t.2", "t.2"]
    assert len({m.request for m in peer.messages()}) == 4


def test_what_was_done_is_said_again_after_joining_anew():
    """Else an epoch that its only trainer left just when its lease ran out would never end."""
    peer = ready()
    answers = [answer_with(Unknown), joined, peer.agreed, answer_with(EpochIs, 1)]
    peer.run(peer.trainer.ask(WantEpoch(0, 9), BreakDone(0, 0)), answers)
    assert [m.done for m in peer.messages(Ask)] == [BreakDone(0, 0), BreakDone(0, 0)]


def test_whoever_joins_anew_says_in_which_generation_its_script_began():
    peer = ready()
    later = answer_with(Joined, Term(1), Generation(4), 5.0)
    for _ in range(2):
        peer.run(peer.trainer.ask(WantEnd(), None), [answer_with(Unknown), later, peer.agreed, answer_with(Over)])
    assert [m.began for m in peer.messages(Join)] == [Generation(1), Generation(1)]


def test_one_who_is_unknown_when_it_agrees_joins_anew():
    peer = ready()
    peer.run(peer.trainer.agree(SCHEMA), [answer_with(Unknown), joined, peer.agreed])
    assert [m.member for m in peer.messages(Agree)] == ["t.1", "t.2"]


def test_an_answer_that_makes_no_sense_is_a_bug_that_is_said():
    peer = ready()
    with pytest.raises(InvariantError, match="Left to Ask"):
        peer.run(peer.trainer.ask(WantEnd(), None), answer_with(Left))


def test_every_ask_has_an_id_of_its_own():
    peer = ready()
    for _ in range(3):
        peer.run(peer.trainer.ask(WantBatch(0, None), None), answer_with(Over))
    assert len({m.request for m in peer.messages(Ask)}) == 3


def test_whether_it_leads_is_the_masters_word():
    peer = ready()
    assert peer.run(peer.trainer.is_leader(), answer_with(LeaderIs, True))
    assert not peer.run(peer.trainer.is_leader(), answer_with(LeaderIs, False))
    assert len(peer.messages(AskLeader)) == 2


def test_metrics_and_a_goodbye_go_to_the_master():
    peer = ready()
    peer.run(peer.trainer.report(2, {"auc": 0.5}), answer_with(Noted))
    peer.run(peer.trainer.leave("a traceback"), answer_with(Left))
    assert [type(m) for m in peer.messages()] == [ReportMetrics, Leave]
    assert peer.messages(Leave)[0].failure == "a traceback"
    assert {send.to for send in peer.asked} == {MASTER}


# -- pulls -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", [1, 2, 3, 9])
def test_rows_come_back_in_the_order_of_the_keys_from_however_many_pservers(places):
    peer = ready(places)
    wanted = [(0, KEYS[::-1].copy()), (4, KEYS[:0])]
    answer = peer.run(peer.trainer.pull(Generation(1), 6, wanted, [0, 2], False), pulled)
    assert answer.rows[0].tolist() == [[k, -k] for k in KEYS[::-1]]
    assert answer.rows[1].shape == (0, 2)
    assert answer.version == 6
    spans = [float(element) for place in range(places) for element in range(len(span_owned(27, place, places)))]
    assert [group.tolist() for group in answer.groups] == [spans] * 2
    assert len(peer.asked) == places


def test_every_pserver_is_asked_for_the_keys_it_owns_and_no_others():
    peer = ready(3)
    peer.run(peer.trainer.pull(Generation(1), 6, [(0, KEYS)], [], True), pulled)
    for place, pull in enumerate(peer.messages(Pull)):
        assert all(slot in slots_owned(place, 3) for slot in slots_of(pull.tables[0].keys))
        assert (pull.version, pull.evaluating, pull.generation) == (6, True, 1)
    assert sorted(np.concatenate([p.tables[0].keys for p in peer.messages(Pull)])) == KEYS.tolist()


@pytest.mark.parametrize(
    "flow",
    [
        lambda t: t.pull(Generation(1), 6, [(0, KEYS)], [], False),
        lambda t: t.push(TASK, 6, 2, 4, [], []),
        lambda t: t.push_batch(ASYNC_TASK, 0, [], []),
        lambda t: t.where(ASYNC_TASK),
        lambda t: t.count_rows(SAVE_TASK),
        lambda t: t.export(SAVE_TASK, 0, ExportPart.KEYS, 1, 0),
    ],
)
def test_what_is_stale_or_refused_says_so_by_what_it_raises(flow):
    peer = ready(2)
    with pytest.raises(Void) as void:
        peer.run(flow(peer.trainer), answer_with(Stale, Generation(3), 7))
    assert void.value.generation == 3
    with pytest.raises(PushRefused, match="NaN"):
        peer.run(flow(peer.trainer), answer_with(Refused, "NaN"))
    with pytest.raises(InvariantError, match="Left"):
        peer.run(flow(peer.trainer), answer_with(Left))


# -- pushes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", [1, 2, 5])
def test_a_push_goes_to_every_pserver_cut_by_key_and_by_element(places):
    peer = ready(places)
    grads = np.arange(80, dtype=np.float32).reshape(40, 2)
    values = np.arange(7, dtype=np.float32)
    flags = np.array([1, 0], np.uint8)
    flow = peer.trainer.push(TASK, 6, 2, 4, [RowGrads(1, 0.5, KEYS, grads)], [SpanGrads(3, 0.25, values, flags)])
    peer.run(flow, answer_with(Pushed))
    pushes = peer.messages(Push)
    assert len(pushes) == places
    for place, push in enumerate(pushes):
        assert (push.generation, push.step, push.task, push.attempt, push.samples) == (1, 6, 2, Attempt(1, 1), 4)
        (rows,), (span,) = push.tables, push.groups
        assert (rows.table, rows.lr, span.group, span.lr) == (1, 0.5, 3, 0.25)
        assert all(slot in slots_owned(place, places) for slot in slots_of(rows.keys))
        assert (rows.grads == grads[rows.keys]).all()
        assert span.values.tolist() == [values[i] for i in span_owned(7, place, places)]
        assert span.present.tolist() == [1, 0]
    assert sorted(k for push in pushes for k in push.tables[0].keys.tolist()) == KEYS.tolist()


def test_a_table_touched_is_named_to_pservers_that_own_none_of_its_keys():
    peer = ready(9)
    rows = RowGrads(0, 0.5, KEYS[:1], np.ones((1, 2), np.float32))
    peer.run(peer.trainer.push(TASK, 6, 2, 4, [rows], []), answer_with(Pushed))
    assert [t.table for push in peer.messages(Push) for t in push.tables] == [0] * 9
    assert sum(push.tables[0].keys.size for push in peer.messages(Push)) == 1


def test_initial_values_are_a_push_of_step_minus_one():
    peer = ready(2)
    task = InitTask(Request(1), Term(1), Generation(1), Attempt(1, 5))
    peer.run(peer.trainer.push(task, INIT_STEP, 0, 1, [], []), answer_with(Pushed))
    assert {(p.step, p.task, p.attempt) for p in peer.messages(Push)} == {(-1, 0, (1, 5))}


def test_a_push_one_pserver_of_two_refuses_is_refused():
    peer = ready(2)
    with pytest.raises(PushRefused, match="NaN"):
        peer.run(peer.trainer.push(TASK, 6, 2, 4, [], []), [answer_with(Pushed), answer_with(Refused, "NaN")])


def test_an_asynchronous_task_goes_on_where_the_last_of_the_pservers_is():
    peer = ready(3)
    answers = [answer_with(Here, n) for n in (5, 2, 4)]
    assert peer.run(peer.trainer.where(ASYNC_TASK), answers) == 2
    assert {(w.epoch, w.task) for w in peer.messages(Where)} == {(0, 3)}


def test_a_batch_of_an_asynchronous_task_says_its_number():
    peer = ready(2)
    peer.run(peer.trainer.push_batch(ASYNC_TASK, 1, [], []), answer_with(Pushed))
    assert [(p.epoch, p.task, p.batch) for p in peer.messages(PushBatch)] == [(0, 3, 1)] * 2


def test_batches_pushed_together_say_how_many_they_are():
    peer = ready(2)
    peer.run(peer.trainer.push_batch(ASYNC_TASK, 2, [], [], (), 2), answer_with(Pushed))
    assert [(p.batch, p.batches) for p in peer.messages(PushBatch)] == [(2, 2)] * 2


def test_whether_another_batch_may_begin_is_the_masters_word():
    peer = ready()
    peer.run(peer.trainer.may_begin(ASYNC_TASK, 3), answer_with(Begin))
    (asked,) = peer.messages(MayBegin)
    assert (asked.member, asked.attempt, asked.done) == ("t.1", ASYNC_TASK.attempt, 3)
    with pytest.raises(Void):
        peer.run(peer.trainer.may_begin(ASYNC_TASK, 3), answer_with(GiveUp))


def test_one_declared_dead_that_asks_to_go_on_joins_anew_and_gives_its_task_up():
    peer = ready()
    answers = [answer_with(Unknown), joined, peer.agreed, answer_with(GiveUp)]
    with pytest.raises(Void):
        peer.run(peer.trainer.may_begin(ASYNC_TASK, 0), answers)
    assert [m.member for m in peer.messages(MayBegin)] == ["t.1", "t.2"]


def asking_pservers():
    """A peer that has agreed on generation 1 and asks its pserver something, which has not answered."""
    peer = ready()
    peer.trainer._generation = peer.trainer._newest = Generation(1)
    flow = peer.trainer.where(ASYNC_TASK)
    next(flow)
    return peer, flow


@pytest.mark.parametrize("heard", [(Generation(2), True), (Generation(1), False)], ids=["newer", "not whole"])
def test_what_is_asked_of_pservers_is_void_in_a_newer_generation_and_in_one_that_has_lost_some(heard):
    peer, flow = asking_pservers()
    peer.trainer.hear(*heard)
    with pytest.raises(Void):
        next(flow)


@pytest.mark.parametrize("heard", [(Generation(1), True), (Generation(0), True), (Generation(0), False)])
def test_what_is_heard_late_or_again_voids_nothing(heard):
    peer, flow = asking_pservers()
    peer.trainer.hear(*heard)
    assert next(flow) is None
    flow.close()


def test_what_an_older_master_has_handed_out_is_void_and_a_task_of_the_newer_is_not():
    peer = ready()
    peer.trainer._term = Term(1)
    flow = peer.trainer.where(ASYNC_TASK)
    next(flow)
    peer.trainer.hear_term(Term(2))
    with pytest.raises(Void):
        next(flow)
    with pytest.raises(Void):
        peer.run(peer.trainer.where(ASYNC_TASK), answer_with(Here, 0))
    task = SyncTask(Request(1), Term(2), Generation(0), Attempt(2, 1), 0, 6, 2, 0, 4)
    peer.run(
        peer.trainer.ask(WantBatch(0, DataSpec(1, "", 1)), None),
        lambda m: msgspec.structs.replace(task, request=m.request),
    )
    assert peer.run(peer.trainer.where(ASYNC_TASK), answer_with(Here, 3)) == 3


def test_a_generation_that_only_an_older_master_has_told_voids_nothing():
    peer = ready()
    peer.trainer._term = Term(1)
    peer.trainer.hear(Generation(7))
    peer.trainer.hear_term(Term(2))
    task = SyncTask(Request(1), Term(2), Generation(0), Attempt(2, 1), 0, 6, 2, 0, 4)
    peer.run(
        peer.trainer.ask(WantBatch(0, DataSpec(1, "", 1)), None),
        lambda m: msgspec.structs.replace(task, request=m.request),
    )
    assert peer.run(peer.trainer.where(ASYNC_TASK), answer_with(Here, 3)) == 3


def test_the_first_master_heard_voids_nothing():
    peer = ready()
    flow = peer.trainer.where(ASYNC_TASK)
    next(flow)
    peer.trainer.hear_term(peer.trainer._term)
    assert next(flow) is None
    flow.close()


def test_a_goodbye_names_the_task_in_which_the_script_raised():
    peer = ready()
    raised = Raised(Generation(1), Attempt(1, 1), 2, "ValueError: bad")
    peer.run(peer.trainer.leave("a traceback", raised), answer_with(Left))
    assert peer.messages(Leave)[0].raised == raised


# -- saving ------------------------------------------------------------------------------------------------------------


def test_rows_are_counted_over_all_pservers():
    peer = ready(2)
    answers = [answer_with(RowCounts, (3, 0)), answer_with(RowCounts, (4, 1))]
    assert peer.run(peer.trainer.count_rows(SAVE_TASK), answers) == [7, 1]
    assert {m.version for m in peer.messages(CountRows)} == {9}


def test_a_piece_of_a_table_comes_from_the_pserver_of_its_place():
    peer = ready(3)
    piece = answer_with(Exported, KEYS, 77)
    assert peer.run(peer.trainer.export(SAVE_TASK, 1, ExportPart.KEYS, 2, 50), piece).next_slot == 77
    assert peer.asked[0].to == "tcp://127.0.0.1:12"
    export = peer.messages(Export)[0]
    assert (export.table, export.part, export.slot, export.version) == (1, ExportPart.KEYS, 50, 9)
    assert peer.trainer.places() == 3
