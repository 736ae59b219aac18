"""The master under `drop_after`, `max_staleness` and with scripts that raise, driven by messages and times."""

import msgspec
import pytest

from evergrad.master.master import Master
from evergrad.master.settings import Settings
from evergrad.messages import (
    INIT_STEP,
    Ask,
    AsyncTask,
    Begin,
    BreakDone,
    CloseEpoch,
    DataSpec,
    Ended,
    EpochClosed,
    EvalTask,
    Exited,
    Generation,
    GiveUp,
    Leave,
    Left,
    MayBegin,
    Member,
    Over,
    Place,
    Raised,
    Request,
    SaveTask,
    SyncTask,
    Term,
    Unknown,
    UpdateName,
    UpdateSpec,
    WantBatch,
    WantEnd,
    WantEpoch,
    WantSaved,
    WantTotals,
)

from .test_master import ASYNC, DATA, LEASE_S, SYNC, VALID, Job, trained

DROPPING = msgspec.structs.replace(SYNC, update=UpdateSpec(UpdateName.SYNC, 2, drop_after_s=2.0))
LARGE = DataSpec(80, "data", 2)


def bounded(most):
    return msgspec.structs.replace(ASYNC, update=UpdateSpec(UpdateName.ASYNC, 4, max_staleness=most))


def raises(job, name, task, batches=0, error="ValueError: bad", generation=1, request=99):
    """The script of a trainer raises in a task, and its process is gone."""
    raised = Raised(Generation(generation), task.attempt, batches, error)
    return job.say(name, Leave(Request(request), Member(name), "raised:\nTraceback: bad", raised))


def do_one(job, name):
    """A trainer does a task and goes away from the loop."""
    task = job.batch(name)
    job.ask(name, WantEpoch(-1, 9), trained(task))
    return task


def may_begin(job, name, task, done, request=None):
    return job.say(name, MayBegin(request or job.request(), Member(name), task.attempt, done))


# -- late tasks --------------------------------------------------------------------------------------------------------


def test_time_alone_commits_a_step_without_what_is_late():
    job = Job(schema=DROPPING)
    job.begin("a", "b")
    first, late = job.batch("a"), job.batch("b")
    assert job.batch("a", trained(first)) is None
    job.wait(1.9, "a", "b")
    assert [c.step for c in job.commits()] == [INIT_STEP]
    job.wait(0.2, "a", "b")
    assert job.commits()[-1].chosen == ((0, first.attempt),)
    assert job.answers["a"].step == 1
    assert job.batch("b", trained(late)).step == 1
    assert [c.step for c in job.commits()] == [INIT_STEP, 0]


def test_what_is_dropped_is_counted_and_the_same_bits_are_withdrawn_once():
    job = Job(schema=DROPPING)
    job.begin("a", "b")
    for _ in range(2):
        task, _ = job.batch("a"), job.batch("b")
        job.batch("a", trained(task))
        job.wait(2.1, "a", "b")
    status = job.status()
    assert (status.dropped, status.samples, status.step) == (4, 4, 2)
    assert len([note for note in status.notes if "the same bits cannot be promised" in note]) == 1


def test_a_pause_of_the_master_makes_nothing_late():
    job = Job(schema=DROPPING)
    job.begin("a", "b")
    job.wait(0.1, "a", "b")
    first, other = job.batch("a"), job.batch("b")
    job.batch("a", trained(first))
    job.now += 60.0
    job.take(job.master.tick(job.now))
    assert len(job.commits()) == 1
    job.batch("b", trained(other))
    assert len(job.commits()[-1].chosen) == 2
    assert job.status().dropped == 0


def test_with_nobody_left_a_step_goes_on_without_what_is_late():
    job = Job(schema=DROPPING)
    job.begin("a", "b")
    job.batch("b")
    task = job.batch("a")
    job.batch("a", trained(task))
    job.say("launcher", Exited(Request(1), "a", 7))
    job.say("launcher", Exited(Request(1), "b", 7))
    job.wait(2.1)
    assert [c.step for c in job.commits()] == [INIT_STEP, 0]


# -- bounded staleness -------------------------------------------------------------------------------------------------


def test_a_trainer_ahead_waits_until_the_slowest_goes_on():
    job = Job(schema=bounded(1))
    job.begin("a", "b")
    fast, slow = job.batch("a", data=LARGE), job.batch("b", data=LARGE)
    assert isinstance(may_begin(job, "b", slow, 0), Begin)
    for done in range(2):
        assert isinstance(may_begin(job, "a", fast, done), Begin)
    assert may_begin(job, "a", fast, 2) is None
    assert isinstance(may_begin(job, "b", slow, 1), Begin)
    assert isinstance(job.answers["a"], Begin)


