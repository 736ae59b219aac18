"""Which checkpoints there are at a URL, which of them are good, and which one is meant."""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from evergrad.checkpoint.layout import MANIFEST, METRICS, folder_of, serial_of
from evergrad.checkpoint.manifest import Manifest, read_manifest, with_metrics
from evergrad.checkpoint.storage import Storage, absolute_url, missing
from evergrad.errors import CheckpointError, ConfigError

LATEST = "latest"
_CHOICE = re.compile(r"(epoch|step)_(\d{1,18})")


class Entry(NamedTuple):
    """A checkpoint, or what is left of a save: `problem` says why it cannot be used, `manifest` is None then."""

    serial: int
    manifest: Manifest | None
    problem: str | None
    is_interrupted: bool = False
    """There is no manifest: it was never complete."""


def serials(storage: Storage) -> list[int]:
    """The serials of all checkpoint folders, complete or not, ascending."""
    return sorted(serial for folder in storage.folders() if (serial := serial_of(folder)) is not None)


def entries(storage: Storage) -> list[Entry]:
    """All checkpoints with files, by serial ascending; one listing and one small file each."""
    found = ((serial, _sizes(storage, serial)) for serial in serials(storage))
    return [_entry(storage, serial, sizes) for serial, sizes in found if sizes]


def entry(storage: Storage, serial: int) -> Entry:
    """A checkpoint: its manifest if that is right and all files are there in their sizes, or the problem."""
    return _entry(storage, serial, _sizes(storage, serial))


def _sizes(storage: Storage, serial: int) -> dict[str, int]:
    folder = folder_of(serial)
    return {path.removeprefix(f"{folder}/"): size for path, size in storage.sizes(folder).items()}


def _entry(storage: Storage, serial: int, sizes: dict[str, int]) -> Entry:
    if MANIFEST not in sizes:
        return Entry(serial, None, "the save was interrupted: there is no manifest", is_interrupted=True)
    try:
        manifest = read_manifest(storage, serial)
    except CheckpointError as exc:
        return Entry(serial, None, str(exc))
    wrong = missing(sizes, {file.path: file.bytes for file in manifest.files})
    if wrong is not None:
        return Entry(serial, None, f"{storage.where(folder_of(serial))}/{wrong}")
    return Entry(serial, with_metrics(storage, manifest) if METRICS in sizes else manifest, None)


def good(storage: Storage, serial: int) -> Manifest:
    """The manifest of a checkpoint that is complete, all files there in their sizes.

    Raises:
        CheckpointError: there is no such checkpoint, or it is not good; says why.
    """
    found = entry(storage, serial)
    if found.manifest is None:
        raise CheckpointError(f"checkpoint {serial} of {storage.url} cannot be used: {found.problem}")
    return found.manifest


def locate(url: str) -> tuple[str, int]:
    """The URL of all checkpoints and the serial of the one that `url` means.

    It may name a checkpoint (`URL/checkpoint_12`), all of them (`URL` or `URL/latest`: the newest good one), the end of
    an epoch (`URL/epoch_3`) or a version (`URL/step_4000`).

    Raises:
        ConfigError: there is no such checkpoint.
        CheckpointError: there is, but it is not good.
    """
    root, name = split(url)
    with Storage(root) as storage:
        return root, choose(storage, name)


def split(url: str) -> tuple[str, str]:
    """The URL of all checkpoints, and which of them `url` names, as `choose` takes it; "" for none in particular."""
    whole = absolute_url(url)
    parent, _, name = whole.rpartition("/")
    if serial_of(name) is not None or name == LATEST or _CHOICE.fullmatch(name):
        return parent or "/", name
    return whole, ""


def choose(storage: Storage, name: str) -> int:
    """The serial of what is called "checkpoint_12", "epoch_3", "step_4000", "latest" or ""; raises as `locate`."""
    serial = serial_of(name)
    if serial is not None:
        if serial not in serials(storage):
            raise ConfigError(f"there is no checkpoint {serial} in {storage.url}: {_there(storage)}")
        return good(storage, serial).serial
    found = next((m for m in _good(storage) if _meant_by(name)(m)), None)
    if found is None:
        what = f"good checkpoint of {name.replace('_', ' ')}" if _CHOICE.fullmatch(name) else "good checkpoint"
        raise ConfigError(f"there is no {what} in {storage.url}: {_there(storage)}")
    return found.serial


def _good(storage: Storage) -> Iterator[Manifest]:
    """The good ones, newest first."""
    for serial in reversed(serials(storage)):
        if (manifest := entry(storage, serial).manifest) is not None:
            yield manifest


def _meant_by(name: str) -> Callable[[Manifest], bool]:
    found = _CHOICE.fullmatch(name)
    if found is None:
        return lambda _: True
    number = int(found[2])
    if found[1] == "epoch":
        return lambda m: m.progress.epoch == number and m.progress.is_closed
    return lambda m: m.progress.version == number


def _there(storage: Storage) -> str:
    """What is there, in words."""
    found = serials(storage)
    if not found:
        return "it holds no checkpoints; give the folder of checkpoints, or one of them"
    return f"it holds checkpoints {', '.join(map(str, found))}"
