"""What the next master and the next generation must know, and what they must not: cases that the simulation found."""

import msgspec
from test_master_recovery import ASYNC, DATA, SYNC, Job, StandIn, progress_of, trained

from evergrad.master.errands import Look, RecordPut
from evergrad.master.failures import Failures
from evergrad.master.master import Master
from evergrad.master.record import decode, encode
from evergrad.master.training import Failed
from evergrad.messages import (
    INIT_STEP,
    Ask,
    BreakDone,
    CloseEpoch,
    EvalTask,
    Heartbeat,
    Hello,
    Joined,
    Leave,
    Member,
    Over,
    Place,
    Progress,
    Raised,
    Request,
    Restore,
    SetAside,
    StartAgain,
    SyncTask,
    Term,
    UpdateName,
    UpdateSpec,
    WantBatch,
    WantEpoch,
    WantTotals,
)

DROPPING = msgspec.structs.replace(SYNC, update=UpdateSpec(UpdateName.SYNC, 2, drop_after_s=2.0))


def write_record(job):
    """The store is there again."""
    job.shelf.is_stuck = False
    for errand in job.unwritten:
        job.shelf.record = encode(errand.record)
        job.take(job.master.done(RecordPut(errand.number), job.now))
    job.unwritten = []


def test_a_master_that_dies_while_it_looks_is_followed_by_one_that_looks_again():
    job = Job()
    looked, job.look = [], lambda errand: looked.append(errand)
    done, job.master.done = job.master.done, lambda result, now: [] if result is None else done(result, now)
    job.join("a")
    assert isinstance(looked[0], Look)
    del job.look
    job.start_master()
    job.start_pserver(0)
    job.start_pserver(1)
    job.join("b")
    assert isinstance(job.batch("b"), SyncTask)


def test_a_pserver_that_its_generation_has_not_reached_yet_is_known_by_its_incarnation():
    job = Job()
    job.pservers[1].is_deaf = lambda message: isinstance(message, Restore)
    job.join("a")
    place, job.pservers[1].place = job.pservers[1].place, Place(0)  # as one that nobody has told
    job.start_master()
    job.pservers[1].is_deaf, job.pservers[1].place = lambda message: isinstance(message, Hello), place
    job.wait(2)
    assert job.master._recovery.generations.number == 2


def test_a_pserver_that_takes_the_place_of_one_that_died_with_the_master_is_not_refused_before_that_was_ever_heard_of():
    job = Job()
    job.join("a")
    job.train("a")
    job.pservers[1].is_alive = False
    record = decode(job.shelf.record)
    job.master = Master(job.settings, Term(record.term + 1), record)  # which has not turned once
    new = job.pservers[1] = StandIn(1, 9, job.shelf)
    for _ in range(3):
        job.join_pserver(new)
    assert job.master.counters["refused joins"] == 0
    job.wait(0.5)
    job.now += 2.0
    job.join_pserver(new)
    assert isinstance(job.answers[new.address], Joined)


def test_an_asynchronous_epoch_that_one_pserver_knows_to_be_over_is_over_for_the_next_master():
    job = Job(schema=ASYNC)
    job.join("a")
    assert isinstance(job.train("a"), Over)
    told = []
    for p in job.pservers.values():
        p.epoch, p.standing = 1, {}
    job.pservers[1].is_deaf = lambda message: told.append(message)
    job.start_master()
    job.wait(1)
    job.pservers[1].is_deaf = lambda message: isinstance(message, CloseEpoch) and told.append(message)
    job.wait(2)
    job.join("b")
    assert isinstance(job.ask("b", WantTotals(0, 0, DATA)), EvalTask)
    assert [m.epoch for m in told if isinstance(m, CloseEpoch)] == [0]


def test_a_master_that_begins_with_a_fall_back_starts_scripts_again_that_are_further():
    job = Job()
    job.shelf.is_failing = True
    job.join("a")
    job.train("a")
    job.wait(12, "a")
    assert isinstance(job.train("a"), Over)
    job.pservers[0].is_alive = False
    job.start_master()
    job.start_pserver(0)
    job.wait(3)
    assert job.pservers[0].version == INIT_STEP
    assert job.master._recovery.script.passed == -1


