"""The parts of a model that the pservers hold, read as one."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from evergrad.messages import ExportPart
from evergrad.placement import slots_owned

from .arithmetic import initial_values, place_of
from .plan import FROZEN

if TYPE_CHECKING:
    from .processes import PserverProcess
    from .world import World

ALL_BYTES = 1 << 40


class Whole:
    """Reads as `pserver/model.py: Model` does, from all places."""

    def __init__(self, pservers: "Sequence[PserverProcess]") -> None:
        self._parts = [process.model for process in pservers]

    def rows(self, table: int, keys: np.ndarray, evaluating: bool) -> np.ndarray:
        places = place_of(keys, len(self._parts))
        found = [self._parts[place].rows(table, keys[i : i + 1], evaluating) for i, place in enumerate(places)]
        return np.concatenate(found) if found else self._parts[0].rows(table, keys, evaluating)

    def span(self, group: int) -> np.ndarray:
        return np.concatenate([part.span(group) for part in self._parts])

    def export(self, table: int, part: ExportPart, slot: int, limit: int) -> tuple[np.ndarray, None]:
        places = len(self._parts)
        starts = [slots_owned(place, places).start for place in range(places)]
        pieces = [p.export(table, part, start, limit)[0] for p, start in zip(self._parts, starts, strict=True)]
        return np.concatenate(pieces), None

    def counts(self, table: int) -> dict[int, float]:
        """The rows of a table, by key, as their first number."""
        keys, values = (self.export(table, part, 0, ALL_BYTES)[0] for part in (ExportPart.KEYS, ExportPart.VALUES))
        return dict(zip(keys.tolist(), values[:, 0].tolist(), strict=True))


def frozen_values(world: "World") -> list[float]:
    """What the trainer whose initial values were taken has added to the frozen ones: once for each of them."""
    if not world.plan.is_dense:
        return [0.0]
    return (Whole(world.pservers).span(FROZEN) - initial_values(world.plan)[FROZEN].values).tolist()


def differing(found: dict[int, float], wanted: dict[int, float]) -> str:
    """Which rows are not as wanted."""
    keys = sorted(key for key in found.keys() | wanted.keys() if found.get(key) != wanted.get(key))
    return "; ".join(f"key {key} has {found.get(key)}, not {wanted.get(key)}" for key in keys[:4])
