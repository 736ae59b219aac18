"""The master through failures: checkpoints, generations, terms, the record. Pservers and storage are stand-ins."""

import msgspec
import pytest

from evergrad import init_rows
from evergrad.checkpoint.manifest import Metrics
from evergrad.master.checkpoints import Durable
from evergrad.master.errands import (
    Held,
    Hold,
    Look,
    ManifestPut,
    MetricsPut,
    Prune,
    Pruned,
    PutManifest,
    PutMetrics,
    PutRecord,
    RecordPut,
)
from evergrad.master.master import Master
from evergrad.master.record import Found, decode, encode
from evergrad.master.settings import Settings
from evergrad.messages import (
    INIT_STEP,
    Abandon,
    Abandoned,
    Address,
    Agree,
    Agreed,
    Ask,
    AskCheckpoint,
    AskStatus,
    AsyncTask,
    BreakDone,
    CheckpointSpec,
    CloseEpoch,
    Commit,
    Committed,
    DataSpec,
    Ended,
    EpochClosed,
    EvalDone,
    EvalTask,
    Exited,
    Freeze,
    Frozen,
    Heartbeat,
    Hello,
    HelloReply,
    Join,
    Joined,
    Mark,
    Marked,
    Member,
    Noted,
    Obstacle,
    Over,
    Place,
    Progress,
    ReportMetrics,
    Request,
    Restore,
    Restored,
    Role,
    SaveDone,
    Schema,
    Source,
    StartAgain,
    StopJob,
    SyncTask,
    TableSpec,
    Term,
    TotalsAre,
    TrainDone,
    Unknown,
    UpdateName,
    UpdateSpec,
    WantBatch,
    WantEnd,
    WantEpoch,
    WantSaved,
    WantTotals,
    Written,
    WrittenNoted,
)
from evergrad.metrics import partial
from evergrad.optim import SGD

LEASE_S = 5.0
DATA = DataSpec(8, "data", 2)
SYNC = Schema(0, UpdateSpec(UpdateName.SYNC, 2), (TableSpec("user", 2, SGD().spec(), init_rows.zeros()),), ())
ASYNC = msgspec.structs.replace(SYNC, update=UpdateSpec(UpdateName.ASYNC, 2))
SPEC = CheckpointSpec("memory://c", keep=2)


class Shelf:
    """What storage holds, whoever leads."""

    def __init__(self):
        self.complete, self.record, self.pruned, self.is_failing = {}, None, [], False
        self.metrics, self.reported, self.holder, self.is_stuck = {}, {}, None, False


class StandIn:
    """A pserver without a model."""

    def __init__(self, place, incarnation, shelf):
        self.place, self.member = Place(place), Member(f"p{place}.{incarnation}")
        self.address = Address(f"tcp://127.0.0.1:{5000 + 10 * incarnation + place}")
        self.shelf, self.generation, self.version, self.last = shelf, 0, INIT_STEP, None
        self.epoch, self.standing, self.cuts, self.frozen = 0, {}, {}, None
        self.pid = incarnation
        self.is_alive, self.is_deaf = True, lambda message: False
        self.updates = 1

    def handle(self, message):
        if not self.is_alive or self.is_deaf(message):
            return []
        here = (self.generation, self.place)
        match message:
            case Restore():
                if message.generation > self.generation:
                    self.generation, self.version, self.last = message.generation, INIT_STEP, None
                    self.standing, self.cuts, self.frozen = {}, {}, None
                    if message.source is not None:
                        progress = self.shelf.complete[message.source.serial].progress
                        self.version, self.epoch = progress.version, progress.epoch
                        self.standing = dict(progress.standing)
                return [Restored(message.term, self.generation, self.place, self.member, self.version, (3,), 100, 0.1)]
            case Commit() if message.generation == self.generation:
                if message.step == self.version:
                    self.version, self.last = self.version + 1, message
                    if message.serial is not None:
                        self.cuts.setdefault(message.serial, "marked")
                return [Committed(message.term, *here, message.step)] if message.step < self.version else []
            case CloseEpoch():
                return [EpochClosed(message.term, *here, message.epoch)]
            case Freeze():
                self.frozen = message.serial
                return [Frozen(message.term, *here, message.serial, self.epoch, tuple(self.standing.items()))]
            case Mark():
                if self.cuts.get(message.serial) == "abandoned":
                    return [Abandoned(message.term, *here, message.serial)]
                self.standing.update(dict(message.standing))
                self.cuts[message.serial], self.frozen = "marked", None
                written = Written(self.generation, self.place, message.serial, (), {"user": self.updates})
                return [Marked(message.term, *here, message.serial), written]
            case Abandon():
                self.cuts[message.serial], self.frozen = "abandoned", None
                return [Abandoned(message.term, *here, message.serial)]
            case Hello():
                standing = tuple(self.standing.items())
                return [HelloReply(message.term, *here[:1], self.member, self.place, self.version, self.last,
                                   self.epoch, standing)]  # fmt: skip
        return []


