"""The master as a whole, driven by messages and times."""

import msgspec
import pytest

from evergrad import init_rows
from evergrad.master.master import Master
from evergrad.master.settings import Settings
from evergrad.messages import (
    INIT_STEP,
    NEWEST,
    Address,
    Agree,
    Agreed,
    Ask,
    AskLeader,
    AskStatus,
    AsyncTask,
    BreakDone,
    CloseEpoch,
    Commit,
    Committed,
    DataSpec,
    Deposed,
    Ended,
    EpochClosed,
    EpochIs,
    EvalDone,
    EvalTask,
    Exited,
    Generation,
    Heartbeat,
    HeartbeatReply,
    InitTask,
    Join,
    Joined,
    LeaderIs,
    Leave,
    Left,
    Member,
    Missing,
    Noted,
    Over,
    Place,
    Pushed,
    Refused,
    ReportMetrics,
    Request,
    Restore,
    Restored,
    Role,
    SaveDone,
    SaveTask,
    Schema,
    Shutdown,
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
)
from evergrad.metrics import partial, result
from evergrad.optim import SGD

LEASE_S = 5.0
DATA = DataSpec(8, "data", 2)
VALID = DataSpec(4, "valid", 2)
SYNC = Schema(0, UpdateSpec(UpdateName.SYNC, 2), (TableSpec("user", 2, SGD().spec(), init_rows.zeros()),), ())
ASYNC = msgspec.structs.replace(SYNC, update=UpdateSpec(UpdateName.ASYNC, 2))


class Job:
    """A master, pservers that acknowledge whatever it says, and the answers that trainers got."""

    def __init__(self, pservers=1, schema=SYNC, acknowledge=True):
        self.master = Master(Settings("job", pservers, LEASE_S))
        self.now, self.schema, self.acknowledge = 0.0, schema, acknowledge
        self.answers, self.told = {}, []
        self._requests = 0
        for place in range(pservers):
            self.join_pserver(place)

    def join_pserver(self, place, incarnation=""):
        address = Address(f"tcp://127.0.0.1:{5000 + place}")
        member = Member(f"p{place}{incarnation}")
        return self.say(address, Join(Request(1), Role.PSERVER, member, f"p{place}", 0, "", Place(place), address))

    def say(self, src, message):
        """Hand the master a message; returns what `src` got for it, or None."""
        self.answers.pop(src, None)
        self.take(self.master.handle(src, message, self.now))
        return self.answers.get(src)

    def take(self, sends):
        for send in sends:
            if "://" not in send.to or isinstance(send.message, Joined):
                self.answers[send.to] = send.message
                continue
            self.told.append((send.to, send.message))
            if self.acknowledge:
                self.confirm(send.to, send.message)

    def confirm(self, address, message):
        place = Place(int(address[-1]))
        if isinstance(message, Restore):
            answer = Restored(message.term, message.generation, place, message.member, INIT_STEP)
        elif isinstance(message, Commit):
            answer = Committed(message.term, message.generation, place, message.step)
        elif isinstance(message, CloseEpoch):
            answer = EpochClosed(message.term, message.generation, place, message.epoch)
        else:
            return
        self.take(self.master.handle(address, answer, self.now))

    def wait(self, seconds, *alive):
        """Let time pass, with heartbeats of all pservers and of these trainers."""
        self.now += seconds
        for member in (*alive, *(p.member for p in self.master.members.pservers().values())):
            self.say("beat", Heartbeat(Request(0), Member(member), 0.0))
        self.take(self.master.tick(self.now))

    def request(self):
        self._requests += 1
        return Request(self._requests)

    def join(self, *names):
        """Trainers that have joined and agreed on the model."""
        for name in names:
            self.say(name, Join(self.request(), Role.TRAINER, Member(name), name, 7))
            self.say(name, Agree(self.request(), Member(name), self.schema))

    def ask(self, name, want, done=None):
        return self.say(name, Ask(self.request(), Member(name), want, done))

    def begin(self, *names):
        """Trainers that have joined; the initial values are handed in."""
        self.join(*names)
        task = self.ask(names[0], WantBatch(0, DATA))
        self.ask(names[0], WantEpoch(-1, 9), trained(task))

    def batch(self, name, done=None, epoch=0, data=DATA):
        return self.ask(name, WantBatch(epoch, data), done)

    def train(self, name, epoch=0):
        """Have one trainer do all of an epoch; returns its tasks."""
        tasks, task = [], self.batch(name, epoch=epoch)
        while isinstance(task, SyncTask | AsyncTask):
            tasks.append(task)
            task = self.batch(name, trained(task), epoch)
        assert isinstance(task, Over)
        return tasks

    def commits(self):
        return [message for _, message in self.told if isinstance(message, Commit)]

    def status(self):
        return self.say("launcher", AskStatus(Request(1)))


