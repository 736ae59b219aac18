"""A job's tables on their way from the pservers into a model's files, piece by piece."""

from collections.abc import Iterator, Sequence

from evergrad.checkpoint.model import ModelWriter
from evergrad.messages import AnyArray, ExportPart, SaveTask, TableSpec
from evergrad.placement import slots_owned
from evergrad.trainer.session import Session


def save_tables(session: Session, task: SaveTask, tables: Sequence[TableSpec], writer: ModelWriter) -> None:
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
