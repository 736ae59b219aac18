"""Checkpoints that fail: when the next one is tried, what waits for it, and what does not."""

import msgspec
import pytest
from test_master_recovery import ASYNC, SPEC, SYNC, Job, StandIn, progress_of, trained

from evergrad.messages import (
    Ask,
    AskCheckpoint,
    BreakDone,
    CheckpointSpec,
    Commit,
    DataSpec,
    Mark,
    Member,
    Over,
    Request,
    StopJob,
    UpdateName,
    UpdateSpec,
    WantBatch,
    WantEnd,
    WantEpoch,
)

ONE_A_STEP = msgspec.structs.replace(SYNC, update=UpdateSpec(UpdateName.SYNC, 1))
LONG = DataSpec(4000, "data", 2)


class LongJob(Job):
    """A trainer in a long epoch; `step` takes one more, `seconds` later."""

    def __init__(self, **options):
        super().__init__(schema=ONE_A_STEP, **options)
        self.join("a")
        self.task = self.ask("a", WantBatch(0, LONG))
        self.task = self.ask("a", WantBatch(0, LONG), trained(self.task))

    def step(self, times=1, seconds=0.5):
        for _ in range(times):
            self.wait(seconds, "a")
            self.task = self.ask("a", WantBatch(0, LONG), trained(self.task))

    def versions(self):
        return [p.version for p in progress_of(self)]


@pytest.mark.parametrize("due", [{"every_steps": 500}, {"every_s": 3600.0}, {}])
def test_after_a_failure_the_next_one_is_tried_when_the_log_says_so(due):
    job = LongJob(spec=CheckpointSpec(SPEC.url, **due))
    job.step()
    job.shelf.is_failing = True
    if due.get("every_s"):
        job.now += 3600
        job.master.tick(job.now)
    elif not due:
        job.say("a", AskCheckpoint(job.request(), Member("a")))
    while not job.status().checkpoints.failed:
        job.step(seconds=0.25)
    job.shelf.is_failing = False
    events = [event.text for event in job.master.take_events()]
    assert any("training goes on, the next one is tried in 1 s" in text for text in events)
    failed_at = job.task.step
    job.step(4)
    assert job.versions()[0] == 0
    assert failed_at < job.versions()[1] <= failed_at + 4
    job.step(4)
    assert len(job.versions()) == 2


def test_a_cut_of_sync_may_take_as_long_as_it_takes_since_nobody_waits_for_it():
    job = LongJob()
    job.say("a", AskCheckpoint(job.request(), Member("a")))
    job.pservers[1].is_deaf = lambda message: isinstance(message, Commit | Mark)
    job.step(2, seconds=0.25)
    job.wait(20, "a")
    job.pservers[1].is_deaf = lambda message: False
    job.wait(1, "a")
    assert job.versions() == [0, 1]
    assert job.status().checkpoints.failed == 0


def failing_for_long():
    """Storage has failed at every step, and is well again since just now."""
    job = LongJob(spec=CheckpointSpec(SPEC.url, every_steps=1))
    job.shelf.is_failing = True
    job.step(200)
    assert job.status().checkpoints.failed >= 5
    job.shelf.is_failing = False
    return job


def test_a_job_that_is_stopped_saves_what_was_trained_though_storage_has_failed_before():
    job = failing_for_long()
    job.say("launcher", StopJob(Request(9), "it was stopped by a signal", 25.0))
    job.wait(3, "a")
    assert job.master.failure == "it was stopped by a signal"
    assert job.versions()[-1] == job.pservers[0].version == 200


def test_a_job_that_is_stopped_tries_to_save_as_long_as_it_may():
    job = failing_for_long()
    job.shelf.is_failing = True
    before = job.status().checkpoints.failed
    job.say("launcher", StopJob(Request(9), "it was stopped by a signal", 25.0))
    job.wait(24, "a")
    assert not job.master.is_over
    assert 15 <= job.status().checkpoints.failed - before <= 25, "once a second"
    job.wait(2, "a")
    assert job.master.is_over


def at_its_end(job):
    job.ask("a", WantEpoch(0, 1), BreakDone(0, 1, None, job.task.generation))
    job.say("a", Ask(job.request(), Member("a"), WantEnd(), None))


def test_a_job_ends_well_with_its_last_version_saved_though_storage_has_failed_before():
    job = failing_for_long()
    at_its_end(job)
    job.wait(3, "a")
    assert job.master.has_ended
    assert job.versions()[-1] == 200


def test_a_job_whose_storage_fails_to_the_end_ends_all_the_same():
    job = failing_for_long()
    job.shelf.is_failing = True
    failed = job.status().checkpoints.failed
    at_its_end(job)
    assert not job.master.is_over
    job.wait(3, "a")
    assert job.master.has_ended
    assert job.status().checkpoints.failed > failed


def test_while_the_end_waits_for_storage_the_status_says_so():
    job = LongJob()
    job.step()
    job.shelf.is_failing = True
    at_its_end(job)
    assert job.status().waiting_for == "a checkpoint, which has failed and is tried again: the disk is full"


def test_after_a_fall_back_an_epoch_waits_for_its_checkpoint_again():
    job = Job()
    job.join("a")
    job.train("a", 0)
    job.shelf.is_failing = True
    job.train("a", 1)
    job.wait(15, "a")
    job.shelf.is_failing = False
    job.start_pserver(1)
    job.wait(1, "a")
    job.join("b")
    assert isinstance(job.train("b", 1), Over)
    assert [(p.epoch, p.is_closed) for p in progress_of(job)] == [(-1, False), (0, True), (1, True)]


class Strict(StandIn):
    """Never cuts beyond what it has applied."""

    def handle(self, message):
        if isinstance(message, Mark) and any(batches > self.standing.get(t, 0) for t, batches in message.standing):
            return []
        return super().handle(message)


def test_an_async_job_stopped_with_a_batch_on_some_pservers_only_waits_as_long_as_it_may():
    job = Job(schema=ASYNC)
    job.join("a")
    task = job.batch("a")
    for p in job.pservers.values():
        p.__class__ = Strict
    job.pservers[0].standing, job.pservers[1].standing = {task.task: 2}, {task.task: 1}
    job.say("launcher", StopJob(Request(9), "it was stopped by a signal", 25.0))
    job.wait(24, "a")
    assert not job.master.is_over
    job.pservers[1].standing = {task.task: 2}
    job.wait(4, "a")
    assert progress_of(job)[-1].standing == ((task.task, 2),)