def trained(task, contributed=True):
    return TrainDone(task.generation, task.attempt, contributed, {})


# -- members -----------------------------------------------------------------------------------------------------------


def test_a_process_that_joins_is_told_term_generation_and_lease():
    job = Job()
    answer = job.say("a", Join(Request(3), Role.TRAINER, Member("a"), "a", 7))
    assert answer == Joined(Request(3), Term(1), Generation(0), LEASE_S)


def test_a_join_said_again_is_answered_again():
    job = Job()
    join = Join(Request(3), Role.TRAINER, Member("a"), "a", 7)
    assert job.say("a", join) == job.say("a", join)
    assert len(job.master.members.trainers()) == 1


def test_a_second_pserver_at_a_place_is_refused():
    job = Job(2)
    address = Address("tcp://127.0.0.1:5009")
    join = Join(Request(1), Role.PSERVER, Member("other"), "p1", 0, "", Place(1), address)
    assert job.master.handle(address, join, 0.0) == []
    job.wait(3.0)
    assert "pserver 1 is there already" in job.master.handle(address, join, 3.0)[0].message.reason


@pytest.mark.parametrize("place", [None, -1, 2])
def test_a_pserver_for_a_place_that_is_not_is_refused(place):
    job = Job(2)
    answer = job.say("x", Join(Request(1), Role.PSERVER, Member("x"), "x", 0, "", place, Address("tcp://127.0.0.1:9")))
    assert "pservers 0 to 1" in answer.reason


def test_one_that_is_no_member_is_told_so_and_nothing_is_done():
    job = Job()
    job.begin("a")
    job.train("a")
    assert isinstance(job.ask("stranger", WantEpoch(-1, 1)), Unknown)
    assert isinstance(job.say("stranger", Agree(Request(1), Member("stranger"), SYNC)), Unknown)
    assert isinstance(job.say("stranger", AskLeader(Request(1), Member("stranger"))), Unknown)
    assert isinstance(job.say("stranger", Leave(Request(1), Member("stranger"), "it raised")), Left)
    assert not job.master.is_over


def test_a_member_silent_past_its_lease_is_dead_and_is_told_when_it_comes_back():
    job = Job()
    job.begin("a", "b")
    job.wait(LEASE_S + 0.1, "b")
    assert [m.member for m in job.master.members.trainers()] == ["b"]
    reply = job.say("beat", Heartbeat(Request(1), Member("a"), 0.0))
    assert isinstance(reply, HeartbeatReply)
    assert not reply.known
    assert isinstance(job.batch("a"), Unknown)


def test_a_master_that_was_paused_declares_nobody_dead():
    job = Job()
    job.begin("a")
    job.take(job.master.tick(job.now))
    job.now += 10 * LEASE_S
    job.take(job.master.tick(job.now))
    assert "a" in job.master.members
    assert not job.master.is_over
    for _ in range(20):
        job.now += LEASE_S / 10
        job.take(job.master.tick(job.now))
    assert "a" not in job.master.members, "silence while the master listens counts"


def test_who_is_heard_at_the_end_of_a_pause_of_the_master_has_no_longer_lease_than_others():
    job = Job()
    job.begin("a")
    job.take(job.master.tick(job.now))
    job.now += 10 * LEASE_S
    job.say("beat", Heartbeat(Request(0), Member("a"), 0.0))
    job.take(job.master.tick(job.now))
    for _ in range(11):
        assert "a" in job.master.members
        job.now += LEASE_S / 10
        job.take(job.master.tick(job.now))
    assert "a" not in job.master.members


def test_a_pserver_is_given_up_much_later_than_a_trainer_and_named_before():
    job = Job()
    job.begin("a")
    for seconds in range(70):
        job.now += 1.0
        job.say("beat", Heartbeat(Request(0), Member("a"), 0.0))
        job.take(job.master.tick(job.now))
        assert job.master.is_over == (seconds >= 60), seconds
    assert "pserver-0 is lost" in job.master.failure or "p0 is lost" in job.master.failure


def test_the_traceback_of_a_trainer_declared_dead_before_it_could_tell_still_ends_the_job():
    job = Job()
    job.begin("a", "b")
    job.wait(LEASE_S + 0.1, "b")
    assert isinstance(job.say("a", Leave(Request(9), Member("a"), "raised: it")), Left)
    assert "in a the script raised: it" in job.master.failure


