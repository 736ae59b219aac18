"""Inference with a saved model: no job, no server."""

import os
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from evergrad.checkpoint.model import DENSE, Model, SavedTable
from evergrad.errors import CheckpointError, ConfigError
from evergrad.kernels.hashing import unique
from evergrad.kernels.initial import initial_rows, table_seed
from evergrad.lookup import Found, table_of
from evergrad.messages import Floats, Keys
from evergrad.nn import Table


def load_model(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Fill a torch model for inference: parameters, buffers and tables; returns it, in `eval()`.

    Args:
        model: a fresh model of the class that was trained.
        path: a folder that `job.save_model` wrote.

    Raises:
        CheckpointError: the folder holds no complete model, or not one of this class; says what differs.
        ConfigError: the model given is on the device "meta".
    Cost: the tables are held in memory, and sorted once: about 24 bytes a row besides the rows.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"load_model fills a torch module, not a {type(model).__name__}; give a fresh model")
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"load_model: {path!r} is no path of a folder that job.save_model wrote")
    saved = Model(Path(path).expanduser())
    tables = [m for m in model.modules() if isinstance(m, Table)]
    names = {m.table: None for m in tables}
    if more := [name for name in saved.manifest.tables if name not in names]:
        raise CheckpointError(f"{saved.path} is of another model: it has table {', '.join(map(repr, more))} more")
    rows = LocalRows({name: _local_table(saved, name, tables) for name in names})
    _load_dense(model, saved)
    for module in tables:
        module.source = rows
    return model.eval()


class LocalTable:
    """A table held in this process, for reading."""

    def __init__(self, name: str, saved: SavedTable, keys: Keys, values: Floats) -> None:
        self._name, self._saved = name, saved
        self._order = np.argsort(keys)
        self._keys, self._values = keys[self._order], torch.from_numpy(values)

    def rows(self, keys: Keys) -> Tensor:
        """Rows of these keys, shape (n, dim); a key without a row reads what the model says."""
        if self._keys.size == 0:
            return self._unseen(keys)
        at = np.minimum(np.searchsorted(self._keys, keys), self._keys.size - 1)
        rows = self._values[torch.from_numpy(self._order[at])]
        missing = self._keys[at] != keys
        if missing.any():
            rows[torch.from_numpy(missing)] = self._unseen(keys[missing])
        return rows

    def _unseen(self, keys: Keys) -> Tensor:
        if self._saved.unseen_zero:
            return torch.zeros(keys.size, self._saved.dim)
        seed = table_seed(self._saved.seed, self._name)
        return torch.from_numpy(initial_rows(keys, self._saved.dim, self._saved.initializer, seed))


class LocalRows:
    """The `RowSource` of a loaded model."""

    def __init__(self, tables: dict[str, LocalTable]) -> None:
        self._tables = tables

    def embed(self, table: str, ids: Tensor, padding: int | None) -> Tensor:
        """The row of each id."""
        rows, number, _ = table_of(self.find(table, ids, padding), ids.device)
        return torch.embedding(rows, number)

    def find(self, table: str, ids: Tensor, padding: int | None) -> Found:
        """Where these ids read."""
        flat: Keys = np.ascontiguousarray(ids.detach().reshape(-1).cpu().to(torch.int64).numpy())
        is_key = np.ones(flat.size, np.bool_) if padding is None else flat != padding
        keys, inverse = unique(flat[is_key])
        number = np.full(flat.size, -1)
        number[is_key] = inverse
        rows = self._tables[table].rows(keys)
        return Found(rows, torch.from_numpy(number).reshape(ids.shape), padding is not None, None)


def _local_table(saved: Model, name: str, modules: list[Table]) -> LocalTable:
    if name not in saved.manifest.tables:
        raise CheckpointError(
            f"{saved.path} is of another model: it has no table {name!r}, only"
            f" {', '.join(map(repr, saved.manifest.tables)) or 'none'}"
        )
    table = saved.manifest.tables[name]
    for module in modules:
        if module.table == name and module.dim != table.dim:
            raise CheckpointError(f"table {name!r} has dim {table.dim} in {saved.path} and {module.dim} in this model")
    return LocalTable(name, table, *saved.table(name))


def _load_dense(model: nn.Module, saved: Model) -> None:
    try:
        values = load_file(saved.verified(DENSE))
    except (OSError, SafetensorError) as exc:
        raise CheckpointError(f"{saved.path / DENSE} cannot be read: {exc}") from exc
    state = model.state_dict()
    wanted: dict[str, Tensor] = {
        **dict(model.named_parameters()),
        **{n: b for n, b in model.named_buffers() if n in state},
    }
    missing, extra = sorted(wanted.keys() - values.keys()), sorted(values.keys() - wanted.keys())
    if missing or extra:
        differ = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(extra)} more"
        raise CheckpointError(f"{saved.path} is of another model: it {differ}")
    for name, tensor in wanted.items():
        if tensor.is_meta:
            raise ConfigError(f"{name!r} has no memory; call model.to_empty(device='cpu') on the model first")
        if values[name].shape != tensor.shape:
            raise CheckpointError(
                f"{name!r} is {list(values[name].shape)} in {saved.path}, {list(tensor.shape)} in this model"
            )
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(values[name])
