"""When and how the pservers update the parameters, as a user says it."""

from dataclasses import dataclass, field

from evergrad.checks import whole_number
from evergrad.errors import ConfigError
from evergrad.messages import UpdateName, UpdateSpec
from evergrad.optim import SGD, RowWiseAdagrad, Rule, checked_rule, learning_rate

MOST_BATCHES = 65_536
"""A step keeps the pushes of all its batches until it is committed."""


@dataclass(frozen=True, slots=True)
class Sync:
    """Synchronous steps: each is one update with the mean over all samples of `batches_per_step` batches.

    The batches are computed by whichever trainers there are, so the number of trainers is no part of the mathematics.

    Args:
        batches_per_step: batches of a step, which come from as many equal streams of the epoch's samples.
        backup_after: seconds after which a batch still being computed is given to a spare trainer too; None: eight
            times the average, at least one second, once ten steps have been measured.
        drop_after: seconds, counted from when it was first handed out, after which a step no longer waits for a batch:
            it is committed without those that are late once all others have come and at least one has. The mean is
            over the samples that came, so what the job makes depends on how fast it ran. None: a step is never
            committed without a batch.
    """

    batches_per_step: int = 1
    backup_after: float | None = None
    drop_after: float | None = None

    def spec(self) -> UpdateSpec:
        """The rule as it crosses the wire."""
        batches = whole_number("Sync: batches_per_step", self.batches_per_step, least=1)
        if batches > MOST_BATCHES:
            raise ConfigError(f"Sync: batches_per_step is {batches}; give at most {MOST_BATCHES:,}")
        _seconds("Sync: backup_after", self.backup_after)
        _seconds("Sync: drop_after", self.drop_after)
        if self.backup_after is not None and self.drop_after is not None and self.drop_after <= self.backup_after:
            raise ConfigError(
                f"Sync: drop_after is {self.drop_after:g} s and backup_after {self.backup_after:g} s, so batches would"
                " be dropped before a spare trainer gets them; give a larger drop_after"
            )
        return UpdateSpec(UpdateName.SYNC, batches, self.backup_after, drop_after_s=self.drop_after)


@dataclass(frozen=True, slots=True)
class Async:
    """Asynchronous updates: each batch is applied when it comes, once on every pserver; no trainer waits for another.

    Args:
        batches_per_task: consecutive batches handed to a trainer at a time.
        backup_after: as in `Sync`, for a task.
        ahead: whether a trainer pulls for the next batch, and pushes, while it computes; the next batch then lacks the
            update of the present one. False: it waits for both.
        max_staleness: a trainer begins a batch only when it has done at most so many batches more than the slowest
            trainer that has a task; 0: they go in lockstep. None: no trainer waits for another.
        push_every: batches of a task whose gradients are pushed as one, their mean over samples.
        pull_every: a trainer pulls dense parameters, and rows it has, once in so many batches of its task.
    """

    batches_per_task: int = 8
    backup_after: float | None = None
    ahead: bool = True
    max_staleness: int | None = None
    push_every: int = 1
    pull_every: int = 1

    def spec(self) -> UpdateSpec:
        """The rule as it crosses the wire."""
        batches = whole_number("Async: batches_per_task", self.batches_per_task, least=1)
        _seconds("Async: backup_after", self.backup_after)
        if not isinstance(self.ahead, bool):
            raise ConfigError(f"Async: ahead is {self.ahead!r}; give True or False")
        most = self.max_staleness
        return UpdateSpec(
            UpdateName.ASYNC,
            batches,
            self.backup_after,
            max_staleness=None if most is None else whole_number("Async: max_staleness", most, least=0),
            push_every=_every("push_every", self.push_every, batches),
            pull_every=_every("pull_every", self.pull_every, batches),
        )


@dataclass(frozen=True, slots=True)
class LocalSGD:
    """Local steps: trainers train by themselves for a while, then what has become of their models is averaged.

    A *round* is one update, made of `tasks_per_round` tasks. A task is the next `steps` batches of its stream of the
    epoch's samples: the trainer that has it pulls the model, takes an optimizer step of its own for each batch, and
    pushes the difference. The pservers apply the mean of the differences, weighted with samples, by the outer rule.
    Tasks are computed by whichever trainers there are, so the number of trainers is no part of the mathematics.

    *Source*: Stich 2019 (local SGD) with `outer=SGD(lr=1.0)`, which is plain averaging; DiLoCo (Douillard et al. 2023)
    with AdamW inside and `outer=SGD(lr=0.7, momentum=0.9, nesterov=True)`, but for the state, see `keep_inner_state`.

    Args:
        steps: batches of a task, each a step of its own; the last tasks of an epoch may have fewer.
        tasks_per_round: tasks of a round, which come from as many equal streams of the epoch's samples. More trainers
            than these have nothing to do but to stand in for slow ones.
        inner: the rule of those steps for parameters and tables, where `dense=` and `sparse=` of `job.optimizer` or the
            `optimizer=` of a table do not give it. Learning rates that are functions are asked for each step that a
            task takes after those before it in its stream.
        outer: the rule of the pservers, with base - result in the gradient's place. A learning rate that is a
            function is asked for each round.
        keep_inner_state: whether a trainer's optimizer state (averages, momentum) goes on from one of its tasks to its
            next. If not, each task begins without any, and the result is the same whoever computes it.
        backup_after: as in `Sync`, for a task.
    """

    steps: int
    tasks_per_round: int = 1
    inner: Rule | None = None
    outer: Rule = field(default_factory=lambda: SGD(lr=1.0))
    keep_inner_state: bool = False
    backup_after: float | None = None

    def spec(self) -> UpdateSpec:
        """The rule as it crosses the wire."""
        steps = whole_number("LocalSGD: steps", self.steps, least=1)
        tasks = whole_number("LocalSGD: tasks_per_round", self.tasks_per_round, least=1)
        if tasks > MOST_BATCHES:
            raise ConfigError(f"LocalSGD: tasks_per_round is {tasks}; give at most {MOST_BATCHES:,}")
        for name, rule in (("inner", self.inner), ("outer", self.outer)):
            if name == "outer" or rule is not None:
                _check_rule(name, rule)
        _seconds("LocalSGD: backup_after", self.backup_after)
        keep = bool(self.keep_inner_state)
        return UpdateSpec(UpdateName.LOCAL_SGD, tasks, self.backup_after, local_steps=steps, keep_inner_state=keep)


def _every(name: str, value: int, batches: int) -> int:
    every = whole_number(f"Async: {name}", value, least=1)
    if every > batches:
        raise ConfigError(
            f"Async: {name} is {every} and batches_per_task {batches}, but every task begins with a pull and ends with"
            f" a push; give a {name} of at most that, or a larger batches_per_task"
        )
    return every


Update = Sync | Async | LocalSGD


def _check_rule(name: str, rule: object) -> None:
    rule = checked_rule(f"LocalSGD: {name}=", rule)
    if isinstance(rule, RowWiseAdagrad):
        remedy = "give it as sparse= of job.optimizer" if name == "inner" else "give eg.SGD"
        raise ConfigError(f"LocalSGD: {name}= is RowWiseAdagrad, which is for tables only; {remedy}")
    rule.spec()
    learning_rate(rule.lr, 0)


def _seconds(what: str, value: float | None) -> None:
    if value is not None and not (type(value) in (int, float) and value > 0):
        raise ConfigError(f"{what} is {value!r}; give seconds above zero, or None")