def test_a_question_said_again_is_answered_once_and_an_old_copy_does_not_replace_it():
    job = Job(schema=bounded(0))
    job.begin("a", "b")
    fast, slow = job.batch("a", data=LARGE), job.batch("b", data=LARGE)
    first = job.request()
    assert isinstance(may_begin(job, "a", fast, 0, first), Begin)
    second = job.request()
    assert may_begin(job, "a", fast, 1, second) is None
    assert may_begin(job, "a", fast, 1, second) is None
    assert may_begin(job, "a", fast, 0, first) is None
    assert isinstance(may_begin(job, "b", slow, 0), Begin)
    job.answers.clear()
    assert isinstance(may_begin(job, "b", slow, 1), Begin)
    assert job.answers["a"].request == second
    assert isinstance(may_begin(job, "a", fast, 1, second), Begin), "its answer may have been lost"


@pytest.mark.parametrize("end", ["silence", "exit", "goodbye", "another task"])
def test_nobody_waits_for_one_that_is_gone_or_has_given_up_its_task(end):
    job = Job(schema=bounded(0))
    job.begin("a", "b")
    fast, _ = job.batch("a", data=LARGE), job.batch("b", data=LARGE)
    assert isinstance(may_begin(job, "a", fast, 0), Begin)
    assert may_begin(job, "a", fast, 1) is None
    match end:
        case "silence":
            job.wait(LEASE_S + 0.1, "a")
        case "exit":
            job.say("launcher", Exited(Request(1), "b", 7))
        case "goodbye":
            job.say("b", Leave(Request(98), Member("b")))
        case _:
            job.ask("b", WantEpoch(-1, 9))
    assert isinstance(job.answers["a"], Begin)


def test_a_slow_trainer_that_gets_its_next_task_is_still_the_slowest():
    job = Job(schema=bounded(1))
    job.begin("a", "b")
    fast, slow = job.batch("a", data=LARGE), job.batch("b", data=LARGE)
    may_begin(job, "b", slow, 0)
    for done in range(2):
        may_begin(job, "a", fast, done)
    assert may_begin(job, "a", fast, 2) is None
    job.batch("b", trained(slow), data=LARGE)
    assert isinstance(job.answers["a"], Begin), "the other has done its first"
    assert may_begin(job, "a", fast, 3) is None
    assert job.status().waiting_for == ""
    assert {m.name: m.doing for m in job.status().members}["a"] == "waits for b, 2 batches behind"


def test_a_trainer_that_comes_late_holds_nobody_up():
    job = Job(schema=bounded(0))
    job.begin("a", "b")
    task = job.batch("a", data=LARGE)
    for done in range(4):
        assert isinstance(may_begin(job, "a", task, done), Begin)
    task = job.batch("a", trained(task), data=LARGE)
    other = job.batch("b", data=LARGE)
    assert isinstance(may_begin(job, "a", task, 0), Begin)
    assert isinstance(may_begin(job, "b", other, 0), Begin)
    assert may_begin(job, "b", other, 1) is None


def test_one_whose_task_counts_no_more_is_told_to_give_it_up():
    job = Job(schema=bounded(0))
    job.begin("a", "b")
    mine, other = job.batch("a", data=LARGE), job.batch("b", data=LARGE)
    assert isinstance(may_begin(job, "a", other, 0), GiveUp)
    may_begin(job, "a", mine, 0)
    assert may_begin(job, "a", mine, 1) is None
    job.ask("b", WantEpoch(0, 9), BreakDone(0, 0))
    assert isinstance(job.answers["a"], GiveUp)


def test_one_that_is_no_member_is_told_so_when_it_asks_to_go_on():
    job = Job(schema=bounded(0))
    job.begin("a")
    task = job.batch("a", data=LARGE)
    job.wait(LEASE_S + 0.1)
    assert isinstance(may_begin(job, "a", task, 0), Unknown)


def test_one_that_waits_is_told_when_the_job_is_over():
    job = Job(schema=bounded(0))
    job.begin("a", "b")
    fast, _ = job.batch("a", data=LARGE), job.batch("b", data=LARGE)
    may_begin(job, "a", fast, 0)
    assert may_begin(job, "a", fast, 1) is None
    job.master.end("that was it")
    job.wait(0.1, "a", "b")
    assert job.answers["a"].failure == "that was it"