def test_a_model_made_with_other_values_is_noted():
    job = Job()
    for name, digest in (("a", "1"), ("b", "1"), ("c", "2")):
        job.say(name, Join(job.request(), Role.TRAINER, Member(name), name, 7))
        job.say(name, Agree(job.request(), Member(name), SYNC, digest))
    notes = [n for n in job.master.status(Request(1), 0.0).notes if "begins with other values" in n]
    assert len(notes) == 1
    assert notes[0].startswith("the model of c")


def test_one_that_only_sends_heartbeats_stays_a_member():
    job = Job()
    job.begin("a", "b")
    for _ in range(5):
        job.wait(LEASE_S - 0.1, "a", "b")
    assert len(job.master.members.trainers()) == 2


def test_a_lost_pserver_ends_the_job_with_a_sentence_that_names_it():
    job = Job(2)
    job.begin("a")
    job.say("x", Leave(Request(1), Member("p1")))
    assert "p1 is lost" in job.master.failure


def test_a_pserver_that_goes_before_the_model_is_known_may_be_replaced():
    job = Job(2)
    job.say("x", Leave(Request(1), Member("p1")))
    assert not job.master.is_over
    job.join("a")
    assert "a" not in job.answers
    job.join_pserver(1, "anew")
    assert isinstance(job.answers["a"], Agreed)


def test_a_late_copy_of_a_join_does_not_make_a_member_again():
    job = Job(2)
    job.say("x", Leave(Request(1), Member("p1")))
    assert job.join_pserver(1) is None
    assert job.master.counters["messages of former members"] == 1


# -- the model ---------------------------------------------------------------------------------------------------------


def test_a_model_is_agreed_once_all_pservers_are_there_and_hold_it():
    job = Job(0, acknowledge=False)
    job.master = Master(Settings("job", 2, LEASE_S))
    job.join_pserver(0)
    job.join("a")
    assert "a" not in job.answers
    job.join_pserver(1)
    assert "a" not in job.answers
    restores = list(job.told)
    assert [m.place for _, m in restores] == [0, 1]
    job.confirm(*restores[0])
    assert "a" not in job.answers
    job.confirm(*restores[1])
    assert [p.place for p in job.answers["a"].pservers] == [0, 1]


def test_another_model_is_refused_with_what_differs_and_the_job_goes_on():
    job = Job()
    job.begin("a")
    job.join("b")
    other = msgspec.structs.replace(SYNC, seed=1)
    refusal = job.say("b", Agree(job.request(), Member("b"), other))
    assert isinstance(refusal, Refused)
    assert "seed is 1" in refusal.reason
    assert job.master.counters["refused models"] == 1
    assert isinstance(job.batch("a"), SyncTask)


def test_what_a_pserver_does_not_acknowledge_it_is_told_again():
    job = Job(2, acknowledge=False)
    job.join("a")
    assert len(job.told) == 2
    job.confirm(*job.told[0])
    job.told.clear()
    job.wait(0.1, "a")
    assert job.told == []
    job.wait(1.0, "a")
    assert [to for to, _ in job.told] == ["tcp://127.0.0.1:5001"]


def test_the_initial_values_come_from_one_trainer_before_anything_else_is_done():
    job = Job()
    job.join("a", "b")
    task = job.batch("a")
    assert isinstance(task, InitTask)
    assert job.batch("b") is None
    assert isinstance(job.batch("a", trained(task)), SyncTask)
    assert isinstance(job.answers["b"], SyncTask)
    assert [(c.step, c.chosen) for c in job.commits()] == [(INIT_STEP, ((0, task.attempt),))]


def test_where_a_trainer_dies_over_the_initial_values_another_hands_in_its_own():
    job = Job()
    job.join("a", "b")
    first = job.batch("a")
    job.batch("b")
    job.say("a", Leave(Request(9), Member("a")))
    second = job.answers["b"]
    assert isinstance(second, InitTask)
    assert second.attempt != first.attempt
    job.batch("b", trained(second))
    assert [c.chosen for c in job.commits()] == [((0, second.attempt),)]


def test_initial_values_that_were_not_taken_are_asked_for_again():
    job = Job()
    job.join("a")
    task = job.batch("a")
    assert isinstance(job.batch("a", trained(task, contributed=False)), InitTask)
    assert job.commits() == []


# -- steps -------------------------------------------------------------------------------------------------------------


def test_an_ask_said_again_gets_the_same_answer_and_hands_out_nothing_more():
    job = Job()
    job.begin("a", "b")
    ask = Ask(job.request(), Member("a"), WantBatch(0, DATA), None)
    first = job.say("a", ask)
    assert isinstance(first, SyncTask)
    assert job.say("a", ask) == first
    assert job.batch("b").index != first.index
    assert job.master.counters["repeated requests"] == 1


