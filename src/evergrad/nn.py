"""Modules whose rows live on the pservers (or, for inference, in a loaded model)."""

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol
from urllib.parse import quote

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evergrad import init_rows
from evergrad.checks import whole_number
from evergrad.errors import ConfigError
from evergrad.init_rows import Initializer
from evergrad.lookup import Found, pool, table_of
from evergrad.messages import Evict
from evergrad.optim import Rule, checked_rule

UNSEEN = ("zeros", "initializer")
MODES = ("sum", "mean")
MAX_NAME = 200
"""Of a table's name, with what is no plain letter written as in a URL: it becomes a file's name."""


def _is_name(name: object) -> bool:
    return isinstance(name, str) and bool(name) and "/" not in name and name.isprintable()


class RowSource(Protocol):
    """Where a table's rows come from. Ids are int64 or int32 of any shape; one that is `padding` has no row."""

    def embed(self, table: str, ids: Tensor, padding: int | None) -> Tensor:
        """The row of each id, zeros for padding: a tensor of shape (*ids.shape, dim) that nobody else holds."""

    def find(self, table: str, ids: Tensor, padding: int | None) -> Found:
        """Where these ids read."""


class Table(nn.Module):
    """What `Embedding` and `EmbeddingBag` share: the name and shape of a table, and where its rows come from.

    A table has no size: any int64 is a key, and a row exists from its first update on.
    """

    is_pooled: ClassVar[bool]
    """Whether rows are pooled, so that no vector is made for each id."""

    def __init__(
        self,
        name: str,
        dim: int,
        *,
        init: Initializer | None = None,
        feature: str | None = None,
        padding_idx: int | None = None,
        unseen: str = "zeros",
        optimizer: Rule | None = None,
        min_count: int = 1,
        ttl: int | None = None,
        max_rows: int | None = None,
        evict: str = "recent",
    ) -> None:
        super().__init__()
        if not _is_name(name):
            raise ConfigError(f"{name!r} is no name for a table; give printable characters without a slash")
        if len(quote(name, safe="")) > MAX_NAME:
            raise ConfigError(f"the table name {name[:20]!r}... is too long for a file name; give a shorter one")
        dim = whole_number(f"table {name!r}: dim", dim, least=1)
        if init is not None and not isinstance(init, Initializer):
            raise ConfigError(f"table {name!r}: init is {init!r}; give one of eg.init_rows, as eg.init_rows.normal()")
        if unseen not in UNSEEN:
            raise ConfigError(f"table {name!r}: unseen is {unseen!r}; give one of {', '.join(UNSEEN)}")
        for option, number in (("min_count", min_count), ("ttl", ttl), ("max_rows", max_rows)):
            if number is not None or option == "min_count":
                whole_number(f"table {name!r}: {option}", number, least=1)
        if evict not in tuple(Evict):
            raise ConfigError(f"table {name!r}: evict is {evict!r}; give one of {', '.join(Evict)}")
        if feature is not None and (type(feature) is not str or not feature):
            raise ConfigError(f"table {name!r}: feature is {feature!r}; give the name of an entry of the batch")
        if padding_idx is not None and not (type(padding_idx) is int and -(2**63) <= padding_idx < 2**63):
            raise ConfigError(f"table {name!r}: padding_idx is {padding_idx!r}; give an int64, or None")
        self.table, self.dim = name, dim
        self.init = init_rows.normal() if init is None else init
        self.feature = name if feature is None else feature
        self.padding_idx = padding_idx
        self.unseen = unseen
        self.optimizer = None if optimizer is None else checked_rule(f"optimizer= of table {name!r}", optimizer)
        self.min_count, self.ttl, self.max_rows, self.evict = min_count, ttl, max_rows, Evict(evict)
        self.source: RowSource | None = None

    def ids_in(self, batch: Mapping[Any, Any]) -> Tensor | None:
        """The ids of this table that a batch holds under the name of its feature; None if it holds none."""
        if self.feature not in batch:
            return None
        value = batch[self.feature]
        ids = value[0] if isinstance(value, tuple) and value else value
        return ids if isinstance(ids, Tensor) and ids.dtype in (torch.int64, torch.int32) else None

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"{self.table!r}, dim={self.dim}"

    def _source_for(self, ids: Tensor) -> RowSource:
        """Where rows come from, if there are rows and these are ids."""
        if self.source is None:
            raise ConfigError(
                f"table {self.table!r} has no rows here: a job's rows are there inside its loops over batches and in"
                " evaluate, those of a saved model after eg.load_model(model, path)"
            )
        self._check_tensor(ids)
        if ids.dtype not in (torch.int64, torch.int32):
            raise ConfigError(
                f"table {self.table!r}: ids of {ids.dtype}; give int64 (eg.hash_ids makes them of strings)"
            )
        return self.source

    def _check_tensor(self, ids: object) -> None:
        if not isinstance(ids, Tensor):
            raise ConfigError(f"table {self.table!r}: ids are of type {type(ids).__name__}; give a tensor of int64")


