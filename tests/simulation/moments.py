"""What pservers held when they took their parts of a cut, and whether the checkpoint made of them is that, whole."""

from typing import TYPE_CHECKING, NamedTuple

from evergrad.checkpoint.catalogue import entries
from evergrad.checkpoint.manifest import Manifest, read_manifest
from evergrad.checkpoint.pieces import RowsPiece
from evergrad.checkpoint.reader import pieces
from evergrad.checkpoint.storage import Storage
from evergrad.errors import EvergradError
from evergrad.master.checkpoints import GATE_TRIES
from evergrad.master.master import Master
from evergrad.messages import INIT_STEP, Generation, Place, Standing
from evergrad.placement import slots_owned
from evergrad.pserver.model import Model

from .faults import Kind
from .oracle import PARTS, Call
from .storage import URL
from .whole import ALL_BYTES

if TYPE_CHECKING:
    from .processes import PserverProcess
    from .world import World


class Moment(NamedTuple):
    """Where a pserver stood: its version, and in `Async` the epoch and how far its tasks were."""

    version: int
    epoch: int
    standing: Standing


class Restored(NamedTuple):
    """Stands for a pserver: its place and its part of the model."""

    place: Place
    model: Model


class Part(NamedTuple):
    """What a pserver held at a cut: keys and values of each table, elements of each dense group."""

    moment: Moment | None
    tables: list[tuple[bytes, bytes]]
    groups: list[bytes]