def test_a_late_copy_of_an_older_ask_is_not_answered_and_takes_nothing_away():
    job = Job()
    job.begin("a", "b")
    old = Ask(job.request(), Member("a"), WantEpoch(-1, 1), None)
    job.say("a", old)
    task = job.batch("a")
    assert job.say("a", old) is None
    other = job.batch("b")
    assert other.index != task.index
    job.batch("b", trained(other))
    job.batch("a", trained(task))
    assert job.commits()[-1].chosen == ((0, task.attempt), (1, other.attempt))


def test_a_waiting_ask_said_again_is_answered_once():
    job = Job()
    job.begin("a", "b", "c")
    tasks = [job.batch("a"), job.batch("b")]
    ask = Ask(job.request(), Member("c"), WantBatch(0, DATA), None)
    assert job.say("c", ask) is None
    assert job.say("c", ask) is None
    job.batch("a", trained(tasks[0]))
    sends = job.master.handle("b", Ask(job.request(), Member("b"), WantBatch(0, DATA), trained(tasks[1])), job.now)
    assert len([s for s in sends if s.to == "c"]) == 1


def test_a_task_of_the_next_step_is_handed_out_only_when_the_commit_is_decided():
    job = Job()
    job.begin("a", "b")
    one, two = job.batch("a"), job.batch("b")
    assert job.batch("a", trained(one)) is None
    following = job.batch("b", trained(two))
    assert (job.answers["a"].step, following.step) == (1, 1)
    assert [c.step for c in job.commits()] == [INIT_STEP, 0]


def test_a_decided_commit_is_enough_to_go_on_and_it_is_told_until_acknowledged():
    job = Job()
    job.begin("a")
    job.acknowledge = False
    task = job.batch("a", trained(job.batch("a", trained(job.batch("a")))))
    assert task.step == 1
    job.told.clear()
    for _ in range(3):
        job.wait(1.0, "a")
    assert [m.step for _, m in job.told] == [0, 0, 0]
    job.confirm(*job.told[0])
    job.told.clear()
    job.wait(1.0, "a")
    assert job.told == []


def test_a_commit_decided_before_the_last_is_acknowledged_is_told_after_it_and_a_third_is_not_begun():
    """Tasks that contribute nothing can be done without having pulled anything."""
    job = Job(2, acknowledge=False)
    job.join("a")
    for restore in job.told[:]:
        job.confirm(*restore)
    task = job.batch("a", trained(job.batch("a")))
    assert job.batch("a", trained(job.batch("a", trained(task, contributed=False)), contributed=False)) is None
    job.wait(2.0, "a")
    assert "a" not in job.answers
    assert job.status().waiting_for == "pserver 0 to acknowledge what it was told"
    job.acknowledge = True
    job.wait(1.0, "a")
    assert job.answers["a"].step == 1
    by_place = [[m.step for to, m in job.told if to[-1] == place and isinstance(m, Commit)] for place in "01"]
    assert [sorted(set(steps)) for steps in by_place] == [[INIT_STEP, 0], [INIT_STEP, 0]]
    job.told.clear()
    job.wait(1.0, "a")
    assert job.told == []


def test_the_tasks_of_a_dead_trainer_go_to_others():
    job = Job()
    job.begin("a", "b", "c")
    task, _ = job.batch("a"), job.batch("b")
    assert job.batch("c") is None
    job.wait(LEASE_S + 0.1, "b", "c")
    again = job.answers["c"]
    assert again.index == task.index
    assert again.attempt != task.attempt


def test_the_tasks_of_a_process_that_the_launcher_saw_end_go_to_others_at_once():
    job = Job()
    job.begin("a", "b", "c")
    task, _ = job.batch("a"), job.batch("b")
    assert job.batch("c") is None
    assert isinstance(job.say("launcher", Exited(Request(1), "a", 7)), Noted)
    assert job.answers["c"].index == task.index


def test_a_trainer_that_asks_without_having_done_its_task_gives_it_up():
    job = Job()
    job.begin("a")
    first = job.batch("a")
    assert job.batch("a").index == first.index


def test_a_report_of_another_generation_counts_for_nothing():
    job = Job()
    job.begin("a")
    task = job.batch("a")
    job.batch("a", msgspec.structs.replace(trained(task), generation=Generation(0)))
    job.batch("a", msgspec.structs.replace(trained(task), generation=Generation(2)))
    assert [c.step for c in job.commits()] == [INIT_STEP]


def test_what_a_dead_trainer_had_done_counts_when_it_comes_back_in_time():
    job = Job()
    job.begin("a", "b")
    task, other = job.batch("a"), job.batch("b")
    job.wait(LEASE_S + 0.1, "b")
    again = job.batch("b", trained(other))
    assert again.index == task.index
    job.join("a.2")
    job.batch("a.2", trained(task))
    assert job.commits()[-1].chosen == ((task.index, task.attempt), (other.index, other.attempt))


