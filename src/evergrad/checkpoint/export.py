"""A model out of a checkpoint, with no job running: as `job.save_model` writes it, or for plain PyTorch."""

import os
from collections.abc import Iterator

import numpy as np

from evergrad.checkpoint.manifest import Manifest
from evergrad.checkpoint.model import DenseTensor, new_model
from evergrad.checkpoint.output import Kind, Writable, new_folder
from evergrad.checkpoint.reader import dense, rows
from evergrad.checkpoint.storage import Storage
from evergrad.checkpoint.tensors import TYPES, Type, bytes_of, header
from evergrad.errors import ConfigError
from evergrad.init_rows import InitName
from evergrad.kernels.half import encoded
from evergrad.messages import AnyArray, FileKind, Floats, Keys, TableSpec

STATE, INDEX = "model.safetensors", "keys.safetensors"
EXPORTED = Kind("model for torch", STATE, lambda name: name in (STATE, INDEX))


def export_model(storage: Storage, manifest: Manifest, target: str | os.PathLike[str]) -> None:
    """Write the model to a folder or URL, with the same bytes as `job.save_model` at the checkpoint's version.

    Raises:
        ConfigError: something that is no model is there, or it cannot be written.
        CheckpointError: the checkpoint is not as it was written; nothing at the target was changed.
    Memory: all dense values once and in the model's types, and two files of the checkpoint.
    Cost: two readings of the tables' files, of which the model wants all keys first.
    """
    with new_model(target, manifest.schema.seed) as writer:
        writer.dense(dense_tensors(storage, manifest))
        for spec in manifest.schema.tables:
            keys, values = _keys(storage, manifest, spec), _values(storage, manifest, spec)
            writer.table(spec, manifest.rows(spec.name), keys, values)


def export_torch(storage: Storage, manifest: Manifest, target: str | os.PathLike[str]) -> list[str]:
    """Write a plain state dict, with `NAME.weight` for a table, and which row of it each key has.

    A weight has one row more than the table: the last is for keys that have none. The index of a table is `NAME.keys`,
    sorted, and `NAME.rows`, the row of each.

    Returns:
        What the tables' answers to keys without a row cannot be here, one sentence for each such table.

    Raises:
        ConfigError: a parameter is called as a table's weight, or something else is at the target.
        CheckpointError: the checkpoint is not as it was written; nothing at the target was changed.
    Memory: all dense values once and in the model's types, two files of the checkpoint, and 24 bytes a row of the
    largest table.
    """
    tables = manifest.schema.tables
    found = dense_tensors(storage, manifest)
    _check_names(found, tables)
    with new_folder(target, EXPORTED) as output:
        with output.writer(INDEX) as file:
            counts = {spec.name: manifest.rows(spec.name) for spec in tables}
            shapes = {f"{name}.{kind}": (TYPES["int64"], (n,)) for name, n in counts.items() for kind in _INDEX}
            file.write(header(shapes))
            for spec in tables:
                _write_index(file, np.concatenate([np.empty(0, np.int64), *_keys(storage, manifest, spec)]))
        with output.writer(STATE) as file:
            _write_state(file, storage, manifest, found)
    return [sentence for spec in tables if (sentence := _unlike(spec))]


def dense_tensors(storage: Storage, manifest: Manifest) -> list[DenseTensor]:
    """All parameters and buffers, in the types of the torch model."""
    found = []
    for number, group in enumerate(manifest.schema.groups):
        values = dense(storage, manifest, number, range(group.size), (FileKind.DENSE,)).values
        start = 0
        for parameter in group.parameters:
            flat = values[start : start + parameter.size]
            found.append(DenseTensor(parameter.name, parameter.dtype, parameter.shape, _in_type(flat, parameter.dtype)))
            start += parameter.size
    return found


_INDEX = ("keys", "rows")


def _write_index(file: Writable, keys: Keys) -> None:
    order = np.argsort(keys)
    file.write(bytes_of(keys[order]))
    file.write(bytes_of(order.astype(np.int64, copy=False)))


def _write_state(file: Writable, storage: Storage, manifest: Manifest, found: list[DenseTensor]) -> None:
    """The state dict: the widest types first, so that all are aligned."""
    weights = {f"{spec.name}.weight": spec for spec in manifest.schema.tables}
    kinds: dict[str, tuple[Type, tuple[int, ...]]] = {t.name: (TYPES[t.dtype], t.shape) for t in found}
    for name, spec in weights.items():
        kinds[name] = (TYPES["float32"], (manifest.rows(spec.name) + 1, spec.dim))
    ordered = dict(sorted(kinds.items(), key=lambda item: (-item[1][0].bytes, item[0])))
    data = {t.name: t.data for t in found}
    file.write(header(ordered))
    for name in ordered:
        if name in data:
            file.write(data[name])
            continue
        for values in _values(storage, manifest, weights[name]):
            file.write(bytes_of(values))
        file.write(bytes_of(np.full(weights[name].dim, _unseen(weights[name]), np.float32)))


def _check_names(found: list[DenseTensor], tables: tuple[TableSpec, ...]) -> None:
    names = {tensor.name for tensor in found}
    for spec in tables:
        if f"{spec.name}.weight" in names:
            raise ConfigError(
                f"the weight of table {spec.name!r} would be called as the parameter {spec.name}.weight; export without"
                " --format torch, or train with another name for the table"
            )


def _unseen(spec: TableSpec) -> float:
    """What the elements of a key without a row are."""
    is_constant = not spec.unseen_zero and spec.initializer.name is InitName.CONSTANT
    return spec.initializer.a if is_constant else 0.0


def _unlike(spec: TableSpec) -> str | None:
    if spec.unseen_zero or spec.initializer.name in (InitName.ZEROS, InitName.CONSTANT):
        return None
    return f"table {spec.name!r}: a key without a row reads zeros here, its first value in the job"


def _in_type(values: AnyArray, dtype: str) -> memoryview:
    return bytes_of(encoded(values, dtype) if values.dtype == np.float32 else values.astype(dtype))


def _keys(storage: Storage, manifest: Manifest, spec: TableSpec) -> Iterator[Keys]:
    return (piece.keys for piece in rows(storage, manifest, spec.name))


def _values(storage: Storage, manifest: Manifest, spec: TableSpec) -> Iterator[Floats]:
    return (piece.rows[:, : spec.dim] for piece in rows(storage, manifest, spec.name))