def behind(job):
    """The job has fallen back to before the epoch that scripts are past."""
    job.join("a")
    job.batch("a")
    job.shelf.is_failing = True
    job.train("a")
    job.wait(10, "a")
    assert isinstance(job.answers["a"], Over)


def test_an_evaluation_that_is_open_when_the_job_falls_back_behind_it_begins_anew():
    job = Job()
    behind(job)
    assert isinstance(job.ask("a", WantTotals(0, 0, DATA)), EvalTask)
    job.shelf.is_failing = False
    job.start_pserver(1)
    job.wait(3, "a")
    assert isinstance(job.ask("a", WantTotals(0, 0, DATA)), StartAgain)
    job.join("b")
    assert isinstance(job.batch("b"), SyncTask)


def test_scripts_that_are_started_again_have_not_left_the_loops_they_had_left():
    job = Job()
    behind(job)
    job.say("a", Heartbeat(Request(0), Member("a"), 0.0))
    assert job.ask("a", WantEpoch(0, 5), BreakDone(0, 5)).epoch is None
    job.start_pserver(1)
    job.wait(3, "a")
    job.join("b")
    assert job.ask("b", WantEpoch(-1, 5)).epoch == 0


def test_nothing_is_pruned_before_the_record_knows_what_is_newer():
    job = Job(spec=msgspec.structs.replace(Job().spec, keep=1))
    job.join("a")
    task = job.batch("a")
    job.shelf.is_stuck = True
    while isinstance(task, SyncTask):
        task = job.batch("a", trained(task))
    job.wait(2, "a")
    assert sorted(job.shelf.complete) == [0, 1]
    assert job.shelf.pruned == []
    write_record(job)
    job.wait(1, "a")
    write_record(job)
    assert job.shelf.pruned == [0]


def test_a_commit_that_does_without_samples_is_told_when_the_record_says_so():
    job = Job(schema=DROPPING)
    job.join("a", "b")
    tasks = job.batch("a"), job.batch("b")
    job.shelf.is_stuck = True
    job.batch("a", trained(tasks[0]))
    job.wait(3, "a", "b")
    assert job.status().dropped == 2
    assert [p.version for p in job.pservers.values()] == [0, 0]
    assert job.status().waiting_for == "the record to be written"
    write_record(job)
    assert [p.version for p in job.pservers.values()] == [1, 1]
    job.start_master()
    assert job.status().dropped == 2


def test_samples_that_a_step_did_without_count_as_missing_no_more_when_the_step_is_undone():
    job = Job(schema=DROPPING)
    job.join("a", "b")
    tasks = job.batch("a"), job.batch("b")
    job.batch("a", trained(tasks[0]))
    job.wait(3, "a", "b")
    assert job.status().dropped == 2
    job.start_pserver(1)
    job.wait(3, "a", "b")
    assert job.status().dropped == 0


def test_a_task_set_aside_goes_into_checkpoints_and_is_set_aside_once_however_often_it_is_tried_again():
    job = Job()
    job.join("a")
    task = job.batch("a", trained(job.batch("a")))
    for number in range(3):
        raised = Raised(task.generation, task.attempt, 0, "ValueError: bad")
        name = "a" if number == 0 else f"a{number}"
        job.say(name, Leave(job.request(), Member(name), "raised", raised))
        job.join(f"a{number + 1}")
        task = job.batch(f"a{number + 1}")
    assert isinstance(job.train("a3"), Over)
    (aside,) = job.status().set_aside
    assert progress_of(job)[-1].set_aside == (aside,)
    assert progress_of(job)[0] == Progress()


def test_one_task_that_is_set_aside_twice_is_one():
    failures = Failures(1)
    failures.done()
    for samples in (4, 4, 4, 3):
        assert failures.note(Failed(2, "epoch 0, task 2", 1, samples), "E") is None
    assert failures.set_aside == [SetAside("epoch 0, task 2", 3, "E")]


def test_a_job_that_waits_for_storage_says_so():
    job = Job()
    job.join("a")
    job.batch("a")
    job.shelf.is_failing = True
    task = job.batch("a")
    for _ in range(3):
        task = job.batch("a", trained(task))
    job.say("a", Ask(job.request(), Member("a"), WantBatch(0, DATA), trained(task)))
    job.wait(0.5, "a")
    assert job.status().waiting_for == "a checkpoint, which has failed and is tried again: the disk is full"