def test_one_who_joins_late_starts_where_the_job_is():
    job = Job()
    job.begin("a")
    job.train("a", 0)
    job.train("a", 1)
    task = job.batch("a", epoch=2)
    job.join("b")
    assert job.ask("b", WantEpoch(-1, 5)) == EpochIs(job._requests, 2)
    assert job.batch("b", epoch=2).step == task.step


def test_more_trainers_than_tasks_wait_and_are_told_when_the_epoch_is_over():
    job = Job()
    job.begin("a", "b", "c", "d")
    assert isinstance(job.batch("a"), SyncTask)
    assert isinstance(job.batch("b"), SyncTask)
    assert job.batch("c") is job.batch("d") is None
    job.say("a", Leave(Request(99), Member("a")))
    job.say("b", Leave(Request(99), Member("b")))
    while isinstance(job.answers.get("c"), SyncTask) or isinstance(job.answers.get("d"), SyncTask):
        for name in "cd":
            if isinstance(task := job.answers.get(name), SyncTask):
                job.batch(name, trained(task))
    assert isinstance(job.answers["c"], Over)
    assert isinstance(job.answers["d"], Over)
    assert [c.step for c in job.commits()] == [INIT_STEP, 0, 1]


def test_no_trainer_at_all_is_a_state_the_job_survives():
    job = Job()
    job.begin("a")
    task = job.batch("a")
    job.wait(LEASE_S + 0.1)
    job.wait(1000.0)
    assert not job.master.is_over
    assert job.status().waiting_for == "a trainer to join"
    job.join("b", "c")
    assert task.index in (job.batch("b").index, job.batch("c").index)


def test_other_data_is_refused_with_what_differs():
    job = Job()
    job.begin("a", "b")
    job.batch("a")
    assert "batch size 2 and 4" in job.batch("b", data=DataSpec(8, "data", 4)).reason
    assert "samples 8 and 9" in job.batch("b", data=DataSpec(9, "data", 2)).reason
    assert "content data and other" in job.batch("b", data=DataSpec(8, "other", 2)).reason
    assert isinstance(job.batch("b"), SyncTask)


def test_an_async_epoch_hands_out_tasks_of_several_batches_and_commits_only_the_initial_values():
    job = Job(schema=ASYNC)
    job.begin("a")
    tasks = job.train("a")
    assert [(t.task, t.start, t.stop, t.first) for t in tasks] == [(0, 0, 4, 0), (1, 4, 8, 2)]
    assert [c.step for c in job.commits()] == [INIT_STEP]


# -- epochs ------------------------------------------------------------------------------------------------------------


def test_epochs_are_counted_up_to_the_end_of_the_loop():
    job = Job()
    job.begin("a")
    assert job.ask("a", WantEpoch(-1, 2)).epoch == 0
    job.train("a", 0)
    assert job.ask("a", WantEpoch(0, 2)).epoch == 1
    job.train("a", 1)
    assert job.ask("a", WantEpoch(1, 2)).epoch is None
    assert job.ask("a", WantEpoch(1, 5)).epoch == 2


def test_leaving_batches_ends_the_epoch_for_all_at_the_last_committed_step():
    job = Job()
    job.begin("a", "b")
    job.batch("a", trained(job.batch("a", trained(job.batch("a")))))
    other = job.batch("b")
    assert job.ask("a", WantEpoch(0, 9), BreakDone(0, 0)).epoch == 1
    assert isinstance(job.batch("b", trained(other)), Over)
    assert job.status().version == 1
    assert job.batch("a", epoch=1).step == 1


def test_the_next_epoch_waits_for_those_still_at_a_task_of_one_left_early():
    job = Job()
    job.begin("a", "b")
    job.batch("a")
    other = job.batch("b")
    job.ask("a", WantEpoch(0, 9), BreakDone(0, 0))
    assert job.batch("a", epoch=1) is None
    job.batch("b", trained(other))
    assert isinstance(job.answers["a"], SyncTask)


def test_one_who_comes_to_an_epoch_left_before_is_told_it_is_over():
    job = Job()
    job.begin("a", "b")
    job.batch("a")
    job.ask("a", WantEpoch(0, 9), BreakDone(0, 0))
    assert isinstance(job.batch("b"), Over)


def test_a_break_said_late_does_not_end_a_later_epoch():
    job = Job()
    job.begin("a", "b")
    job.train("a", 0)
    job.batch("a", epoch=1)
    job.ask("b", WantEpoch(0, 9), BreakDone(0, 0))
    assert isinstance(job.batch("b", epoch=1), SyncTask)


