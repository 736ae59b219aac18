"""Every queue and note of every role has a bound; here they are, and what is looked at during a run.

what                                    at most
pserver: pulls that wait                two of each trainer process there was: one it gave up as the master died;
                                        and one more for each master it has not heard of
pserver: pushes staged                  one for each handing-out of a task of the present step
pserver: pushes of which parts are here the same; in `Async` one of each trainer process there was
pserver: memory promised                what its staged pushes and parts may need
pserver: tasks it counts the batches of the tasks of an epoch
pserver: batches that wait for a cut    64
pserver: pieces that wait for storage   1
master: requests open, answers kept     one a member
master: questions whether to go on      one a member
master: attempts open                   one a member
master: attempts remembered             one for each handing-out of a task
master: commits not acknowledged        two a pserver
master: notes                           20
master: evaluations and savings         the script's
master: errands                         16
trainer: requests open or answered      one a pserver (`Async` that pulls ahead: three), and one to the master
anybody: messages waiting while frozen  1000 for each sender
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from evergrad.master.master import Master
from evergrad.master.progress import MAX_NOTES
from evergrad.messages import INIT_STEP
from evergrad.pserver.batches import MOST_WAITING
from evergrad.pserver.pserver import Pserver

from .processes import MasterProcess, Process, PserverProcess, TrainerProcess

if TYPE_CHECKING:
    from .world import World

HIGH_WATER = 1000
Queue = tuple[str, int, int]
"""Something that grows and shrinks, how long it is and may be."""

MOST_ERRANDS = 6
"""One of each kind is under way at most."""


def queues(world: "World", process: Process) -> Iterator[Queue]:
    """All queues of a process."""
    yield "messages waiting", process.inbox, HIGH_WATER * len(world.processes)
    match process:
        case PserverProcess():
            yield from of_pserver(world, process.pserver)
            yield from _promised(world, process.pserver)
            yield "pieces that wait to be written", len(process.saver.line.waiting), 1
        case MasterProcess():
            yield "errands", len(process.clerk.line.waiting), MOST_ERRANDS
            yield from _of_master(world, process.master)
        case TrainerProcess():
            at_most = (3 if world.plan.ahead else 1) * world.places + 1
            yield "requests", len(process.exchange._open) + len(process.exchange._answers), at_most


def of_pserver(world: "World", pserver: Pserver) -> Iterator[Queue]:
    """The queues of a pserver that every message may change."""
    step = pserver._version
    handed_out = world.watch.handed_out[world.era, pserver.generation, step]
    if pserver._parked:
        waiting = {src for src, _ in pserver._parked}
        unheard = world.master_process.master._term - pserver.term
        yield "pulls that wait", len(pserver._parked), len(waiting) * (2 + unheard)
        yield "trainers whose pulls wait", len(waiting), world.trainers_ever
    yield "pushes staged", len(pserver._staged), handed_out
    is_stepped = world.plan.is_sync or step == INIT_STEP
    yield "pushes in parts", len(pserver._parts._open), handed_out if is_stepped else world.trainers_ever
    yield "tasks counted", len(pserver._batches.at.batches), world.plan.work
    yield "batches that wait for a cut", len(pserver._batches._waiting), MOST_WAITING


def _promised(world: "World", pserver: Pserver) -> Iterator[Queue]:
    if pserver._held is not None and (world.plan.is_sync or pserver._version == INIT_STEP):
        parts = (part for of in pserver._parts._open.values() for part in of.values())
        needed = sum(t.keys.size for push in (*pserver._staged.values(), *parts) for t in push.tables)
        yield "rows promised", sum(pserver._promised.values()), needed


def _of_master(world: "World", master: Master) -> Iterator[Queue]:
    members = len(master.members._members)
    yield "requests open", len(master._waiting), members
    yield "questions whether to go on", len(master._pausing), members
    yield "answers kept", len(master._answered), members
    yield "members finished", len(master._finished), members
    yield "notes", len(master._progress.notes), MAX_NOTES
    if (pservers := master._recovery.generations.pservers) is not None:
        yield "commits not acknowledged", max(len(told) for told in pservers._open.values()), 2
    script = master._script
    if script is None:
        return
    yield "members doing something", len(script.doing), members
    calls = [*script._evaluations.values(), *script._savings.values()]
    yield "calls", len(calls), world.plan.calls
    epochs = [script.training.epoch] if script.training.epoch is not None else []
    pools = [script._initial, *(part._pool for part in [*calls, *epochs])]
    held = [holder for pool in pools for task in pool._tasks.values() for holder, _ in task.open.values()]
    yield "attempts open", len(held), len(set(held))
    yield "members with an attempt", len(set(held)), members
    unsent = members  # a master that is frozen between two messages has decided on answers that it has not sent
    yield "attempts remembered", sum(len(pool._index_of) for pool in pools), world.watch.attempts + unsent
