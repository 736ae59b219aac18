"""Bounded staleness over whole epochs, counted apart from the master where nobody dies.

`watch.py` checks each task by itself in every run; here it is seen that tasks follow each other without a gap in the
count.
"""

from collections import defaultdict

import pytest

from evergrad.master.pace import Pace
from evergrad.messages import TrainDone, UpdateName, UpdateSpec
from evergrad.trainer.trainer import Trainer

from .faults import Kind
from .plan import Epoch, Plan
from .trouble import Trouble
from .world import Roles, Schedule, World

LATE = Trouble(loss=0.05, duplicate=0.1, slow=0.1)
SCHEDULES = 30


class Counted:
    """A world in which nobody dies, whose trainers tell what they have truly done since their first task.

    `begun`: how many batches were begun.
    """

    def __init__(self, most: int, seed: int) -> None:
        self.begun, self._most = 0, most
        self._base: dict[str, int] = {}
        self._done: dict[str, dict] = defaultdict(dict)
        counted = self

        class Told(Trainer):
            def ask(self, want, done):
                if isinstance(done, TrainDone) and done.attempt in counted._done[self.member]:
                    counted._done[self.member][done.attempt] += 1
                return (yield from super().ask(want, done))

            def may_begin(self, task, done):
                counted._done[self.member][task.attempt] = done
                yield from super().may_begin(task, done)
                counted._begins(self.member)

        plan = Plan(UpdateSpec(UpdateName.ASYNC, 4, max_staleness=most), (Epoch(40, 1),), (1,))
        self.world = World(Schedule(seed, plan, 2, 3, LATE), Roles(trainer=Told))

    def _begins(self, member: str) -> None:
        held = self.world.master_process.master._script.training.epoch.pace._held
        if member not in held:
            return
        self.begun += 1
        done = {m: self._total(m, task.before) for m, task in held.items()}
        if done[member] - min(done.values()) > self._most:
            self.world.fault(Kind.AHEAD, f"{member} by {done[member] - min(done.values())} batches")

    def _total(self, member: str, before: int) -> int:
        """Where it began, which is the master's word, and what it has done since."""
        return self._base.setdefault(member, before) + sum(self._done[member].values())


@pytest.mark.parametrize("most", [0, 1, 3])
def test_no_trainer_is_further_ahead_than_allowed_over_a_whole_epoch(seed, most):
    for one in range(seed, seed + SCHEDULES):
        counted = Counted(most, one)
        counted.world.run()
        assert not counted.world.faults, counted.world.report()
        assert counted.begun > 20


def test_a_slow_trainer_that_counts_as_fast_with_each_new_task_is_found(monkeypatch):
    def release(self, member):
        if self._held.pop(member, None) is not None:
            self._raise()

    monkeypatch.setattr(Pace, "release", release)
    found = [Counted(1, seed).world.run().faults for seed in range(SCHEDULES)]
    assert {fault.kind for faults in found for fault in faults} == {Kind.AHEAD}
