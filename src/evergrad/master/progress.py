"""How far and how fast the job is: counts for the eyes of people, on which no update depends."""

from collections import deque
from typing import NamedTuple

from evergrad.master.members import MemberState
from evergrad.messages import Partial, Role
from evergrad.metrics import merge, result

WINDOW_S = 10.0
MAX_NOTES = 20
MAX_UNLOGGED = 1000


class Event(NamedTuple):
    """Something that has happened; trouble is worth a warning."""

    text: str
    is_trouble: bool = False


class Progress:
    """Samples trained, their rate over the last seconds, metrics, and notes.

    Cost: bounded: one entry for each 0.1 s of the window, `MAX_NOTES` notes, and one row of metrics an epoch.
    """

    def __init__(self) -> None:
        self.samples = self.dropped = 0
        self.reported: dict[int, dict[str, float]] = {}
        self.reports = 0
        """Counts changes of what is reported."""
        self.notes: list[str] = []
        self._unlogged: list[Event] = []
        self._numerics: dict[Role, str] = {}
        self._epoch = -1
        self._initial = ""
        self._otherwise: set[str] = set()
        self._live: dict[str, Partial] = {}
        self._recent: deque[tuple[float, int]] = deque(maxlen=int(WINDOW_S * 10))

    def trained(self, epoch: int, samples: int, metrics: dict[str, Partial], now_s: float) -> None:
        """A task was done. Live metrics are those of the present epoch."""
        self.samples += samples
        if epoch != self._epoch:
            self._epoch, self._live = epoch, {}
        if self._recent and now_s - self._recent[-1][0] < 0.1:
            since, before = self._recent.pop()
            self._recent.append((since, before + samples))
        else:
            self._recent.append((now_s, samples))
        for name, value in metrics.items():
            self._live[name] = merge(self._live[name], value) if name in self._live else value

    def drop(self, samples: int) -> None:
        """So many samples came too late for their step. The first time, a note says what that means."""
        if samples and not self.dropped:
            self.note_event(
                "samples were dropped that came too late (drop_after): the same bits cannot be promised any more"
            )
        self.dropped += samples

    def samples_per_s(self, now_s: float) -> float:
        """The rate over the last seconds."""
        while self._recent and now_s - self._recent[0][0] > WINDOW_S:
            self._recent.popleft()
        if not self._recent:
            return 0.0
        return sum(n for _, n in self._recent) / max(now_s - self._recent[0][0], 0.1)

    def live(self) -> dict[str, float]:
        """Means of what the script reported inside the present epoch."""
        return {name: float(result(value)) for name, value in self._live.items()}

    def report(self, epoch: int, metrics: dict[str, float]) -> None:
        """The script reported these for an epoch."""
        before = self.reported.get(epoch, {})
        after = before | metrics
        if repr(after) != repr(before):  # so that nan is as good as nan
            self.reported[epoch] = after
            self.reports += 1

    def reported_so_far(self) -> dict[int, dict[str, float]]:
        """What was reported until now, for others to keep."""
        return dict(self.reported)

    def note_numerics(self, state: MemberState) -> None:
        """Compare a member's numeric fingerprint with that of the first of its role."""
        first = self._numerics.setdefault(state.role, state.numerics) if state.numerics else ""
        if first != state.numerics:
            self.note_event(
                f"{state.name} computes otherwise than the first {state.role} ({state.numerics}; {first}):"
                " the same bits cannot be promised"
            )

    def note_initial(self, name: str, digest: str) -> None:
        """Compare the values a trainer made its model with to those of the first; one of them hands its own in."""
        self._initial = self._initial or digest
        if digest and digest != self._initial and name not in self._otherwise:
            self._otherwise.add(name)
            self.note_event(
                f"the model of {name} begins with other values than the first trainer's, so the same bits cannot be"
                " promised: make the model after eg.init"
            )

    def note_event(self, text: str, is_trouble: bool = False) -> None:
        """Something happened that people want to know."""
        self.notes.append(text)
        del self.notes[:-MAX_NOTES]
        self.log_event(text, is_trouble)

    def log_event(self, text: str, is_trouble: bool = False) -> None:
        """Something happened that is for the log alone."""
        self._unlogged.append(Event(text, is_trouble))
        del self._unlogged[:-MAX_UNLOGGED]

    def take_events(self) -> list[Event]:
        """What has happened since the last call."""
        events, self._unlogged = self._unlogged, []
        return events
