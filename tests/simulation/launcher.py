"""The launcher of a simulated job: it sees processes end, tells the master and starts others in their place."""

import itertools
import random
from typing import TYPE_CHECKING

from evergrad.messages import AnyMessage, Exited, Noted, Place, Request

from .processes import MASTER, MasterProcess, Process, PserverProcess, TrainerProcess

if TYPE_CHECKING:
    from .world import World

TELL_S = 0.5
WAITS_S = (0.0, 0.5, 1.0, 4.0)
"""After one of these a process that has ended is started again."""


class Launcher(Process):
    """As `evergrad.launch.run.Launcher`, of a job that makes checkpoints. Nothing happens to it but that all ends."""

    def __init__(self, world: "World", rng: random.Random) -> None:
        super().__init__(world, "sim://launcher")
        self._rng = rng
        self._requests = itertools.count(1)
        self._untold: dict[Request, Exited] = {}
        self.every(TELL_S, self._tell)

    def ended(self, process: Process) -> None:
        """A process has ended: another takes its place after a while."""
        match process:
            case MasterProcess():
                self.later(self._rng.choice(WAITS_S), self.world.begin_master)
            case PserverProcess(place=place):
                self._has_ended(f"pserver-{place}", process.pid)
                self.later(self._rng.choice(WAITS_S), lambda: self._begin_pserver(place))
            case TrainerProcess(title=title):
                self._has_ended(title, process.pid)
                self.later(self._rng.choice(WAITS_S), lambda: self.world.spawn(title))

    def receive(self, src: str, message: AnyMessage) -> None:
        if isinstance(message, Noted):
            self._untold.pop(message.request, None)

    def _begin_pserver(self, place: Place) -> None:
        self.world.begin_pserver(place)

    def _has_ended(self, name: str, pid: int) -> None:
        request = Request(next(self._requests))
        self._untold[request] = Exited(request, name, pid)

    def _tell(self) -> None:
        for message in self._untold.values():
            self.world.carry(self.name, MASTER, message)
