"""A job's model on its way from the pservers into files, tables piece by piece."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from evergrad.checkpoint.model import ModelWriter, new_model
from evergrad.errors import EvergradError
from evergrad.job.bound import BoundModel, Version
from evergrad.messages import AnyArray, ExportPart, SaveDone, SaveTask, TableSpec
from evergrad.placement import slots_owned
from evergrad.trainer.session import Session
from evergrad.trainer.trainer import Void


def save(session: Session, bound: BoundModel, task: SaveTask, path: Path, seed: int) -> SaveDone | None:
    """Save a version to a folder; returns what to report, or None if it falls to another trainer."""
    try:
        with new_model(path, seed) as writer:
            writer.dense(bound.dense_at(Version(task.generation, task.version)))
            _save_tables(session, task, bound.tables, writer)
            leads = session.driver.run(session.trainer.is_leader(task.attempt))
            if not leads:  # frozen meanwhile, and another one has saved, or will
                raise Void(task.generation)
    except EvergradError as exc:
        return SaveDone(task.generation, task.attempt, f"save_model: {exc}")
    except Void:
        return None
    return SaveDone(task.generation, task.attempt)


def _save_tables(session: Session, task: SaveTask, tables: Sequence[TableSpec], writer: ModelWriter) -> None:
    """Write all tables of a version. Memory: one piece of a table at a time."""
    counts = session.driver.run(session.trainer.count_rows(task))
    for number, (spec, rows) in enumerate(zip(tables, counts, strict=True)):
        keys, values = (_pieces(session, task, number, part) for part in (ExportPart.KEYS, ExportPart.VALUES))
        writer.table(spec, rows, keys, values)


def _pieces(session: Session, task: SaveTask, table: int, part: ExportPart) -> Iterator[AnyArray]:
    """A table's keys or values, sorted by (slot, key): place after place, since places own consecutive slots."""
    places = session.trainer.places()
    for place in range(places):
        slot: int | None = slots_owned(place, places).start
        while slot is not None:
            exported = session.driver.run(session.trainer.export(task, table, part, place, slot))
            yield exported.part
            slot = exported.next_slot