def test_leaving_epochs_ends_the_loop_for_all_and_not_the_loops_after_it():
    job = Job()
    job.begin("a", "b")
    job.train("a", 0)
    job.batch("b")
    job.ask("a", WantEpoch(9, 12), BreakDone(0, 9))
    assert job.ask("b", WantEpoch(0, 9)).epoch is None
    assert job.ask("b", WantEpoch(0, 12)).epoch is not None


# -- evaluation and saving ---------------------------------------------------------------------------------------------


def evaluated(task, value):
    return EvalDone(task.generation, task.attempt, {"sum": partial(value)})


def test_an_evaluation_is_shared_out_and_all_get_the_same_totals():
    job = Job()
    job.begin("a", "b", "late")
    job.train("a")
    want = WantTotals(0, 0, VALID)
    one, two = job.ask("a", want), job.ask("b", want)
    assert [(t.version, t.start, t.stop) for t in (one, two)] == [(2, 0, 2), (2, 2, 4)]
    job.ask("b", want, evaluated(two, 10.0))
    totals = job.ask("a", want, evaluated(one, 1.0))
    assert isinstance(totals, TotalsAre)
    assert result(totals.totals["sum"]) == 11.0
    assert job.answers["b"].totals == totals.totals
    assert job.ask("late", want).totals == totals.totals


def test_an_async_evaluation_reads_the_newest_values():
    job = Job(schema=ASYNC)
    job.begin("a")
    job.train("a")
    assert job.ask("a", WantTotals(0, 0, VALID)).version == NEWEST


def test_no_step_is_handed_out_while_an_evaluation_is_open():
    job = Job()
    job.begin("a", "b")
    job.train("a")
    task = job.ask("a", WantTotals(0, 0, DataSpec(2, "valid", 2)))
    assert job.batch("b", epoch=1) is None
    job.ask("a", WantTotals(0, 0, DataSpec(2, "valid", 2)), evaluated(task, 1.0))
    assert isinstance(job.answers["b"], SyncTask)


def test_no_evaluation_begins_while_an_epoch_is_open():
    job = Job()
    job.begin("a", "b")
    job.batch("a")
    assert job.ask("b", WantTotals(0, 0, VALID)) is None


def test_the_evaluation_task_of_a_dead_trainer_goes_to_another():
    job = Job()
    job.begin("a", "b")
    job.train("a")
    want = WantTotals(0, 0, DataSpec(2, "valid", 2))
    job.ask("a", want)
    assert job.ask("b", want) is None
    job.say("a", Leave(Request(99), Member("a")))
    assert isinstance(job.answers["b"], EvalTask)


def test_an_evaluation_that_others_did_not_call_is_refused():
    job = Job()
    job.begin("a", "b")
    job.train("a", 0)
    job.batch("a", epoch=1)
    assert "run the same script everywhere" in job.ask("b", WantTotals(0, 0, VALID)).reason
    assert "run the same script everywhere" in job.ask("b", WantSaved(0, 0, "model")).reason


def test_metrics_that_do_not_add_up_are_refused_with_what_differs():
    job = Job()
    job.begin("a")
    job.train("a")
    want = WantTotals(0, 0, VALID)
    task = job.ask("a", want, evaluated(job.ask("a", want), 1.0))
    answer = job.ask("a", want, EvalDone(task.generation, task.attempt, {"auc": partial(1.0)}))
    assert isinstance(answer, Refused)
    assert "different metrics" in answer.reason
    assert not job.master.is_over, "the scripts may go on"


def saving():
    """A job whose first epoch is trained, and whose model `a` is to save; what `a` asked for, and what it was told."""
    job = Job()
    job.begin("a", "b")
    job.train("a")
    want = WantSaved(1, 0, "model")
    return job, want, job.ask("a", want)


def test_a_model_is_saved_by_one_trainer_and_all_are_told():
    job, want, task = saving()
    assert isinstance(task, SaveTask)
    assert task.version == 2
    assert job.ask("b", want) is None
    assert isinstance(job.ask("a", want, SaveDone(task.generation, task.attempt)), Over)
    assert isinstance(job.answers["b"], Over)


def test_where_the_leader_dies_the_next_one_who_saves_becomes_it():
    job = Job()
    job.begin("a", "b")
    job.train("a")
    assert job.say("a", AskLeader(Request(1), Member("a"))) == LeaderIs(Request(1), True)
    assert job.say("b", AskLeader(Request(1), Member("b"))) == LeaderIs(Request(1), False)
    assert job.ask("b", WantSaved(1, 0, "model")) is None
    assert isinstance(job.ask("a", WantSaved(1, 0, "model")), SaveTask)
    job.say("launcher", Exited(Request(1), "a", 7))
    assert isinstance(job.answers["b"], SaveTask)
    assert job.say("b", AskLeader(Request(2), Member("b"))).leader


