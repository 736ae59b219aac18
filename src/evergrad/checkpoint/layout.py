"""Where the files of a checkpoint are, below the folder of all checkpoints.

    checkpoint_12/__lookup_table__/NAME.pserver_0.slots_00000-02047.safetensors
    checkpoint_12/__model__/dense.pserver_0.group_0.elements_0-28175.safetensors
    checkpoint_12/__model__/optimizer.pserver_0.group_0.elements_0-28175.safetensors
    checkpoint_12/trainer_0/epoch_id, step_id
    checkpoint_12/manifest.json
    checkpoint_12/metrics.json

Ranges in names include their last slot or element. Paths in a manifest begin below `checkpoint_12`.
"""

import re
from collections.abc import Iterable
from urllib.parse import quote

from evergrad.messages import FileKind, Place

MANIFEST, METRICS = "manifest.json", "metrics.json"
EPOCH_ID, STEP_ID = "trainer_0/epoch_id", "trainer_0/step_id"
TABLES, MODEL = "__lookup_table__", "__model__"

_FOLDER = re.compile(r"checkpoint_(0|[1-9]\d{0,17})")
_FILES = re.compile(
    rf"{TABLES}/[^/]+\.pserver_\d+\.slots_\d+-\d+\.safetensors"
    rf"|{MODEL}/(?:dense|optimizer)\.pserver_\d+\.group_\d+\.elements_\d+-\d+\.safetensors"
)
_REMAINS = re.compile(r"(?:(?:__lookup_table__|__model__|trainer_0)/)?\.\d+\.[0-9a-f]{8}\.part")
"""A file that was being written when its writer was ended."""


def folder_of(serial: int) -> str:
    """The folder of a checkpoint."""
    return f"checkpoint_{serial}"


def serial_of(folder: str) -> int | None:
    """The serial of the checkpoint whose folder has this name; None if it is no checkpoint's."""
    found = _FOLDER.fullmatch(folder)
    return int(found[1]) if found else None


def rows_path(table: str, place: Place, slots: range) -> str:
    """The file of a table's rows in these slots."""
    return f"{TABLES}/{quote(table, safe='')}.pserver_{place}.slots_{slots.start:05d}-{slots.stop - 1:05d}.safetensors"


def dense_path(kind: FileKind, group: int, place: Place, span: range) -> str:
    """The file of these elements of a dense group, or of their optimizer state."""
    return f"{MODEL}/{kind}.pserver_{place}.group_{group}.elements_{span.start}-{span.stop - 1}.safetensors"


def is_data(path: str) -> bool:
    """Whether a path inside a checkpoint is one that a file of rows, dense values or their state has."""
    return _FILES.fullmatch(path) is not None


def is_ours(path: str) -> bool:
    """Whether a save can have written the file of this path inside a checkpoint, whole or in part."""
    return path in (MANIFEST, METRICS, EPOCH_ID, STEP_ID) or is_data(path) or _REMAINS.fullmatch(path) is not None


def folders_of(paths: Iterable[str]) -> list[str]:
    """The folders these paths are in, the inner ones first."""
    folders = {path.rpartition("/")[0] for path in paths} | {TABLES, MODEL, "trainer_0"}
    return sorted(folders - {""}, key=lambda folder: (-folder.count("/"), folder))
