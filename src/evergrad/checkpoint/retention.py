"""Which checkpoints are kept, and how the others are removed."""

from collections.abc import Sequence
from typing import NamedTuple

from evergrad.checkpoint.layout import MANIFEST, folder_of, folders_of, is_ours, serial_of
from evergrad.checkpoint.storage import Storage


class Held(NamedTuple):
    """A complete checkpoint. `best`: less is better, None without metrics."""

    serial: int
    best: float | None


def kept(held: Sequence[Held], keep: int) -> set[int]:
    """The serials of those to keep; pure.

    These are the `keep` newest and the best (the newest of equals).

    Args:
        held: all complete checkpoints, in any order.
        keep: how many; at least one.
    """
    newest_first = sorted(held, key=lambda h: -h.serial)
    stay = {h.serial for h in newest_first[:keep]}
    scored = [h for h in newest_first if h.best is not None and h.best == h.best]  # not nan
    return stay | {h.serial for h in sorted(scored, key=lambda h: h.best or 0.0)[:1]}


def remove(storage: Storage, serial: int) -> None:
    """Remove a checkpoint, the manifest first; files and folders that no save has written stay.

    Raises:
        StorageError: it cannot be removed, or not wholly; what is left is an interrupted save.
    """
    folder = folder_of(serial)
    storage.remove(f"{folder}/{MANIFEST}")
    ours = [path for path in storage.sizes(folder) if is_ours(path.removeprefix(f"{folder}/"))]
    for path in ours:
        storage.remove(path)
    for inner in folders_of(path.removeprefix(f"{folder}/") for path in ours):
        storage.remove_if_empty(f"{folder}/{inner}")
    storage.remove_if_empty(folder)


def remove_interrupted(storage: Storage, before: int) -> list[int]:
    """Remove what interrupted saves whose serials are less than `before` have left; returns those that left files.

    A job that saves passes the serial it is writing or has written last, so that nothing under way is touched.
    """
    removed = []
    for folder in storage.folders():
        serial = serial_of(folder)
        if serial is None or serial >= before:
            continue
        inside = [path.removeprefix(f"{folder}/") for path in storage.sizes(folder)]
        if not inside:
            storage.remove_if_empty(folder)
        elif MANIFEST not in inside and any(map(is_ours, inside)):
            remove(storage, serial)
            removed.append(serial)
    return sorted(removed)