def test_who_is_told_to_save_what_another_one_has_saved_after_all_is_told_not_to():
    job, want, first = saving()
    job.wait(LEASE_S + 0.1, "b")
    second = job.ask("b", want)
    assert isinstance(second, SaveTask)
    ask = AskLeader(Request(1), Member("b"), second.attempt)
    assert job.say("b", ask) == LeaderIs(Request(1), True)
    job.join("a2")
    job.ask("a2", want, SaveDone(first.generation, first.attempt))
    assert job.say("b", ask) == LeaderIs(Request(1), False)


def test_a_model_that_could_not_be_saved_is_refused_everywhere_with_the_reason():
    job, want, task = saving()
    job.ask("b", want)
    assert job.ask("a", want, SaveDone(task.generation, task.attempt, "the disk is full")).reason == "the disk is full"
    assert job.answers["b"].reason == "the disk is full"


# -- the end -----------------------------------------------------------------------------------------------------------


def test_the_job_ends_when_all_live_trainers_have_finished():
    job = Job()
    job.begin("a", "b")
    job.train("a")
    assert job.ask("a", WantEnd()) is None
    assert job.ask("b", WantEnd()) == Ended(Request(job._requests), None)
    job.wait(0.1, "a", "b")
    assert isinstance(job.answers["a"], Ended)
    assert job.master.is_over
    assert job.master.failure is None


def test_the_death_of_the_last_one_that_has_not_finished_ends_the_job():
    job = Job()
    job.begin("a", "b")
    job.train("a")
    job.ask("a", WantEnd())
    job.wait(LEASE_S + 0.1, "a")
    assert job.answers["a"] == Ended(job.answers["a"].request, None)


def test_the_death_of_all_that_have_finished_does_not_end_the_job_for_the_others():
    job = Job()
    job.begin("a", "b")
    task = job.batch("b")
    job.ask("a", WantEnd())
    job.say("a", Leave(Request(99), Member("a")))
    assert not job.master.is_over
    assert isinstance(job.batch("b", trained(task)), SyncTask)


def test_the_job_ends_only_when_every_pserver_has_applied_the_last_step():
    job = Job()
    job.begin("a")
    last = job.batch("a", trained(job.batch("a", trained(job.batch("a", trained(job.batch("a")))))))
    job.acknowledge = False
    assert job.ask("a", WantEnd(), trained(last)) is None
    job.wait(1.0, "a")
    assert not job.master.is_over
    job.confirm(*job.told[-1])
    assert job.master.is_over
    assert isinstance(job.answers["a"], Ended)


def test_the_batches_of_an_epoch_are_over_when_every_pserver_has_applied_its_last_step():
    job = Job()
    job.begin("a")
    last = job.batch("a", trained(job.batch("a", trained(job.batch("a", trained(job.batch("a")))))))
    job.acknowledge = False
    assert job.batch("a", trained(last)) is None
    job.confirm(*job.told[-1])
    assert isinstance(job.answers["a"], Over)


def test_pservers_are_told_to_leave_until_they_have_left():
    job = Job(2)
    job.begin("a")
    job.ask("a", WantEnd())
    job.told.clear()
    job.wait(0.1, "a")
    job.say("x", Leave(Request(9), Member("p0")))
    job.wait(0.1, "a")
    assert [(to[-1], type(m)) for to, m in job.told] == [("0", Shutdown), ("1", Shutdown), ("1", Shutdown)]


def test_a_script_that_raises_ends_the_job_with_its_traceback():
    job = Job()
    job.begin("a", "b")
    job.batch("b")
    job.say("a", Leave(Request(99), Member("a"), "raised:\nTraceback: KeyError"))
    assert job.master.failure == "in a the script raised:\nTraceback: KeyError"
    assert "KeyError" in job.batch("b").failure


def test_after_the_end_everybody_is_told_how_it_ended():
    job = Job()
    job.begin("a")
    job.say("launcher", StopJob(Request(1), "interrupted"))
    assert job.batch("a").failure == "interrupted"
    assert job.say("n", Join(Request(1), Role.TRAINER, Member("n"), "n", 9)) == Ended(Request(1), "interrupted")
    assert job.ask("stranger", WantEnd()).failure == "interrupted"
    reply = job.say("beat", Heartbeat(Request(1), Member("a"), 0.0))
    assert (reply.over, reply.failure) == (True, "interrupted")