class Job:
    """Masters one after the other, stand-ins for pservers, and the answers that trainers got."""

    def __init__(self, pservers=2, schema=SYNC, spec=SPEC, resume="auto", shelf=None):
        self.shelf = shelf or Shelf()
        self.settings = Settings("job", pservers, LEASE_S, resume=resume, keeps_record=True)
        self.schema, self.spec, self.now, self.warm_start = schema, spec, 0.0, None
        self.answers, self.pservers, self.noted, self.unwritten = {}, {}, [], []
        self._requests, self._incarnations = 0, 0
        self.master = Master(self.settings)
        for place in range(pservers):
            self.start_pserver(place)

    def start_pserver(self, place):
        if place in self.pservers:
            self.pservers[place].is_alive = False
            self.say("launcher", Exited(Request(9), f"p{place}", self.pservers[place].pid))
        self._incarnations += 1
        new = self.pservers[place] = StandIn(place, self._incarnations, self.shelf)
        self.join_pserver(new)

    def join_pserver(self, new):
        name, at = f"p{new.place}", (new.place, new.address)
        self.say(new.address, Join(Request(1), Role.PSERVER, new.member, name, new.pid, "", *at))

    def start_master(self):
        record = decode(self.shelf.record)
        self.master = Master(self.settings, Term(record.term + 1), record)
        self.wait(0.1)

    def say(self, src, message):
        self.answers.pop(src, None)
        self.take(self.master.handle(src, message, self.now))
        return self.answers.get(src)

    def take(self, sends):
        for send in sends:
            if "://" not in send.to or isinstance(send.message, Joined):
                self.answers[send.to] = send.message
            elif isinstance(send.message, WrittenNoted):
                self.noted.append(send.message.serial)
            else:
                for p in self.pservers.values():
                    if p.address == send.to:
                        for answer in p.handle(send.message):
                            self.take(self.master.handle(p.address, answer, self.now))
        self.run_errands()

    def run_errands(self):
        for errand in self.master.take_errands():
            match errand:
                case PutRecord() if self.shelf.is_stuck:
                    self.unwritten.append(errand)
                    continue
                case PutRecord():
                    self.shelf.record = encode(errand.record)
                    result = RecordPut(errand.number)
                case Hold():
                    is_other = self.shelf.holder not in (None, errand.job)
                    result = Held(f"{self.shelf.holder} makes its checkpoints there", True) if is_other else Held()
                case PutMetrics():
                    self.shelf.metrics[errand.serial] = errand.metrics
                    result = MetricsPut(errand.serial, None)
                case Look():
                    result = self.look(errand)
                case PutManifest():
                    if self.shelf.is_failing:
                        result = ManifestPut(errand.complete.serial, "the disk is full")
                    else:
                        self.shelf.complete[errand.complete.serial] = errand.complete
                        self.shelf.reported = errand.reported
                        result = ManifestPut(errand.complete.serial)
                case Prune():
                    self.shelf.pruned += errand.remove
                    result = Pruned()
            self.take(self.master.done(result, self.now))

    def look(self, errand):
        found = [(s, c.progress) for s, c in sorted(self.shelf.complete.items())]
        serial = max(self.shelf.complete, default=-1)
        if errand.resume == "never" or not found:
            return Found(next_serial=serial + 1)
        durable = tuple(Durable(s, p, self.best_of(s)) for s, p in found)
        evaluations, savings = self.shelf.complete[serial].calls
        return Found(
            durable, serial + 1, Source(SPEC.url, serial), self.schema, found[-1][1],
            evaluations, savings, self.shelf.reported,
        )  # fmt: skip

    def best_of(self, serial):
        return self.shelf.metrics[serial].best if serial in self.shelf.metrics else None

    def wait(self, seconds, *alive):
        for _ in range(max(1, round(seconds / 0.25))):
            self.now += min(seconds, 0.25)
            for p in self.pservers.values():
                if p.is_alive:
                    self.say("beat", Heartbeat(Request(0), p.member, 0.0))
            for member in alive:
                self.say("beat", Heartbeat(Request(0), Member(member), 0.0))
            self.take(self.master.tick(self.now))

    def request(self):
        self._requests += 1
        return Request(self._requests)

    def join(self, *names):
        for name in names:
            self.say(name, Join(self.request(), Role.TRAINER, Member(name), name, 7))
            self.agree(name)

    def agree(self, name):
        return self.say(name, Agree(self.request(), Member(name), self.schema, "", self.spec, self.warm_start))

    def ask(self, name, want, done=None):
        """Ask and wait a little, as trainers do."""
        self.say(name, Ask(self.request(), Member(name), want, done))
        for _ in range(12):
            if name in self.answers:
                break
            self.wait(0.25, name)
        return self.answers.get(name)

    def batch(self, name, done=None, epoch=0):
        answer = self.ask(name, WantBatch(epoch, DATA), done)
        if not isinstance(answer, SyncTask | AsyncTask | Over | StartAgain | Unknown | None) and answer is not None:
            answer = self.ask(name, WantBatch(epoch, DATA), trained(answer))  # the initial values
        return answer

    def train(self, name, epoch=0, tasks=99):
        task, done = self.batch(name, epoch=epoch), 0
        while isinstance(task, SyncTask | AsyncTask) and done < tasks:
            for p in self.pservers.values():
                if isinstance(task, AsyncTask):
                    p.epoch = task.epoch
                    p.standing[task.task] = -(-(task.stop - task.start) // DATA.batch_size)
            task, done = self.batch(name, trained(task), epoch), done + 1
        return task

    def status(self):
        return self.say("launcher", AskStatus(Request(1)))


def trained(task, contributed=True):
    return TrainDone(task.generation, task.attempt, contributed, {})


def progress_of(job):
    return [c.progress for _, c in sorted(job.shelf.complete.items())]


# -- when checkpoints are made -----------------------------------------------------------------------------------------


def test_version_0_is_a_checkpoint_before_the_first_task_is_handed_out():
    job = Job()
    job.pservers[1].is_deaf = lambda message: isinstance(message, Mark)
    job.join("a")
    assert job.batch("a") is None
    job.pservers[1].is_deaf = lambda message: False
    job.wait(3, "a")
    assert isinstance(job.answers["a"], SyncTask)
    assert progress_of(job) == [Progress()]


def test_an_epoch_ends_for_the_scripts_when_a_checkpoint_of_its_last_version_is_there():
    job = Job()
    job.join("a")
    assert isinstance(job.train("a"), Over)
    last = Progress(version=2, epoch=0, data=DATA, is_closed=True)
    assert progress_of(job) == [Progress(), last]


def test_an_epoch_of_async_ends_with_a_checkpoint_too():
    job = Job(schema=ASYNC)
    job.join("a")
    assert isinstance(job.train("a"), Over)
    assert [(p.epoch, p.is_closed) for p in progress_of(job)] == [(-1, False), (0, True)]


def test_a_checkpoint_asked_for_rides_in_the_next_commit():
    job = Job()
    job.join("a")
    task = job.batch("a")
    job.say("a", AskCheckpoint(job.request(), Member("a")))
    task = job.batch("a", trained(task))
    job.batch("a", trained(task))
    job.wait(1, "a")
    assert progress_of(job)[1] == Progress(version=1, epoch=0, data=DATA)


def test_a_checkpoint_of_async_is_cut_where_the_foremost_pserver_is():
    job = Job(schema=ASYNC)
    job.join("a")
    task = job.batch("a")
    job.pservers[0].standing, job.pservers[1].standing = {0: 1, 1: 1}, {0: 2}
    job.say("a", AskCheckpoint(job.request(), Member("a")))
    job.wait(1, "a")
    assert isinstance(task, AsyncTask)
    assert progress_of(job)[1].standing == ((0, 2), (1, 1))
    assert not progress_of(job)[1].is_closed


def test_steps_between_checkpoints_are_counted():
    job = Job(spec=CheckpointSpec("memory://c", every_steps=2, keep=9), schema=msgspec.structs.replace(
        SYNC, update=UpdateSpec(UpdateName.SYNC, 1)))  # fmt: skip
    job.join("a")
    job.train("a")
    assert [p.version for p in progress_of(job)] == [0, 2, 4]


def test_only_so_many_are_kept_besides_what_was_restored():
    job = Job()
    job.join("a")
    for epoch in range(4):
        job.train("a", epoch)
    assert sorted(job.shelf.complete) == [0, 1, 2, 3, 4]
    assert sorted(job.shelf.pruned) == [0, 1, 2]


class LateNews(Job):
    """Storage has what is put at once; while `is_late` the master hears of it only by `hear`."""

    def __init__(self, **options):
        self.is_late, self.late = False, []
        super().__init__(**options)

    def run_errands(self):
        errands = self.master._recovery._errands
        for errand in [e for e in errands if isinstance(e, PutManifest) and self.is_late]:
            errands.remove(errand)
            self.late.append(errand)
            self.shelf.complete[errand.complete.serial] = errand.complete
        super().run_errands()

    def hear(self):
        self.is_late = False
        for errand in self.late:
            self.take(self.master.done(ManifestPut(errand.complete.serial), self.now))


@pytest.mark.parametrize("dies", ["pserver", "master"])
def test_a_checkpoint_that_is_complete_only_after_its_generation_is_removed_with_the_next_one(dies):
    job = LateNews(spec=msgspec.structs.replace(SPEC, keep=1))
    job.join("a")
    job.train("a")
    job.is_late = True
    job.train("a", 1)
    (stray,) = (errand.complete.serial for errand in job.late)
    if dies == "pserver":
        job.start_pserver(1)
        job.wait(0.5, "a")
        job.hear()
        assert stray not in job.shelf.pruned
    else:
        job.is_late = False
        job.start_master()
        job.join("a")
    job.train("a", 1)
    assert stray in job.shelf.pruned
    assert [d.serial for d in job.master._recovery.checkpoints.durable] == [max(job.shelf.complete)]


def test_a_pserver_that_takes_no_cut_has_it_given_up_and_the_next_serial_tried():
    job = Job(schema=ASYNC)
    job.join("a")
    job.batch("a")
    job.pservers[1].is_deaf = lambda message: isinstance(message, Mark)
    job.say("a", AskCheckpoint(job.request(), Member("a")))
    job.wait(3, "a")
    assert job.pservers[0].frozen is None
    job.pservers[1].is_deaf = lambda message: False
    job.wait(3, "a")
    assert job.pservers[0].cuts == {0: "marked", 1: "abandoned", 2: "marked"}
    assert [p.epoch for p in progress_of(job)] == [-1, 0]


def test_storage_that_fails_again_and_again_does_not_hold_an_epoch_for_ever():
    job = Job()
    job.join("a")
    job.batch("a")
    job.shelf.is_failing = True
    job.train("a")
    job.wait(10, "a")
    assert isinstance(job.answers["a"], Over)
    checkpoints = job.status().checkpoints
    assert (checkpoints.made, checkpoints.newest, checkpoints.failure) == (1, 0, "the disk is full")
    assert checkpoints.failed >= 3
    assert any("the disk is full" in event.text and event.is_trouble for event in job.master.take_events())


# -- falling back ------------------------------------------------------------------------------------------------------


def test_a_lost_pserver_makes_the_job_fall_back_to_the_newest_checkpoint():
    job = Job()
    job.join("a")
    job.train("a")
    task = job.batch("a", epoch=1)
    job.batch("a", trained(task), epoch=1)
    job.start_pserver(1)
    job.wait(3, "a")
    fresh = job.batch("a", epoch=1)
    assert isinstance(fresh, SyncTask)
    assert (fresh.generation, fresh.epoch, fresh.step) == (2, 1, 2)
    assert {p.version for p in job.pservers.values()} == {2}
    assert any("generation 2 begins with checkpoint 1" in note for note in job.status().notes)


def beat(job, name):
    return job.say(f"beat of {name}", Heartbeat(Request(0), Member(name), 0.0))


def test_while_a_pserver_is_missing_nothing_is_handed_out_and_everybody_is_told():
    job = Job()
    job.join("a", "b")
    job.batch("a")
    assert beat(job, "a").is_whole
    lost = job.pservers[1]
    lost.is_alive = False
    job.say("launcher", Exited(Request(9), "p1", lost.pid))
    assert not beat(job, "a").is_whole
    assert job.say("b", Ask(job.request(), Member("b"), WantBatch(0, DATA), None)) is None
    status = job.status()
    assert (status.phase, status.generation, status.waiting_for) == ("restoring", 1, "pserver 1 of 2 to join")
    job.start_pserver(1)
    job.wait(1, "a", "b")
    assert job.answers["b"].generation == 2
    assert beat(job, "a").is_whole


def test_a_recovery_is_noted_with_its_phases_when_the_next_step_is_applied_everywhere():
    job = Job()
    job.join("a")
    job.batch("a")
    lost = job.pservers[0]
    lost.is_alive = False
    job.say("launcher", Exited(Request(9), "p0", lost.pid))
    job.wait(1.5, "a")
    job.start_pserver(0)
    job.now += 0.25
    job.train("a")
    notes = [note for note in job.status().notes if "recovered" in note]
    wanted = (
        "the job has recovered 1.75 s after p0 was lost: 1.50 s until all pservers were there, 0.00 s to load,"
        " 0.25 s to the first step"
    )
    assert notes == [wanted]


def test_a_master_notes_how_long_it_took_to_follow_the_one_before():
    job = Job()
    job.join("a")
    job.batch("a")
    job.start_master()
    job.join("b")
    job.train("b")
    assert [note for note in job.status().notes if "s after this master began: " in note]
    assert job.status().term == 2


def test_what_was_done_in_an_older_generation_is_void():
    job = Job()
    job.join("a", "b")
    old = job.batch("a"), job.batch("b")
    job.start_pserver(0)
    job.wait(3, "a", "b")
    job.batch("a", trained(old[0]))
    job.batch("b", trained(old[1]))
    assert all(p.version == 0 for p in job.pservers.values())


def test_before_version_0_is_durable_the_job_begins_with_nothing_again():
    job = Job()
    job.pservers[1].is_deaf = lambda message: isinstance(message, Mark)
    job.join("a")
    job.batch("a")
    job.start_pserver(0)
    job.pservers[1].is_deaf = lambda message: False
    job.wait(3, "a")
    assert job.pservers[0].version == INIT_STEP
    assert isinstance(job.batch("a"), SyncTask)


def test_without_checkpoints_a_lost_pserver_ends_the_job_with_what_to_do():
    job = Job(spec=None)
    job.join("a")
    job.batch("a")
    job.pservers[1].is_alive = False
    job.wait(70, "a")
    assert "start the job with --checkpoints" in job.master.failure


def test_a_process_at_a_place_that_is_taken_gets_it_when_the_other_is_silent():
    job = Job()
    job.join("a")
    job.batch("a")
    job.pservers[1].is_alive = False
    other = job.pservers[1] = StandIn(1, 9, job.shelf)
    for _ in range(4):
        job.join_pserver(other)
        job.wait(1, "a")
    assert other.version == 0


def test_a_checkpoint_that_cannot_be_restored_is_given_up_for_the_one_before():
    job = Job()
    job.join("a")
    job.train("a")
    refuse_to_restore(job, "a file is torn", Obstacle.DAMAGED)
    job.start_pserver(0)
    job.wait(3, "a")
    assert any("a file is torn" in note for note in job.status().notes)
    assert job.master.failure is None
    assert {p.version for p in job.pservers.values()} == {0}
    assert isinstance(job.batch("a", epoch=1), StartAgain)


def refuse_to_restore(job, failure, obstacle, serial=1):
    """Pserver 1 cannot restore a checkpoint, and says why, until it is made to."""
    p = job.pservers[1]

    def handle(message):
        if isinstance(message, Restore) and message.source == Source(SPEC.url, serial):
            what = (Place(1), p.member, -1)
            return [Restored(message.term, message.generation, *what, failure=failure, obstacle=obstacle)]
        return StandIn.handle(p, message)

    p.handle = handle


def test_storage_that_is_away_during_a_restore_costs_no_checkpoint():
    job = Job(spec=CheckpointSpec(SPEC.url, keep=3))
    job.join("a")
    for epoch in range(3):
        job.train("a", epoch)
    assert [d.serial for d in job.master._recovery.checkpoints.durable] == [1, 2, 3]
    refuse_to_restore(job, "cannot read memory://c: connection refused", Obstacle.AWAY, serial=3)
    job.start_pserver(0)
    job.wait(60, "a")
    assert job.master.failure is None
    assert [d.serial for d in job.master._recovery.checkpoints.durable] == [1, 2, 3]
    assert job.status().waiting_for == "the storage of checkpoints, which cannot be read"
    said = [note for note in job.status().notes if "connection refused: it is tried again in 5 s" in note]
    assert 10 <= len(said) <= 13, "once a try"
    del job.pservers[1].handle
    job.wait(6, "a")
    assert {p.version for p in job.pservers.values()} == {6}
    assert isinstance(job.batch("a", epoch=3), SyncTask)


def test_a_pserver_that_lacks_memory_for_a_checkpoint_ends_the_job_with_what_to_do():
    job = Job()
    job.join("a")
    job.train("a")
    refuse_to_restore(job, "start the job with more --pservers", Obstacle.HERE)
    job.start_pserver(0)
    job.wait(1, "a")
    assert "start the job with more --pservers" in job.master.failure


# -- another master ----------------------------------------------------------------------------------------------------


def test_a_master_is_followed_by_one_that_goes_on_without_falling_back():
    job = Job()
    job.join("a")
    job.train("a")
    task = job.batch("a", epoch=1)
    job.start_master()
    assert isinstance(job.batch("a", trained(task), epoch=1), Unknown)
    job.join("b")
    fresh = job.batch("b", epoch=1)
    assert (fresh.term, fresh.generation, fresh.epoch, fresh.step, fresh.index) == (2, 1, 1, 2, 0)


def test_a_commit_that_has_reached_only_some_is_finished_by_the_next_master():
    job = Job()
    job.join("a", "b")
    tasks = job.batch("a"), job.batch("b")
    job.pservers[1].is_deaf = lambda message: isinstance(message, Commit)
    job.batch("a", trained(tasks[0]))
    job.batch("b", trained(tasks[1]))
    assert [p.version for p in job.pservers.values()] == [1, 0]
    job.pservers[1].is_deaf = lambda message: False
    job.start_master()
    job.wait(1)
    assert [p.version for p in job.pservers.values()] == [1, 1]
    assert job.pservers[1].last.chosen == job.pservers[0].last.chosen
    assert job.pservers[1].last.term == 2
    job.join("c")
    assert job.batch("c").step == 1


def test_the_next_master_knows_what_was_evaluated_and_where_the_script_is():
    job = Job()
    job.join("a")
    job.train("a")
    task = job.ask("a", WantTotals(0, 0, DATA))
    while isinstance(task, EvalTask):
        task = job.ask("a", WantTotals(0, 0, DATA), EvalDone(task.generation, task.attempt, {"n": partial(2.0)}))
    assert isinstance(task, TotalsAre)
    job.start_master()
    job.join("b")
    assert job.ask("b", WantEpoch(-1, 3)).epoch == 0
    assert isinstance(job.batch("b"), Over)
    assert job.ask("b", WantTotals(0, 0, DATA)).totals == task.totals


def test_an_async_epoch_goes_on_where_all_pservers_are():
    job = Job(schema=ASYNC)
    job.join("a")
    task = job.batch("a")
    job.pservers[0].standing, job.pservers[1].standing = {0: 2, 1: 1}, {0: 2}
    job.pservers[0].epoch = job.pservers[1].epoch = 0
    job.start_master()
    job.join("b")
    assert isinstance(task, AsyncTask)
    assert job.batch("b").task == 1


def test_a_pserver_that_dies_with_the_master_makes_the_job_fall_back():
    job = Job()
    job.join("a")
    job.train("a")
    job.batch("a", epoch=1)
    job.pservers[0].is_alive = False
    job.start_master()
    job.start_pserver(0)
    job.wait(3)
    job.join("b")
    assert job.batch("b", epoch=1).generation == 2


def test_a_master_that_follows_after_the_end_says_so():
    job = Job()
    job.join("a")
    job.train("a")
    assert isinstance(job.ask("a", WantEnd()), Ended)
    job.start_master()
    assert job.master.has_ended
    assert isinstance(job.say("b", Join(job.request(), Role.TRAINER, Member("b"), "b", 7)), Ended)


def test_serials_are_never_used_twice():
    job = Job()
    job.join("a")
    job.train("a")
    before = set(job.shelf.complete)
    job.start_master()
    job.join("b")
    job.train("b", 1)
    assert len(job.shelf.complete) > len(before)
    assert min(set(job.shelf.complete) - before) > max(before)


# -- beginnings and ends -----------------------------------------------------------------------------------------------


def test_a_new_job_resumes_from_the_newest_checkpoint():
    first = Job()
    first.join("a")
    first.train("a")
    job = Job(shelf=first.shelf)
    job.join("b")
    assert job.ask("b", WantEpoch(-1, 3)).epoch == 0
    assert isinstance(job.batch("b"), Over)
    assert job.batch("b", epoch=1).step == 2


def test_a_new_job_that_is_not_to_resume_begins_with_nothing():
    first = Job()
    first.join("a")
    first.train("a")
    job = Job(shelf=first.shelf, resume="never")
    job.join("b")
    assert job.batch("b").step == 0
    assert min(set(job.shelf.complete) - {0, 1}) == 2


def test_a_checkpoint_of_another_model_is_refused_with_what_differs():
    first = Job()
    first.join("a")
    first.train("a")
    other = msgspec.structs.replace(SYNC, tables=(msgspec.structs.replace(SYNC.tables[0], dim=3),))
    job = Job(shelf=first.shelf)
    job.look = lambda errand: msgspec.structs.replace(Job.look(job, errand), schema=other)
    job.join("b")
    assert "table 'user' has dim 2, the checkpoint's 3" in job.answers["b"].reason


def test_a_job_that_is_stopped_makes_one_more_checkpoint():
    job = Job()
    job.join("a")
    task = job.batch("a")
    task = job.batch("a", trained(task))
    job.batch("a", trained(task))
    job.say("launcher", StopJob(Request(5), "it was stopped by a signal", grace_s=10.0))
    job.wait(2, "a")
    assert job.master.failure == "it was stopped by a signal"
    assert progress_of(job)[-1].version == 1


def test_the_job_ends_only_when_its_last_version_is_in_a_checkpoint():
    job = Job()
    job.join("a")
    job.batch("a")
    job.shelf.is_failing = True
    job.ask("a", WantEpoch(0, 1), BreakDone(0, 1))
    assert job.say("a", Ask(job.request(), Member("a"), WantEnd(), None)) is None
    job.shelf.is_failing = False
    job.wait(5, "a")
    assert isinstance(job.answers["a"], Ended)
    assert progress_of(job)[-1].left_until == 1


def test_a_job_of_async_that_is_stopped_in_an_epoch_makes_one_more_checkpoint_and_ends():
    job = Job(schema=ASYNC)
    job.join("a")
    job.train("a", tasks=1)
    made = len(job.shelf.complete)
    job.say("launcher", Exited(Request(6), "a", 7))
    job.say("launcher", StopJob(Request(5), None, grace_s=60.0))
    job.wait(2)
    assert job.master.has_ended
    assert len(job.shelf.complete) == made + 1
    assert progress_of(job)[-1].standing == ((0, 2),)


def report(job, name, epoch, best=None, **metrics):
    return job.say(name, ReportMetrics(job.request(), Member(name), epoch, metrics, best))


def test_what_is_reported_of_an_epoch_is_put_beside_the_checkpoint_of_its_end_and_known_to_the_next_job():
    first = Job()
    first.join("a")
    first.train("a")
    assert isinstance(report(first, "a", 0, -0.7, auc=0.7), Noted)
    assert first.shelf.metrics == {1: Metrics({0: {"auc": 0.7}}, -0.7)}
    for epoch in (1, 2, 3):
        first.train("a", epoch)
        report(first, "a", epoch, -0.6, auc=0.6)
    job = Job(shelf=first.shelf)
    job.join("b")
    for epoch in (4, 5, 6):
        job.train("b", epoch)
    assert 1 not in job.shelf.pruned, "the best one"
    assert {2, 3} <= set(job.shelf.pruned)
    assert job.status().reported[0] == {"auc": 0.7}


def test_a_report_is_acknowledged_when_the_next_master_will_know_of_it():
    job = Job()
    job.join("a")
    job.train("a")
    job.shelf.is_stuck = True
    assert report(job, "a", 0, 1.5, loss=float("nan")) is None
    job.shelf.is_stuck = False
    (errand,) = job.unwritten
    job.shelf.record = encode(errand.record)
    job.take(job.master.done(RecordPut(errand.number), job.now))
    assert isinstance(job.answers["a"], Noted)
    job.start_master()
    assert str(job.status().reported[0]) == "{'loss': nan}"
    assert job.shelf.metrics[1].best == 1.5


def test_two_jobs_are_not_let_write_to_one_place():
    job = Job()
    job.shelf.holder = "another job"
    job.join("a")
    assert job.answers["a"].reason == "another job makes its checkpoints there"


def test_a_job_whose_place_another_one_has_taken_ends():
    job = Job()
    job.join("a")
    job.train("a")
    job.take(job.master.done(Held("storage is away for a moment"), job.now))
    assert not job.master.is_over
    job.shelf.holder = "another job"
    job.start_master()
    assert job.master.failure == "another job makes its checkpoints there"


def test_a_resumed_job_knows_what_was_evaluated_and_saved_before_though_data_and_path_are_others_now():
    first = Job()
    first.join("a")
    task = first.ask("a", WantTotals(-1, 0, DATA))
    task = first.ask("a", WantTotals(-1, 0, DATA), trained(task))
    done = EvalDone(task.generation, task.attempt, {"sum": partial(2.5)})
    while isinstance(task := first.ask("a", WantTotals(-1, 0, DATA), done), EvalTask):
        done = EvalDone(task.generation, task.attempt, {"sum": partial(2.5)})
    totals = task.totals
    save = first.ask("a", WantSaved(-1, 0, "/model"))
    first.ask("a", WantSaved(-1, 0, "/model"), SaveDone(save.generation, save.attempt))
    first.train("a")
    job = Job(shelf=first.shelf)
    job.join("b")
    other = DataSpec(9, "other", 3)
    answer = job.ask("b", WantTotals(-1, 0, other))
    assert answer.totals["sum"].values == totals["sum"].values == 10.0
    assert isinstance(job.ask("b", WantSaved(-1, 0, "/elsewhere")), Over)


def test_an_epoch_that_is_over_does_not_care_for_other_data_of_the_next_job():
    first = Job()
    first.join("a")
    first.train("a")
    today = DataSpec(12, "today's data", 2)
    job = Job(shelf=first.shelf)
    job.join("b")
    assert isinstance(job.ask("b", WantBatch(0, today)), Over)
    assert job.ask("b", WantBatch(1, today)).step == 2


def test_in_the_middle_of_an_epoch_other_data_is_refused():
    first = Job(spec=msgspec.structs.replace(SPEC, every_steps=1))
    first.join("a")
    first.train("a", tasks=2)
    job = Job(shelf=first.shelf)
    job.join("b")
    reason = job.ask("b", WantBatch(0, DataSpec(12, "today's data", 2))).reason
    assert "data is not the job's (samples 8 and 12; content data and today" in reason


@pytest.mark.parametrize("schema", [SYNC, ASYNC])
def test_agreeing_takes_until_the_pservers_hold_the_generation(schema):
    job = Job(schema=schema)
    job.pservers[0].is_deaf = lambda message: isinstance(message, Restore)
    job.join("a")
    assert "a" not in job.answers or not isinstance(job.answers["a"], Agreed)
    job.pservers[0].is_deaf = lambda message: False
    job.wait(1, "a")
    assert isinstance(job.answers["a"], Agreed)


def test_where_pservers_have_counted_different_updates_a_checkpoint_has_the_most():
    job = Job(schema=ASYNC)
    job.pservers[0].updates, job.pservers[1].updates = 3, 5
    job.join("a")
    job.batch("a")
    job.wait(1, "a")
    assert job.shelf.complete[0].updates == {"user": 5}