def test_the_status_says_who_waits_for_whom():
    job = Job(schema=bounded(1))
    job.begin("fast", "slow")
    mine, other = job.batch("fast", data=LARGE), job.batch("slow", data=LARGE)
    may_begin(job, "slow", other, 0)
    for done in range(2):
        may_begin(job, "fast", mine, done)
    assert may_begin(job, "fast", mine, 2) is None
    assert {m.name: m.doing for m in job.status().members}["fast"] == "waits for slow, 2 batches behind"
    job.wait(1.5, "fast", "slow")
    assert job.status().waiting_for == "slow, 2 batches behind fast (max_staleness)"
    job.say("slow", Leave(Request(98), Member("slow")))
    assert "waits" not in {m.name: m.doing for m in job.status().members}["fast"]


# -- the end of an asynchronous epoch ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("want", "kind"), [(WantTotals(0, 0, VALID), EvalTask), (WantSaved(1, 0, "model"), SaveTask)])
def test_nothing_begins_after_an_asynchronous_epoch_until_all_pservers_know_that_it_is_over(want, kind):
    job = Job(2, schema=ASYNC)
    job.begin("a")
    job.acknowledge = False
    job.train("a")
    assert job.ask("a", want) is None
    closings = [(to, m) for to, m in job.told if isinstance(m, CloseEpoch)]
    assert [m.epoch for _, m in closings] == [0, 0]
    job.confirm(*closings[0])
    assert "a" not in job.answers
    job.confirm(*closings[1])
    assert isinstance(job.answers["a"], kind)


def test_the_next_epoch_and_the_end_wait_for_that_too():
    job = Job(schema=ASYNC)
    job.begin("a")
    job.train("a")
    job.acknowledge = False
    job.train("a", 1)
    assert job.batch("a", epoch=2) is None
    job.confirm(*job.told[-1])
    assert isinstance(job.answers["a"], AsyncTask)
    job.ask("a", WantEpoch(2, 9), BreakDone(2, 0))
    assert job.ask("a", WantEnd()) is None
    job.confirm(*job.told[-1])
    assert job.master.is_over


def test_pservers_are_told_of_an_epoch_left_early_when_nobody_is_at_a_task_any_more():
    job = Job(schema=ASYNC)
    job.begin("a", "b")
    job.batch("a")
    other = job.batch("b")
    job.ask("a", WantEpoch(0, 9), BreakDone(0, 0))
    assert not [m for _, m in job.told if isinstance(m, CloseEpoch)]
    assert isinstance(job.batch("b", trained(other)), Over)
    assert [m.epoch for _, m in job.told if isinstance(m, CloseEpoch)] == [0]


def test_what_a_pserver_says_of_an_older_generation_or_epoch_is_no_word_of_this_one():
    job = Job(schema=ASYNC)
    job.begin("a")
    job.acknowledge = False
    job.train("a")
    for generation, epoch in ((0, 0), (1, 7)):
        job.say("tcp://127.0.0.1:5000", EpochClosed(Term(1), Generation(generation), Place(0), epoch))
        assert job.ask("a", WantTotals(0, 0, VALID)) is None


# -- scripts that raise ------------------------------------------------------------------------------------------------


def test_a_task_in_which_the_script_raises_goes_to_another_and_the_job_goes_on():
    job = Job()
    job.begin("a", "b", "c")
    task, _ = job.batch("a"), job.batch("b")
    assert job.batch("c") is None
    assert isinstance(raises(job, "a", task), Left)
    assert not job.master.is_over
    again = job.answers["c"]
    assert (again.index, again.attempt == task.attempt) == (task.index, False)
    assert any(
        "in a the script raised ValueError: bad in epoch 0, step 0, task 0 (1 of 3)" in n for n in job.status().notes
    )
    assert any("Traceback: bad" in event.text for event in job.master.take_events())


def test_a_goodbye_said_again_is_no_other_failure():
    job = Job()
    job.begin("a", "b", "c")
    task = job.batch("a")
    for _ in range(5):
        assert isinstance(raises(job, "a", task), Left)
    assert len([n for n in job.status().notes if "raised" in n]) == 1
    assert job.status().set_aside == ()


