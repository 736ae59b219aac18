"""The job that this process takes part in: made by `eg.init`, ended by whoever runs the script."""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from evergrad.errors import ConfigError
from evergrad.messages import Attempt, Done, Generation, Member, Raised, Want, WantEnd
from evergrad.trainer.driver import Driver
from evergrad.trainer.exchange import Exchange
from evergrad.trainer.trainer import Answer, Identity, Trainer
from evergrad.wire.process import Heartbeats
from evergrad.wire.transport import Network, check_address, new_member

MASTER, JOB, NAME, SEED = "EVERGRAD_MASTER", "EVERGRAD_JOB", "EVERGRAD_NAME", "EVERGRAD_SEED"
GOODBYE_S = 2.0


class AtTask(NamedTuple):
    """A task of training that the script is at, and how many of its batches every pserver is known to have applied.

    `version`: that of the first model with what the script has trained of the task; None in `Async`.
    """

    generation: Generation
    attempt: Attempt
    batches: int = 0
    version: int | None = None


@dataclass(slots=True, weakref_slot=True)
class Session:
    """A trainer and what drives it."""

    trainer: Trainer
    driver: Driver
    inside: str = ""
    """Where in the job's loops the script is, for people; empty outside of them."""
    task: AtTask | None = None
    """What the script is at, until it asks for what is next."""
    done: Done | None = None
    """What it has done and not reported yet."""
    counters: Counter[str] = field(default_factory=Counter)
    """What the master is told of this process with its heartbeats."""

    def ask(self, want: Want) -> Answer:
        """Report what is done; returns what to do next."""
        done, self.done = self.done, None
        return self.driver.run(self.trainer.ask(want, done))

    def finish(self) -> None:
        """The script is at its end; returns when the job is.

        Raises:
            JobOver: it ended; the status is the job's.
        """
        while True:
            self.ask(WantEnd())

    def leave(self, failure: str | None = None, raised: Raised | None = None) -> bool:
        """Say goodbye, with the script's traceback and the task it was at if it raised; returns whether it is heard."""
        return self.driver.say_goodbye(self.trainer.leave(failure, raised), GOODBYE_S)


current: Session | None = None
"""The session of this process, once `eg.init` has connected it."""


def connect(environment: Mapping[str, str], numerics: str) -> Session:
    """Join the job that the environment names.

    Raises:
        ConfigError: refused, or this process takes part in a job already.
    """
    global current
    if current is not None:
        raise ConfigError("eg.init() was called twice in one process of a job; call it once and pass the job around")
    master, job, name = check_address(environment[MASTER]), environment[JOB], environment[NAME]
    exchange = Exchange()
    network = Network(job, new_member(f"{name}.wire"))
    driver = Driver(exchange, network)

    def incarnation() -> Member:
        member = Member(new_member(name))
        if driver.heartbeats is None:
            driver.heartbeats = Heartbeats(job, master, member, network.counters)
        else:
            driver.heartbeats.rename(member)
        return member

    trainer = Trainer(exchange, master, Identity(name, os.getpid(), numerics), incarnation)
    driver.hear, driver.hear_term = trainer.hear, trainer.hear_term
    current = Session(trainer, driver, counters=network.counters)
    driver.run(trainer.join())
    return current
