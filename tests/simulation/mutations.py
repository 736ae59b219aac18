"""Rules of the protocol, each switched off: what a simulation that can fail must find.

Each is a small change of one role. The words are those of the rule that is broken; `kinds` says what the simulation
may find to be wrong first.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from evergrad.job.local import LocalModel
from evergrad.master import pservers, training
from evergrad.master import recovery as master_recovery
from evergrad.master.calls import Evaluation
from evergrad.master.checkpoints import Checkpoints
from evergrad.master.dispatch import TaskPool
from evergrad.master.generations import Generations
from evergrad.master.members import Members
from evergrad.master.pace import Pace
from evergrad.master.pservers import Pservers
from evergrad.master.recording import Recording
from evergrad.master.recovery import Recovery
from evergrad.master.script import Script
from evergrad.master.training import Training
from evergrad.messages import UpdateName, UpdateSpec
from evergrad.pserver.batches import Batches
from evergrad.pserver.parts import Parts
from evergrad.pserver.table import Table
from evergrad.trainer.exchange import Exchange

from . import broken
from . import broken_recovery as recovery
from .faults import Kind
from .plan import Epoch, Leave, Plan, Raise, SavePlan
from .trouble import Trouble
from .world import Roles, Schedule


class Mutation(NamedTuple):
    """A rule that is switched off.

    Attributes:
        breaks: the rule.
        kinds: what may be found wrong first.
        roles: the roles without it.
        patches: attributes of classes or modules that are replaced.
        rule: the update rule under which this is looked for.
        plan, trouble: what is not left to the seeds, where it would take hundreds of them.
        is_saved: whether the jobs make checkpoints, and lose pservers and masters.
    """

    breaks: str
    kinds: set[Kind]
    roles: Roles = Roles()
    patches: tuple[tuple[object, str, object], ...] = ()
    rule: UpdateName = UpdateName.SYNC
    plan: Plan | None = None
    trouble: Trouble | None = None
    is_saved: bool = False

    def schedule(self, seed: int, is_drawn: bool = False) -> Schedule:
        """A schedule to look for it in; `is_drawn`: one of those of all others."""
        if is_drawn:
            rule = self.plan.update.name if self.plan is not None else self.rule
            return Schedule.drawn(seed, rule, is_saved=self.is_saved)
        return Schedule.drawn(seed, self.rule, self.plan, trouble=self.trouble, is_saved=self.is_saved)

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """The rule is off inside."""
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in self.patches]
        for owner, name, value in self.patches:
            setattr(owner, name, value)
        try:
            yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)


SYNC, ASYNC = UpdateName.SYNC, UpdateName.ASYNC
ANYTHING = {*Kind}
STEPS = Plan(UpdateSpec(SYNC, 3))
ROUNDS = Plan(UpdateSpec(UpdateName.LOCAL_SGD, 2, local_steps=3))
SAVED_STEPS = replace(STEPS, checkpoints=SavePlan())
SAVED_TASKS = Plan(UpdateSpec(ASYNC, 4), checkpoints=SavePlan(every_steps=1))
ROUGH = Trouble(
    loss=0.1, duplicate=0.2, slow=0.15, lasts=True, mean_s={"crash": 4.0, "freeze trainer": 4.0, "join": 4.0}
)

MUTATIONS = (
    # what a pserver applies
    Mutation(
        "a commit is applied at its own version only",
        {Kind.FAILED, Kind.TORN, Kind.BITS, Kind.COUNT},
        Roles(pserver=broken.AppliesAtAnyVersion),
    ),
    Mutation(
        "a commit is applied once",
        {Kind.ENDLESS, Kind.CRASHED, Kind.TORN},
        Roles(pserver=broken.AppliesTwice),
    ),
    Mutation(
        "a commit applies no attempt but those it names",
        {Kind.COUNT, Kind.BITS},
        Roles(pserver=broken.AppliesAllItHolds),
    ),
    Mutation(
        "a commit applies all attempts it names",
        {Kind.COUNT, Kind.BITS},
        Roles(pserver=broken.AppliesTheFirstPush),
    ),
    Mutation(
        "a step is summed in the order of tasks",
        {Kind.BITS},
        Roles(pserver=broken.AppliesInOrderOfArrival),
    ),
    Mutation(
        "a step is the mean over samples, not over who sent them",
        {Kind.COUNT, Kind.BITS},
        Roles(pserver=broken.CountsTasks),
    ),
    Mutation(
        "initial values are staged until their commit",
        {Kind.TORN},
        Roles(pserver=broken.TakesInitialValuesOnArrival),
        plan=replace(STEPS, differ_at_first=True),
    ),
    # what a pserver holds
    Mutation(
        "every attempt is kept until the commit",
        {Kind.FAILED},
        Roles(pserver=broken.StagesByTaskAlone),
    ),
    Mutation(
        "a push of a committed step is not staged",
        {Kind.UNBOUNDED},
        Roles(pserver=broken.StagesForAnyStep),
    ),
    Mutation(
        "a part that comes twice is one part",
        {Kind.CRASHED, Kind.FAILED, Kind.COUNT, Kind.BITS},
        patches=((Parts, "add", broken.count_messages), (Parts, "has", lambda *_: False)),
    ),
    Mutation(
        "the parts of an epoch's pushes outlive the first batch of it",
        {Kind.ENDLESS},
        patches=((Parts, "forget", broken.forget_all),),
        plan=Plan(UpdateSpec(ASYNC, 2), message_bytes=48),
    ),
    # what a pserver answers
    Mutation(
        "a pull is answered with its version or not at all",
        {Kind.BITS},
        Roles(pserver=broken.AnswersPullsAtOnce),
    ),
    Mutation(
        "a pull makes no rows",
        {Kind.COUNT, Kind.BITS, Kind.SAVED},
        Roles(pserver=broken.MakesRowsOnPulls),
    ),
    Mutation(
        "a batch that comes again is not applied again",
        {Kind.COUNT},
        Roles(pserver=broken.AppliesResentBatches),
        rule=ASYNC,
    ),
    Mutation(
        "batches are counted by task, whoever sends them",
        {Kind.COUNT},
        Roles(pserver=broken.CountsBatchesOfTrainers),
        rule=ASYNC,
    ),
    Mutation(
        "of a push of several batches all are counted",
        {Kind.ENDLESS, Kind.COUNT, Kind.FAILED, Kind.CRASHED},
        Roles(pserver=broken.CountsOneBatchAPush),
        plan=Plan(UpdateSpec(ASYNC, 4, push_every=2)),
    ),
    Mutation(
        "no batch of an epoch that is over is applied",
        {Kind.EVALUATION, Kind.SAVED, Kind.FAILED},
        Roles(pserver=broken.AppliesBatchesOfEpochsThatAreOver),
        plan=replace(
            Plan(UpdateSpec(ASYNC, 4)), epochs=(Epoch(leave=Leave(1, True), saves=2),), loops=(1,), message_bytes=150
        ),
        trouble=ROUGH,
    ),
    Mutation(
        "a step does without what was dropped on all pservers",
        {Kind.BITS, Kind.COUNT},
        Roles(pserver=broken.TakesLatePushesAfterAll),
        plan=Plan(UpdateSpec(SYNC, 3, drop_after_s=0.4)),
    ),
    Mutation(
        "nobody waits for a task that was set aside",
        {Kind.ENDLESS, Kind.FAILED},
        patches=((TaskPool, "set_aside", lambda *_: None),),
        plan=replace(STEPS, raises=Raise(0, 7)),
    ),
    # who waits for whom
    Mutation(
        "who is too far ahead waits",
        {Kind.AHEAD},
        patches=((Pace, "may_begin", broken.let_everyone_begin),),
        plan=Plan(UpdateSpec(ASYNC, 4, max_staleness=1)),
    ),
    Mutation(
        "too far is one batch more than allowed",
        {Kind.AHEAD},
        patches=((Pace, "__init__", broken.allow_one_more),),
        plan=Plan(UpdateSpec(ASYNC, 4, max_staleness=1)),
    ),
    Mutation(
        "nobody waits for who is gone",
        {Kind.ENDLESS},
        patches=((Pace, "release", lambda *_: None),),
        plan=Plan(UpdateSpec(ASYNC, 4, max_staleness=0)),
        trouble=ROUGH,
    ),
    # what a trainer does by itself
    Mutation(
        "a task begins without the state of the trainer's last one",
        {Kind.BITS},
        patches=((LocalModel, "forget", broken.forget_values_only),),
        plan=ROUNDS,
    ),
    Mutation(
        "a task begins with what was pulled for it",
        {Kind.BITS, Kind.CRASHED, Kind.COUNT},
        patches=((LocalModel, "forget", lambda _: None),),
        plan=ROUNDS,
    ),
    Mutation(
        "all batches of a task are of one version",
        {Kind.BITS},
        Roles(pserver=broken.AnswersPullsAtOnce),
        plan=ROUNDS,
    ),
    Mutation(
        "a round is the mean over samples, not over who sent them",
        {Kind.BITS},
        Roles(pserver=broken.CountsTasks),
        plan=ROUNDS,
    ),
    # what a trainer waits for
    Mutation(
        "a push is done when every pserver holds it",
        {Kind.FAILED},
        Roles(trainer=broken.WaitsForOneAcknowledgement),
    ),
    Mutation(
        "a batch is done when every pserver has applied it",
        {Kind.COUNT, Kind.ENDLESS, Kind.FAILED},
        Roles(trainer=broken.WaitsForOneAcknowledgement),
        rule=ASYNC,
    ),
    Mutation(
        "a push that one pserver refuses contributes nothing",
        {Kind.FAILED},
        Roles(trainer=broken.TakesRefusalsForAnswers),
    ),
    Mutation(
        "a task goes on where the last pserver stands",
        {Kind.ENDLESS, Kind.COUNT},
        Roles(trainer=broken.GoesOnWhereTheFirstPserverIs),
        rule=ASYNC,
    ),
    Mutation(
        "an answer that was taken is let go",
        {Kind.UNBOUNDED},
        patches=((Exchange, "receive", broken.keep_answers),),
    ),
    # what the master hands out and takes
    Mutation(
        "no task of a step is handed out before the last commit is decided",
        {Kind.ENDLESS},
        patches=((training, "SyncEpoch", broken.HandsOutEarly),),
        plan=STEPS,
        trouble=ROUGH,
    ),
    Mutation(
        "the tasks of a dead trainer go to others",
        {Kind.ENDLESS, Kind.UNBOUNDED},
        Roles(master=broken.KeepsTasksOfTheDead),
    ),
    Mutation(
        "the tasks of a dead trainer go to others, in Async too",
        {Kind.ENDLESS, Kind.UNBOUNDED},
        Roles(master=broken.KeepsTasksOfTheDead),
        rule=ASYNC,
    ),
    Mutation(
        "a silent trainer is declared dead",
        {Kind.ENDLESS},
        patches=((Members, "silent", lambda *_: []),),
    ),
    Mutation(
        "a report counts for its own attempt",
        {Kind.FAILED},
        patches=((TaskPool, "finish", broken.finish_any),),
    ),
    Mutation(
        "a step is complete when all its tasks are done",
        {Kind.COUNT, Kind.UNBOUNDED},
        patches=((TaskPool, "all_done", broken.none_todo),),
    ),
    Mutation(
        "who asks twice gets the same answer",
        {Kind.ANSWERS},
        Roles(master=broken.AnswersAnew),
    ),
    # what the master tells the pservers
    Mutation(
        "a commit is sent again until it is acknowledged",
        {Kind.ENDLESS},
        patches=((pservers, "RESEND_S", 1e9),),
    ),
    Mutation(
        "a commit goes to every pserver",
        {Kind.ENDLESS, Kind.TORN},
        patches=((Pservers, "tell", broken.tell_the_first),),
    ),
    Mutation(
        "every pserver acknowledges a commit",
        {Kind.ENDLESS, Kind.TORN},
        patches=((Pservers, "committed", broken.acknowledge_for_all),),
    ),
    Mutation(
        "a commit is told after the one before it is acknowledged",
        {Kind.ENDLESS, Kind.TORN},
        patches=((Pservers, "tell", broken.tell_the_newest),),
        plan=replace(STEPS, update=UpdateSpec(SYNC, 1), skips=True),
    ),
    # the script
    Mutation(
        "who leaves an epoch ends it for all",
        {Kind.ENDLESS, Kind.UNEXPLAINED},
        patches=((Script, "take", broken.pass_over_breaks),),
    ),
    Mutation(
        "nothing begins while somebody is at a task of an epoch that was left",
        {Kind.EVALUATION, Kind.SAVED, Kind.FAILED},
        patches=((Training, "is_idle", property(broken.is_closed)),),
        rule=ASYNC,
    ),
    Mutation(
        "an evaluation is added up in the order of tasks",
        {Kind.EVALUATION},
        patches=((Evaluation, "finish", broken.finish_in_order_of_arrival),),
        plan=replace(STEPS, epochs=(Epoch(evaluations=((9, 2), (7, 1))),), loops=(1,)),
    ),
    Mutation(
        "an epoch and the job end when every pserver has applied the last step",
        {Kind.TORN, Kind.BITS},
        Roles(master=broken.EndsBeforeAllIsApplied),
        ((Recovery, "is_applied", property(lambda self: True)),),
        plan=replace(STEPS, epochs=(Epoch(evaluations=()),), loops=(1,), last_saves=0),
        trouble=ROUGH,
    ),
    # what people see, and what is let go
    Mutation(
        "the status says who is waited for",
        {Kind.UNEXPLAINED},
        Roles(master=broken.SaysNothing),
    ),
    Mutation(
        "what a gone trainer did is forgotten",
        {Kind.UNBOUNDED},
        patches=((Script, "release", broken.keep_doing),),
    ),
    # cuts and checkpoints
    Mutation(
        "a manifest is put when all pieces are there",
        {Kind.CHECKPOINT, Kind.CRASHED},
        patches=((Checkpoints, "take_complete", recovery.take_when_marked),),
        is_saved=True,
    ),
    Mutation(
        "rows that change are copied aside for the cut",
        {Kind.CHECKPOINT, Kind.CRASHED},
        patches=((Table, "_keep", recovery.keep_nothing_aside),),
        is_saved=True,
    ),
    Mutation(
        "a cut is taken where the master says",
        {Kind.CHECKPOINT},
        Roles(pserver=recovery.CutsWhereItIs),
        rule=ASYNC,
        is_saved=True,
    ),
    # restoring
    Mutation(
        "a generation begins with its checkpoint",
        {Kind.ENDLESS, Kind.UNEXPLAINED},
        patches=((Generations, "begin", recovery.begin_empty),),
        is_saved=True,
    ),
    Mutation(
        "the state of optimizers is restored",
        {Kind.BITS},
        Roles(pserver=recovery.LoadsNoState),
        is_saved=True,
    ),
    Mutation(
        "the standing of tasks is restored",
        {Kind.COUNT},
        patches=((Batches, "restore", recovery.stand_at_the_beginning),),
        plan=SAVED_TASKS,
        trouble=Trouble(mean_s={"crash pserver": 4.0}),
    ),
    Mutation(
        "scripts that are further than the job are started again",
        {Kind.ENDLESS, Kind.UNEXPLAINED, Kind.COUNT, Kind.BITS},
        patches=((master_recovery, "_reaches", lambda *_: True),),
        plan=SAVED_STEPS,
        trouble=Trouble(mean_s={"storage full": 1.0, "crash pserver": 4.0}),
    ),
    Mutation(
        "a request of an older generation is refused",
        ANYTHING,
        Roles(pserver=recovery.TakesGenerationsAsOne),
        plan=SAVED_TASKS,
        trouble=Trouble(slow=0.4, lasts=True, mean_s={"crash pserver": 3.0}),
    ),
    # the next master
    Mutation(
        "the record is written before what follows from it is said",
        ANYTHING,
        patches=tuple((Recording, name, recovery.is_written) for name in ("has", "has_awaited", "has_lost")),
        plan=SAVED_STEPS,
        trouble=Trouble(mean_s={"record away": 2.0, "crash master": 2.0, "crash pserver": 4.0}),
    ),
    Mutation(
        "the next master looks for what the one before had not found",
        {Kind.ENDLESS},
        patches=((Recovery, "_make_record", recovery.record_what_is_not_known),),
        is_saved=True,
    ),
    Mutation(
        "nothing is pruned before the record says what is kept",
        {Kind.FAILED},
        patches=((Recovery, "done", recovery.prune_at_once),),
        plan=replace(STEPS, checkpoints=SavePlan(every_steps=1, keep=1)),
        trouble=Trouble(mean_s={"record away": 2.0, "crash all": 3.0}),
    ),
)