def test_a_task_is_set_aside_after_three_failures_and_the_step_goes_on_without_it():
    job = Job()
    job.begin("good", "a", "b", "c")
    good = do_one(job, "good")
    for name in "abc":
        task = job.batch(name)
        assert isinstance(task, SyncTask)
        assert task.index == 1
        raises(job, name, task)
    assert job.commits()[-1].chosen == ((0, good.attempt),)
    status = job.status()
    assert [(s.task, s.samples, s.error) for s in status.set_aside] == [
        ("epoch 0, step 0, task 1", 2, "ValueError: bad")
    ]
    assert not status.ended
    assert job.batch("good").step == 1


def test_a_lost_lease_is_no_failure():
    job = Job()
    job.begin("good")
    for number in range(9):
        job.join(f"t{number}")
        job.batch(f"t{number}")
        job.say("launcher", Exited(Request(1), f"t{number}", 7))
    assert job.status().set_aside == ()
    assert isinstance(job.batch("good"), SyncTask)


def test_a_failure_reported_by_one_declared_dead_counts():
    job = Job()
    job.begin("a", "b")
    task = job.batch("a")
    job.wait(LEASE_S + 0.1, "b")
    raises(job, "a", task)
    assert any("(1 of 3)" in note for note in job.status().notes)


def test_a_job_some_of_whose_tasks_were_set_aside_fails_when_it_has_come_to_its_end():
    job = Job()
    job.begin("good", "a", "b", "c")
    do_one(job, "good")
    for name in "abc":
        raises(job, name, job.batch(name))
    task = job.batch("good")
    while isinstance(task, SyncTask):
        task = job.batch("good", trained(task))
    assert isinstance(job.ask("good", WantSaved(1, 0, "model")), SaveTask), "the script goes on to its end"
    ended = job.ask("good", WantEnd())
    assert isinstance(ended, Ended)
    assert "raised in 1 task until they were set aside, and 2 samples were left out" in ended.failure
    assert job.status().samples == 6


def test_a_script_that_raises_in_every_task_ends_the_job_with_its_traceback():
    job = Job()
    job.begin("a", "b")
    one, other = job.batch("a"), job.batch("b")
    raises(job, "a", one)
    assert not job.master.is_over
    raises(job, "b", other)
    assert job.master.failure.startswith(
        "the script has raised in two tasks, and none was ever done; the last time, in b"
    )
    assert "Traceback: bad" in job.master.failure


@pytest.mark.parametrize("most", [1, 2])
def test_how_many_failures_are_too_many_is_an_option_of_the_master(most):
    job = Job(0)
    job.master = Master(Settings("job", 1, LEASE_S, max_failures=most))
    job.join_pserver(0)
    job.begin("good", *"abc")
    do_one(job, "good")
    for name in "abc"[:most]:
        assert job.status().set_aside == ()
        raises(job, name, job.batch(name))
    assert len(job.status().set_aside) == 1


def test_a_script_that_raises_outside_its_tasks_ends_the_job_at_once():
    job = Job()
    job.begin("a", "b")
    job.batch("b")
    job.say("a", Leave(Request(99), Member("a"), "raised:\nTraceback: KeyError"))
    assert job.master.failure == "in a the script raised:\nTraceback: KeyError"


def test_failures_of_another_generation_or_of_tasks_done_by_others_count_for_nothing():
    job = Job()
    job.begin("a", "b", "c")
    task, other = job.batch("a"), job.batch("b")
    raises(job, "a", task, generation=0)
    again = job.batch("c")
    job.batch("c", trained(again))
    job.batch("b", trained(other))
    raises(job, "b", other)
    assert not [n for n in job.status().notes if "raised" in n]


def test_of_an_asynchronous_task_the_batches_applied_are_not_left_out():
    job = Job(schema=ASYNC)
    job.begin("good", "a", "b", "c")
    do_one(job, "good")
    for name, batches in zip("abc", (0, 0, 1), strict=True):
        raises(job, name, job.batch(name), batches)
    assert [(s.task, s.samples) for s in job.status().set_aside] == [("epoch 0, task 1", 2)]
    assert isinstance(job.ask("good", WantTotals(0, 0, VALID)), EvalTask), "that was the last task of the epoch"


def test_a_break_with_a_task_done_commits_its_step_before_the_epoch_ends():
    job = Job()
    job.begin("a", "b")
    first, last = job.batch("a"), job.batch("b")
    job.batch("a", trained(first))
    job.say("b", Ask(job.request(), Member("b"), WantBatch(1, DATA), BreakDone(0, 0, trained(last))))
    assert [c.step for c in job.commits()] == [INIT_STEP, 0]
    assert job.status().version == 1