class Moments:
    """All cuts that were taken, and all checkpoints that were offered."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._parts: dict[tuple[int, int, Place], Part] = {}
        self.whole: set[int] = set()
        """The serials of checkpoints that were offered, and are right."""
        self._gave_up_in = -1
        """The last era whose job ended without a last checkpoint, since saving failed again and again."""

    def watch(self, process: "PserverProcess") -> None:
        """Note what this pserver holds whenever it takes its part of a cut."""
        cutting = process.pserver._cutting
        take = cutting.cut

        def cut(serial, model):
            part = cutting.part
            was_taken = part is not None and part.serial == serial and part.is_taken
            take(serial, model)
            part = cutting.part
            if not was_taken and part is not None and part.serial == serial and part.updates is not None:
                self._parts[self._world.era, serial, process.place] = self._part(process, model)

        cutting.cut = cut

    def offered(self, serial: int) -> int:
        """The manifest of a checkpoint is there; returns the version it is of."""
        try:
            with Storage(URL) as storage:
                manifest = read_manifest(storage, serial)
                found = _read(storage, manifest)
        except EvergradError as exc:
            self._fault(f"{serial} is offered and not whole: {exc}")
            return 0
        parts = [self._parts.get((self._world.era, serial, Place(place))) for place in range(manifest.places)]
        if None in parts:
            self._fault(f"{serial} is offered and has not been cut everywhere")
        elif wrong := self._differing(manifest, found, parts):
            self._fault(f"{serial} {wrong}")
        self.whole.add(serial)
        return manifest.progress.version

    def stand_in(self) -> bool:
        """Where a pserver has died since and taken its part of the last model along, judge what was saved of that.

        Returns:
            False where it was not: storage has failed again and again.
        """
        world = self._world
        master = world.master_process.master
        if all(holds(process, master._recovery.generations.number) for process in world.pservers):
            return True
        checkpoints = master._recovery.checkpoints
        if checkpoints._failed.times >= GATE_TRIES:
            return False
        with Storage(URL) as storage:
            manifest = read_manifest(storage, checkpoints.durable[-1].serial)
            world.pservers = [_restored(storage, manifest, Place(place)) for place in range(world.places)]
        return True

    def calls(self) -> tuple[set[Call], set[Call]]:
        """The evaluations and savings that were done at the newest checkpoint."""
        with Storage(URL) as storage:
            manifest = next((e.manifest for e in reversed(entries(storage)) if e.manifest), None)
        if manifest is None:
            return set(), set()
        return {(e.epoch, e.ordinal) for e in manifest.evaluations}, {(s.epoch, s.ordinal) for s in manifest.savings}

    def judge(self) -> None:
        """What is offered at the end is what was found to be right, and what the master knows."""
        with Storage(URL) as storage:
            there = {entry.serial for entry in entries(storage) if entry.manifest is not None}
        checkpoints = self._world.master_process.master._recovery.checkpoints
        known = {d.serial for d in checkpoints.durable}
        if not there <= self.whole:
            self._fault(f"{sorted(there - self.whole)} are offered and were never made")
        if not known <= there:
            self._fault(f"{sorted(known - there)} are known to the master and not there")
        self.stopped(self._world.master_process.master)
        if self._gave_up_in < self._world.era:
            self._judge_newest(max(known))

    def stopped(self, master: Master) -> None:
        """A master is no more, or is at its end; the next one does not know how often saving has failed."""
        if master.is_over and master._recovery.checkpoints._failed.times >= GATE_TRIES:
            self._gave_up_in = self._world.era

    def _judge_newest(self, serial: int) -> None:
        """The last model is in a checkpoint."""
        with Storage(URL) as storage:
            found = _read(storage, read_manifest(storage, serial))
        parts = [self._contents(process.place, process.model) for process in self._world.pservers]
        if _joined(parts) != found:
            self._fault(f"{serial} is the last one and has another model than the pservers")

    def _part(self, process: "PserverProcess", model: Model) -> Part:
        pserver = process.pserver
        at = Moment(pserver._version, *pserver._batches.at._replace(batches=pserver._batches.standing))
        return self._contents(process.place, model)._replace(moment=at)

    def _contents(self, place: Place, model: Model) -> Part:
        schema = self._world.plan.schema
        first = slots_owned(place, self._world.places).start
        tables = [
            tuple(model.export(number, part, first, ALL_BYTES)[0].tobytes() for part in PARTS)
            for number in range(len(schema.tables))
        ]
        return Part(None, tables, [model.span(number).tobytes() for number in range(len(schema.groups))])

    def _differing(self, manifest: Manifest, found, parts: list[Part]) -> str:
        """What of a checkpoint is not as the pservers were when they took its cut."""
        moments = {part.moment for part in parts}
        if len(moments) > 1:
            return f"is of several moments: {sorted(moments)}"
        (moment,), told = moments, manifest.progress
        if self._world.plan.is_sync:
            is_same = moment.version == told.version
        else:
            epoch = told.epoch + 1 if told.is_closed else max(told.epoch, 0)
            is_same = (moment.epoch, moment.standing) == (epoch, () if told.is_closed else told.standing)
        if not is_same:
            return f"says that it is of {told} and is of {moment}"
        if _joined(parts) != found:
            return "has other rows or elements than the pservers had"
        return ""

    def _fault(self, text: str) -> None:
        self._world.fault(Kind.CHECKPOINT, f"checkpoint {text}")


def _joined(parts: list[Part]) -> tuple[list[tuple[bytes, ...]], list[bytes]]:
    """Keys and values of each table, and elements of each group, of all places."""
    tables = [tuple(b"".join(half) for half in zip(*of_table, strict=True)) for of_table in _by(parts, "tables")]
    return tables, [b"".join(group) for group in _by(parts, "groups")]


def _by(parts: list[Part], name: str) -> list[tuple]:
    """What parts have of each table or group, place by place."""
    return list(zip(*(getattr(part, name) for part in parts), strict=True))


def holds(process: "PserverProcess", generation: Generation) -> bool:
    """Whether a pserver has a model of this generation that trainers may read."""
    pserver = process.pserver
    is_there = process.is_alive and pserver._held is not None and pserver._version != INIT_STEP
    return is_there and pserver.generation == generation


def _restored(storage: Storage, manifest: Manifest, place: Place) -> Restored:
    model = Model(manifest.schema, place, manifest.places)
    model.begin_load(manifest.updates)
    for piece in pieces(storage, manifest, place, manifest.places):
        model.load(piece)
    model.check_loaded()
    return Restored(place, model)


def _read(storage: Storage, manifest: Manifest) -> tuple[list[tuple[bytes, bytes]], list[bytes]]:
    """Keys and values of each table, and elements of each group, of all files."""
    tables: list[list[list[bytes]]] = [[[], []] for _ in manifest.schema.tables]
    groups = [b"" for _ in manifest.schema.groups]
    for piece in pieces(storage, manifest, 0, 1):
        if isinstance(piece, RowsPiece):
            dim = manifest.schema.tables[piece.table].dim
            for half, values in zip(tables[piece.table], (piece.keys, piece.rows[:, :dim]), strict=True):
                half.append(values.tobytes())
        else:
            groups[piece.group] = piece.values.tobytes()
    return [(b"".join(keys), b"".join(rows)) for keys, rows in tables], groups
