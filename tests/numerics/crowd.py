"""Jobs with several trainers in one process: each runs the script in a thread of its own, one of them at a time.

Whenever a trainer waits for the job another one, drawn at random, goes on. Each has random generators of its own, as in
a process of its own. Trainers may be killed at random where they wait; another one then begins the script anew.
"""

import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
import torch

from evergrad.job.embedded import MASTER, LocalNetwork
from evergrad.messages import AnyMessage, Exited, Member, Request, Send
from evergrad.trainer.driver import Driver
from evergrad.trainer.exchange import Exchange
from evergrad.trainer.session import Session
from evergrad.trainer.trainer import Identity, JobOver, Trainer

Script = Callable[[Session], None]
TICK, PATIENCE = 50, 5_000
"""After so many turns without a message the master's clock goes on; after so many the job stands still."""


class Killed(BaseException):
    """Unwinds a trainer that is killed, or whose job stands still."""


class Crowd(LocalNetwork):
    """A job inside this process: a master, pservers, and trainers that take turns.

    Args:
        pservers: how many.
        trainers: how many run at any time.
        script: what each of them runs.
        seed: decides who goes on, and who is killed when.
        kills: how many are killed.
    """

    def __init__(self, pservers: int, trainers: int, script: Script, seed: int = 0, kills: int = 0) -> None:
        super().__init__(pservers)
        self.kills_left, self.killed = kills, 0
        self._script, self._rng = script, random.Random(seed)
        self._seats: dict[str, _Seat] = {}
        self._errors: list[BaseException] = []
        self._over = threading.Event()
        self._started = self._idle = 0
        for _ in range(trainers):
            self._add()

    def run(self) -> "Crowd":
        """Run the job to its end; raises what a script has raised."""
        self._pick().go.set()
        self._over.wait()
        if self._errors:
            raise self._errors[0]
        assert self.master.is_over
        assert self.master.failure is None, self.master.failure
        return self

    def hand_over(self, seat: "_Seat") -> None:
        """Let somebody go on, and wait for this one's turn."""
        self._idle = 0 if seat.inbox else self._idle + 1
        if self._idle > PATIENCE:
            raise Killed("the job stands still")
        if self._idle % TICK == TICK - 1:
            self._now_s += 1.0
            self.send(MASTER, self.master.tick(self._now_s))
        other = self._pick()
        if other is seat:
            return
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        other.go.set()
        seat.go.wait()
        seat.go.clear()
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if self._errors:
            raise Killed

    def carry(self) -> None:
        """Hand messages on until only some for trainers are left."""
        while self._queue:
            src, to, message = self._queue.popleft()
            if to in self._roles:
                self._queue.extend((to, send.to, send.message) for send in self._roles[to](src, message))
            elif to in self._seats:
                self._seats[to].inbox.append((src, message))

    def send(self, src: str, sends: Iterable[Send]) -> None:
        """Carry what a trainer sends, and whatever follows from it."""
        self._queue.extend((src, send.to, send.message) for send in sends)
        self.carry()

    def may_kill(self) -> None:
        """Where a trainer waits it may be killed."""
        if self.kills_left and self._rng.random() < 0.1:
            self.kills_left -= 1
            self.killed += 1
            raise Killed

    def _pick(self) -> "_Seat":
        return self._seats[self._rng.choice(sorted(self._seats))]

    def _add(self) -> None:
        self._started += 1
        seat = _Seat(self, f"trainer-{self._started}", self._started)
        self._seats[seat.name] = seat
        threading.Thread(target=self._run_one, args=(seat,), name=seat.name).start()

    def _run_one(self, seat: "_Seat") -> None:
        seat.go.wait()
        seat.go.clear()
        is_killed = False
        try:
            session = seat.session()
            self._script(session)
            session.finish()
        except JobOver as over:
            if over.failure is not None:
                self._errors.append(AssertionError(over.failure))
        except Killed as killed:
            is_killed = not self._errors and not killed.args
            if killed.args:
                self._errors.append(AssertionError(str(killed)))
        except BaseException as error:
            self._errors.append(error)
        del self._seats[seat.name]
        if is_killed:
            self._queue.append((seat.name, MASTER, Exited(Request(0), seat.name, seat.pid)))
            self.carry()
            self._add()
        if self._seats:
            self._pick().go.set()
        else:
            self._over.set()


class _Seat:
    """One trainer's place at the table: carries its messages and waits for its turn."""

    def __init__(self, crowd: Crowd, name: str, pid: int) -> None:
        self.name, self.pid = name, pid
        self.go = threading.Event()
        self.inbox: deque[tuple[str, AnyMessage]] = deque()
        self._crowd = crowd

    def session(self) -> Session:
        exchange = Exchange()
        driver = Driver(exchange, self)
        trainer = Trainer(
            exchange, MASTER, Identity(self.name, self.pid, ""), lambda: Member(f"{self.name}.{os.urandom(4).hex()}")
        )
        driver.run(trainer.join())
        return Session(trainer, driver)

    def exchange(self, sends: Iterable[Send], timeout_s: float) -> list[tuple[str, AnyMessage]]:
        self._crowd.send(self.name, sends)
        if timeout_s:
            self._crowd.may_kill()
            self._crowd.hand_over(self)
        received = list(self.inbox)
        self.inbox.clear()
        return received

    def close(self) -> None:
        pass
