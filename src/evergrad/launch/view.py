"""How a job goes, for people: a status in, lines or a table out. Nothing here prints."""

from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from evergrad.messages import Status

BAR_WIDTH = 40
STALL_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What the launcher alone knows at the end; `failure` is None if the job ended well."""

    exit_status: int
    wall_s: float
    restarts: Mapping[str, int]
    failure: str | None
    folder: str


class Stall:
    """Tells whether a job has stood still for a while, so that who is waited for is worth saying."""

    def __init__(self) -> None:
        self._place: tuple[str, int, int, int] | None = None
        self._since_s = 0.0

    def seen(self, status: Status, now_s: float) -> bool:
        """Take a status; returns whether nothing has moved for `STALL_S` seconds."""
        place = (status.phase, status.epoch, status.version, status.samples)
        if place != self._place:
            self._place, self._since_s = place, now_s
        return now_s - self._since_s >= STALL_S


def progress_line(status: Status, is_stalled: bool = False) -> str:
    """One line: where the job is and how fast."""
    if status.epoch < 0:
        return f"{status.phase}: waiting for {status.waiting_for}" if status.waiting_for else status.phase
    parts = [
        f"epoch {status.epoch} (of {status.epochs})",
        f"step {status.step}/{status.steps}",
        f"{status.samples_per_s:,.0f} samples/s",
        _numbers(status.live),
        f"{_trainers(status)} trainers",
        f"waiting for {status.waiting_for}" if is_stalled and status.waiting_for else "",
    ]
    return "  ".join(p for p in parts if p)


def changes(old: Status | None, new: Status) -> list[str]:
    """Lines for what has happened between two statuses: reports, members, epochs, and who the start waits for."""
    return [*_reports(old, new), *_membership(old, new), *_epoch(old, new), *_failed(old, new), *_waiting(old, new)]


def _membership(old: Status | None, new: Status) -> list[str]:
    if new.ended:  # all are about to leave
        return []
    before = {(m.name, m.pid) for m in old.members} if old else set()
    after = {(m.name, m.pid) for m in new.members}
    gone = [f"{name} (pid {pid}) is gone" for name, pid in sorted(before - after)]
    return gone + [f"{name} (pid {pid}) has joined" for name, pid in sorted(after - before)]


def _reports(old: Status | None, new: Status) -> list[str]:
    known = old.reported if old else {}
    return [
        f"epoch {epoch}: {_numbers(metrics)}"
        for epoch, metrics in sorted(new.reported.items())
        if epoch not in known or _numbers(known[epoch]) != _numbers(metrics)
    ]


def _epoch(old: Status | None, new: Status) -> list[str]:
    if new.epoch < 0 or (old and old.epoch == new.epoch):
        return []
    of = f" (of {new.epochs})" if new.epochs else ""  # a job that goes on knows only when a script comes there
    return [f"epoch {new.epoch}{of} begins: {new.steps} steps"]


def _failed(old: Status | None, new: Status) -> list[str]:
    """A checkpoint has failed, for another reason than the last one."""
    reasons = [s.checkpoints.failure if s and s.checkpoints else None for s in (old, new)]
    if reasons[1] is None or reasons[0] == reasons[1]:
        return []
    return [f"a checkpoint has failed: {_plain(reasons[1])}; training goes on, and the next one is tried"]


def _waiting(old: Status | None, new: Status) -> list[str]:
    if new.epoch >= 0 or not new.waiting_for or (old and old.waiting_for == new.waiting_for):
        return []
    return [f"waiting for {new.waiting_for}"]


def screen(status: Status, restarts: Mapping[str, int], is_stalled: bool = False) -> RenderableType:
    """The whole job on one screen."""
    head = f"{status.job}  {progress_line(status, is_stalled)}"
    rows: list[RenderableType] = [Text(head, style="bold")]
    if status.steps:
        rows.append(_bar(status))
    if status.reported:
        epoch, metrics = max(status.reported.items())
        rows.append(Text(f"epoch {epoch} reported {_numbers(metrics)}"))
    said = [*_left_out(status), *_checkpoints(status), *(f"note: {n}" for n in status.notes)]
    return Group(*rows, _members(status, restarts), *map(Text, said))


def _bar(status: Status) -> Table:
    row = Table.grid(padding=(0, 1))
    row.add_row(
        ProgressBar(total=status.steps, completed=status.step, width=BAR_WIDTH), Text(f"{status.step}/{status.steps}")
    )
    return row


def _members(status: Status, restarts: Mapping[str, int]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("member", "pid", "silent", "restarts", "doing"):
        table.add_column(column)
    for m in sorted(status.members, key=lambda m: (m.role, m.name)):
        cells = (m.name, str(m.pid), f"{m.silent_s:.1f} s", str(restarts.get(m.name, 0)), m.doing)
        table.add_row(*(Text(c) for c in cells))
    return table


def summary(status: Status | None, ending: Ending) -> list[str]:
    """What is left to say when all is over."""
    lines = [_verdict(status, ending)]
    if status is not None:
        lines += [_totals(status, ending.wall_s), *_counted(status)]
    if ending.restarts:
        lines.append("restarts: " + ", ".join(f"{name} {n}x" for name, n in sorted(ending.restarts.items())))
    lines.append(f"logs: {ending.folder}")
    if ending.failure:
        lines += ["", ending.failure.rstrip()]
    return lines


def _verdict(status: Status | None, ending: Ending) -> str:
    if ending.exit_status == 0:
        return "The job ended well."
    if ending.exit_status > 128:
        return "The job was stopped."
    return "The job failed."


def _totals(status: Status, wall_s: float) -> str:
    rate = status.samples / wall_s if wall_s > 0 else 0.0
    done = max(status.epoch, 0) + (0 < status.steps <= status.step)
    steps = f"{status.version} steps, " if status.version else ""
    return (
        f"{done} of {status.epochs} epochs, {steps}{status.samples:,} samples in {wall_s:.1f} s ({rate:,.0f} samples/s)"
    )


def _counted(status: Status) -> list[str]:
    reports = [f"epoch {epoch}: {_numbers(m)}" for epoch, m in sorted(status.reported.items())]
    counters = ", ".join(f"{name} {n}" for name, n in sorted(status.counters.items()) if n)
    notes = [f"note: {n}" for n in status.notes]
    return reports + ([f"counted: {counters}"] if counters else []) + _left_out(status) + _checkpoints(status) + notes


def _checkpoints(status: Status) -> list[str]:
    """The newest checkpoint, how many were made, and what went wrong."""
    found = status.checkpoints
    if found is None:
        return []
    newest = "none yet" if found.newest is None else f"{found.newest} is the newest ({found.where}"
    if found.newest is not None:
        newest += ")" if found.age_s is None else f", {found.age_s:.0f} s ago)"
    failed = f", {found.failed} failed" if found.failed else ""
    reason = f"; the last one failed: {_plain(found.failure)}" if found.failure else ""
    return [f"checkpoints: {newest}, {found.made} made{failed}, in {_plain(found.url)}{reason}"]


def _left_out(status: Status) -> list[str]:
    """Samples that were not trained: those that came too late, and tasks that were set aside."""
    dropped = f"dropped: {status.dropped:,} samples that came too late for their step, so not the same bits"
    aside = [f"set aside: {t.task} ({t.samples:,} samples): {_plain(t.error)}" for t in status.set_aside]
    return ([dropped] if status.dropped else []) + aside


def _numbers(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{_plain(name)} {value:.4f}" for name, value in sorted(metrics.items()))


def _plain(text: str) -> str:
    """Text without characters that would do something to a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _trainers(status: Status) -> int:
    return sum(m.role == "trainer" for m in status.members)
