"""Files of pieces: written and read one by one, with size and checksum."""

from threading import Thread

import msgspec

from evergrad.checkpoint.dense import dense_tensors
from evergrad.checkpoint.layout import dense_path, folder_of, rows_path
from evergrad.checkpoint.manifest import checksum
from evergrad.checkpoint.pieces import DensePiece, Piece, RowsPiece
from evergrad.checkpoint.rows import rows_tensors
from evergrad.checkpoint.storage import Storage
from evergrad.checkpoint.tensors import Tensors, decode, encode
from evergrad.errors import CheckpointError
from evergrad.messages import FileInfo, FileKind, Place, Schema


def write_piece(storage: Storage, serial: int, schema: Schema, place: Place, piece: Piece) -> tuple[FileInfo, ...]:
    """Write a piece of a cut; when this returns its files are durable.

    Returns:
        The file of a piece of rows; of a piece of a dense group that of its values, and that of the optimizer state of
        a trained one; none for an empty span.

    Raises:
        StorageError: it cannot be written. The same call may be made again.
    Cost: the piece once more in memory, its CRC-32, and the writing.
    """
    match piece:
        case RowsPiece():
            spec, slots = schema.tables[piece.table], piece.slots
            info = FileInfo(
                rows_path(spec.name, place, slots), 0, "", FileKind.ROWS, place, table=spec.name,
                slots=(slots.start, slots.stop), rows=piece.keys.size, candidates=piece.candidates.size,
            )  # fmt: skip
            return (_write(storage, serial, info, rows_tensors(spec, piece)),)
        case DensePiece():
            number, span = piece.group, piece.span
            return tuple(
                _write(
                    storage, serial,
                    FileInfo(
                        dense_path(kind, number, place, span), 0, "", kind, place,
                        group=number, span=(span.start, span.stop),
                    ),
                    tensors,
                )
                for kind, tensors in (dense_tensors(schema.groups[number], piece).items() if span else ())
            )  # fmt: skip


def read_file(storage: Storage, serial: int, info: FileInfo, buffer: memoryview) -> Tensors:
    """The tensors of a file, as views of `buffer`, which must have room for it; size and checksum are compared.

    Raises:
        CheckpointError: the file is not as it was written, or no safetensors file.
        StorageError: it cannot be read.
    """
    path = f"{folder_of(serial)}/{info.path}"
    data = buffer[: info.bytes]
    storage.read_into(path, data)
    if checksum([data]) != info.crc32:
        raise CheckpointError(f"{storage.where(path)} has changed since it was written; use another checkpoint")
    try:
        return decode(data)
    except CheckpointError as exc:
        raise CheckpointError(f"{storage.where(path)} {exc}") from exc


def _write(storage: Storage, serial: int, info: FileInfo, tensors: Tensors) -> FileInfo:
    parts = encode(tensors)
    crc32: list[str] = []
    # While the disk writes; an executor would take no work at the end of the interpreter, when the last one is saved.
    thread = Thread(target=lambda: crc32.append(checksum(parts)), name="evergrad-checksum", daemon=True)
    thread.start()
    try:
        storage.put(f"{folder_of(serial)}/{info.path}", parts)
    finally:
        thread.join()
    return msgspec.structs.replace(info, bytes=sum(part.nbytes for part in parts), crc32=crc32[0])