def test_the_first_failure_is_the_one_that_is_kept():
    job = Job()
    job.master.end("first")
    job.master.end("second")
    job.master.end(None)
    assert job.master.failure == "first"


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (Deposed(Term(4)), "term 4"),
        (Missing(Term(1), Generation(1), Place(1), 6), "pserver 1 lacks a push that step 6 names"),
    ],
)
def test_what_a_pserver_cannot_do_ends_the_job(message, says):
    job = Job(2)
    job.begin("a")
    job.say("tcp://127.0.0.1:5001", message)
    assert says in job.master.failure


# -- status ------------------------------------------------------------------------------------------------------------


def waits(job, *alive):
    """Who is waited for after some seconds in which nothing happens, and what is under way."""
    for _ in range(5):
        job.wait(0.5, *alive)
    status = job.status()
    return status.phase, status.waiting_for


def test_the_status_says_who_is_waited_for():
    job = Job(0)
    job.master = Master(Settings("job", 2, LEASE_S))
    assert job.status().waiting_for == "pserver 0, 1 of 2 to join"
    job.join_pserver(0)
    assert job.status().waiting_for == "pserver 1 of 2 to join"
    job.join_pserver(1)
    assert job.status().waiting_for == "a trainer to join"
    job.begin("a", "b")
    job.batch("a")
    job.wait(2.5, "a", "b")
    assert job.status().waiting_for.startswith("task 0 at a for ")


def test_the_status_names_a_trainer_that_has_not_named_its_model():
    job = Job()
    job.say("a", Join(Request(1), Role.TRAINER, Member("a"), "a", 7))
    assert job.status().waiting_for == ""
    assert waits(job, "a") == ("forming", "a to go on in its script")


def test_the_status_names_who_is_to_hand_in_the_initial_values():
    job = Job()
    job.join("a", "b")
    job.batch("a")
    job.batch("b")
    assert waits(job, "a", "b") == ("starting", "the initial values at a")


def test_the_status_names_a_trainer_whose_script_asks_for_nothing():
    job = Job()
    job.begin("a", "b")
    job.train("a")
    assert job.ask("a", WantEpoch(0, 9)) == EpochIs(job.answers["a"].request, 1)
    job.ask("b", WantEpoch(0, 9))
    assert job.ask("a", WantTotals(1, 0, VALID)) is not None
    job.ask("a", WantEnd())
    assert waits(job, "a", "b")[1] == "b to go on in its script"


def test_the_status_says_how_long_a_member_has_not_turned_to_its_messages():
    job = Job(1)
    job.join("a")
    for member in ("a", "p0"):
        job.say("beat", Heartbeat(Request(0), member, 12.3))
    found = {m.role: m.doing for m in job.status().members}
    assert found[Role.TRAINER].endswith("in its script for 12 s")
    assert found[Role.PSERVER] == "at one thing for 12 s"
    job.say("beat", Heartbeat(Request(0), Member("a"), 0.4))
    assert "12 s" not in {m.role: m.doing for m in job.status().members}[Role.TRAINER]


def test_the_status_names_who_evaluates_and_who_saves():
    job = Job()
    job.begin("a", "b")
    job.train("a")
    tasks = [job.ask(name, WantTotals(0, 0, VALID)) for name in "ab"]
    phase, waiting_for = waits(job, "a", "b")
    assert (phase, waiting_for[:32]) == ("evaluating", "a task of the evaluation at a fo")
    for name, task in zip("ab", tasks, strict=True):
        done = EvalDone(task.generation, task.attempt, {"n": partial(1.0)})
        job.ask(name, WantSaved(0, 0, "model"), done)
    phase, waiting_for = waits(job, "a", "b")
    assert (phase, waiting_for[:27]) == ("saving", "the saving of the model at ")


def test_the_status_names_a_silent_pserver_before_all_that_waits_for_it():
    job = Job()
    job.begin("a")
    job.batch("a")
    job.now += 2.5
    job.say("beat", Heartbeat(Request(0), Member("a"), 0.0))
    assert job.status().waiting_for == "pserver 0, which is silent"


def test_the_status_counts_samples_and_shows_metrics():
    job = Job()
    job.begin("a")
    job.train("a")
    assert isinstance(job.say("a", ReportMetrics(Request(50), Member("a"), 0, {"auc": 0.75})), Noted)
    status = job.status()
    assert (status.samples, status.step, status.steps, status.version) == (8, 2, 2, 2)
    assert status.reported == {0: {"auc": 0.75}}
    assert status.job == "job"


def test_a_message_the_master_does_not_expect_is_counted_and_nothing_else():
    job = Job()
    assert job.master.handle("x", Pushed(Request(1)), 0.0) == []
    assert job.master.counters["unexpected messages"] == 1
