"""The commands for checkpoints: `evergrad checkpoints ...`, `evergrad export` and `evergrad reshard`.

What reads and writes rows is imported when a command needs it: its kernels take a while to load.
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Annotated

import typer

from evergrad.checkpoint.catalogue import Entry, choose, entries, entry, serials, split
from evergrad.checkpoint.layout import folder_of, serial_of
from evergrad.checkpoint.manifest import Manifest
from evergrad.checkpoint.retention import remove, remove_interrupted
from evergrad.checkpoint.storage import IMPATIENT, Storage
from evergrad.errors import CheckpointError, ConfigError
from evergrad.messages import GroupKind, Progress, UpdateName
from evergrad.sizes import show_bytes

Url = Annotated[str, typer.Argument(help="Folder or URL of checkpoints.", metavar="URL")]
Checkpoint = Annotated[
    str,
    typer.Argument(
        help="URL/checkpoint_12, URL/latest, URL/epoch_3, URL/step_4000, or URL for the newest.", metavar="CHECKPOINT"
    ),
]
Out = Annotated[str, typer.Argument(help="Folder or URL to write to.", metavar="OUT")]

app = typer.Typer(help="Show, check and remove checkpoints.", no_args_is_help=True)


class Format(StrEnum):
    """What an exported model is for."""

    EVERGRAD = "evergrad"
    TORCH = "torch"


@app.command("ls")
def list_all(url: Url) -> None:
    """List the checkpoints there are, also those that cannot be used, and why.

    \b
    Example:
      evergrad checkpoints ls checkpoints/
      evergrad checkpoints ls s3://bucket/films
    """
    with Storage(url, IMPATIENT) as storage:
        found = _some(storage)
        print("\n".join(_table([("serial", "made", "at", "pservers", "rows", "size", ""), *map(_line, found)])))


@app.command()
def show(checkpoint: Checkpoint) -> None:
    """Show what a checkpoint holds.

    \b
    Example:
      evergrad checkpoints show checkpoints/checkpoint_12
      evergrad checkpoints show s3://bucket/films/latest
    """
    root, name = split(checkpoint)
    with Storage(root, IMPATIENT) as storage:
        manifest = _chosen(storage, name)
        print("\n".join(_described(storage, manifest)))


@app.command()
def verify(url: Annotated[str, typer.Argument(help="One checkpoint, or all of a URL.", metavar="URL")]) -> int:
    """Read checkpoints whole and compare every checksum and count; status 1 if one is not as it was written.

    \b
    Example:
      evergrad checkpoints verify checkpoints/
      evergrad checkpoints verify checkpoints/checkpoint_12
    """
    from evergrad.checkpoint.verify import verify as verified

    root, name = split(url)
    bad = 0
    with Storage(root, IMPATIENT) as storage:
        for serial in [choose(storage, name)] if name else [e.serial for e in _some(storage) if not e.is_interrupted]:
            try:
                found = verified(storage, serial)
                rows = ", ".join(f"{count:,} rows of {table}" for table, count in found.rows.items())
                print(f"checkpoint {serial}: good; {found.files} files, {show_bytes(found.bytes)}, {rows or 'no rows'}")
            except CheckpointError as exc:
                bad += 1
                print(f"checkpoint {serial}: BAD; {exc}")
    return 1 if bad else 0


@app.command()
def rm(
    url: Annotated[str, typer.Argument(help="One checkpoint, as URL/checkpoint_12; or URL.", metavar="URL")],
    interrupted: Annotated[
        bool, typer.Option("--interrupted", help="Remove what interrupted saves before the newest checkpoint left.")
    ] = False,
) -> None:
    """Remove a checkpoint, or with --interrupted what is left of saves that never became one.

    Files that Evergrad has not written stay.

    \b
    Example:
      evergrad checkpoints rm checkpoints/checkpoint_12
      evergrad checkpoints rm --interrupted checkpoints/
    """
    root, name = split(url)
    serial = serial_of(name)
    if (serial is None) != interrupted:
        raise ConfigError("rm removes one checkpoint, as URL/checkpoint_12, or what is left with --interrupted URL")
    with Storage(root, IMPATIENT) as storage:
        if serial is None:
            complete = [e.serial for e in entries(storage) if not e.is_interrupted]
            removed = remove_interrupted(storage, max(complete, default=0))
            print(f"removed what was left of {', '.join(map(str, removed))}" if removed else "there is nothing left")
            return
        if serial not in serials(storage):
            raise ConfigError(f"there is no checkpoint {serial} in {storage.url}")
        remove(storage, serial)
        kept = storage.sizes(folder_of(serial))
        print(f"removed checkpoint {serial}" + ("; other files in its folder stay" if kept else ""))


def export(
    checkpoint: Checkpoint,
    out: Out,
    format: Annotated[
        Format, typer.Option(help="evergrad: as job.save_model writes it; torch: a plain state dict.")
    ] = Format.EVERGRAD,
) -> None:
    """Make a model for inference of a checkpoint; no job need run.

    \b
    Example:
      evergrad export checkpoints/ model/
      evergrad export s3://bucket/films/checkpoint_12 model/ --format torch
    """
    from evergrad.checkpoint.export import export_model, export_torch

    root, name = split(checkpoint)
    with Storage(root, IMPATIENT) as storage:
        manifest = _chosen(storage, name)
        notes = []
        if format is Format.EVERGRAD:
            export_model(storage, manifest, out)
        else:
            notes = export_torch(storage, manifest, out)
        rows = sum(manifest.rows(spec.name) for spec in manifest.schema.tables)
        print(f"exported checkpoint {manifest.serial} ({_at(manifest)}) to {out}: {rows:,} rows")
        for note in notes:
            print(note)


def reshard(
    checkpoint: Checkpoint,
    out: Out,
    pservers: Annotated[int, typer.Option(min=1, max=16_384, help="Number of pservers.")],
) -> None:
    """Write a checkpoint's files as so many pservers would have; restoring on any number needs none of this.

    \b
    Example:
      evergrad reshard checkpoints/checkpoint_12 resharded/ --pservers 8
    """
    from evergrad.checkpoint.reshard import reshard as resharded

    root, name = split(checkpoint)
    with Storage(root, IMPATIENT) as storage, Storage(out, IMPATIENT) as target:
        made = resharded(storage, _chosen(storage, name), target, pservers)
        what = f"{len(made.files)} files, {show_bytes(made.bytes)}"
        print(f"wrote checkpoint {made.serial} for {pservers} pservers to {target.url}: {what}")


def _chosen(storage: Storage, name: str) -> Manifest:
    serial = choose(storage, name)
    manifest = entry(storage, serial).manifest
    if manifest is None:
        raise CheckpointError(f"checkpoint {serial} of {storage.url} was removed meanwhile")
    return manifest


def _some(storage: Storage) -> list[Entry]:
    found = entries(storage)
    if not found:
        raise ConfigError(f"there are no checkpoints in {storage.url}; give the folder that holds checkpoint_0 and on")
    return found


def _line(found: Entry) -> Sequence[str]:
    if found.manifest is None:
        return (str(found.serial), "", "", "", "", "", found.problem or "")
    m = found.manifest
    rows = sum(m.rows(spec.name) for spec in m.schema.tables)
    return (str(m.serial), m.created, _at(m), str(m.places), f"{rows:,}", show_bytes(m.bytes), "")


def _at(manifest: Manifest) -> str:
    progress: Progress = manifest.progress
    if progress.epoch < 0:
        return "before the first epoch"
    if progress.is_closed:
        return f"end of epoch {progress.epoch}"
    is_sync = manifest.schema.update.name is UpdateName.SYNC
    return f"in epoch {progress.epoch}" + (f", step {progress.version}" if is_sync else "")


def _described(storage: Storage, m: Manifest) -> Iterable[str]:
    yield f"checkpoint {m.serial} of {storage.url}"
    yield f"  job {m.job}, made {m.created} by Evergrad {m.evergrad} on {m.places} pservers"
    yield f"  {_at(m)}; {len(m.files)} files, {show_bytes(m.bytes)}"
    for spec in m.schema.tables:
        size = f"{m.rows(spec.name):,} rows of {spec.dim}"
        yield f"  table {spec.name}: {size}, {spec.rule.name}, {m.updates[spec.name]:,} updates"
    for group in m.schema.groups:
        what = group.rule.name.value if group.kind is GroupKind.TRAINED and group.rule is not None else group.kind.value
        yield f"  {len(group.parameters)} parameters and buffers, {group.size:,} numbers, {what}"
    for epoch, metrics in sorted(m.metrics.items()):
        yield f"  epoch {epoch}: " + "  ".join(f"{name} {value:.5g}" for name, value in metrics.items())
    if m.best is not None:
        yield f"  best= makes {m.best:.5g} of it, and less is better"


def _table(lines: Sequence[Sequence[str]]) -> Iterable[str]:
    """Lines with their columns aligned."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        yield "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