class Embedding(Table):
    """A lookup table with rows on the pservers; used like `torch.nn.Embedding`, but without a number of rows.

    Args:
        name: the table; modules of one name share it.
        dim: length of a row.
        init: first values of rows (`eg.init_rows`); as in torch a standard normal distribution if not given.
        feature: the entry of a batch whose ids are pulled ahead; the table's name if not given.
        padding_idx: an id that reads as zeros and is never trained; no row is made for it.
        unseen: what an id without a row reads in evaluation and in a loaded model: "zeros" or "initializer".
        optimizer: the table's own rule, which goes before `sparse=` of `job.optimizer`.
        min_count: an id gets a row in the step that is the `min_count`-th in which it is trained; before, it reads as
            its first value and is not trained.
        ttl: a row that was not trained for this many steps of the table is evicted, soon after; its id starts anew.
        max_rows: about how many rows there are at most; each of 16,384 sets of ids has its share, of at least one.
        evict: which rows then make room for new ones: the least recently ("recent") or least often ("count") trained.
    """

    is_pooled = False

    def forward(self, input: Tensor) -> Tensor:
        """Rows of the ids: int64 or int32 of any shape (*) give float32 of shape (*, dim)."""
        return self._source_for(input).embed(self.table, input, self.padding_idx)


class EmbeddingBag(Table):
    """Sums or means of rows of a table, as `torch.nn.EmbeddingBag` computes them.

    Args:
        name: the table; modules of one name share it.
        dim: length of a row.
        mode: "mean" or "sum".
        include_last_offset: offsets have one entry more, the number of ids.
        init: as in `Embedding`.
        feature: as in `Embedding`; the entry is a tensor of ids or a tuple that begins with one.
        padding_idx: an id left out of its bag, and out of the mean's count.
        unseen: as in `Embedding`.
        optimizer: as in `Embedding`.
        min_count, ttl, max_rows, evict: as in `Embedding`.
    """

    is_pooled = True

    def __init__(
        self,
        name: str,
        dim: int,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        init: Initializer | None = None,
        feature: str | None = None,
        padding_idx: int | None = None,
        unseen: str = "zeros",
        optimizer: Rule | None = None,
        min_count: int = 1,
        ttl: int | None = None,
        max_rows: int | None = None,
        evict: str = "recent",
    ) -> None:
        super().__init__(
            name, dim, init=init, feature=feature, padding_idx=padding_idx, unseen=unseen, optimizer=optimizer,
            min_count=min_count, ttl=ttl, max_rows=max_rows, evict=evict,
        )  # fmt: skip
        if mode not in MODES:
            raise ConfigError(f"table {name!r}: mode is {mode!r}; give one of {', '.join(MODES)}")
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """One row per bag, shape (bags, dim); an empty bag gives zeros.

        Args:
            input: ids, shape (bags, n), or of all bags one after the other, shape (n,), with `offsets`.
            offsets: shape (bags,), where each bag begins.
            per_sample_weights: a weight per id, of the shape of `input`; with mode "sum" only.
        """
        if per_sample_weights is not None and self.mode != "sum":
            raise ConfigError(f"table {self.table!r}: per_sample_weights need mode='sum', as in torch")
        self._check_tensor(input)
        if input.dim() != (2 if offsets is None else 1):
            raise ConfigError(
                f"table {self.table!r}: give ids of shape (bags, n), or of shape (n,) with offsets;"
                f" these are of shape {tuple(input.shape)} {'without' if offsets is None else 'with'} offsets"
            )
        found = self._source_for(input).find(self.table, input, self.padding_idx)
        if per_sample_weights is None and input.device.type == "cpu":
            return pool(found, self._starts(input, offsets), self.mode)
        rows, number, padding = table_of(found, input.device)
        return F.embedding_bag(
            number, rows, offsets, mode=self.mode, per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset, padding_idx=padding,
        )  # fmt: skip

    def _starts(self, input: Tensor, offsets: Tensor | None) -> Tensor:
        """Where each bag begins, and the end of the last."""
        if offsets is None:
            return torch.arange(input.shape[0] + 1, device=input.device) * input.shape[1]
        starts = offsets.to(torch.int64)
        return starts if self.include_last_offset else torch.cat([starts, starts.new_tensor([input.numel()])])
