"""How long it takes until a job that has lost a process trains again, phase by phase."""


class Phases:
    """The phases since the first thing that the job has not recovered from yet; there may be none."""

    def __init__(self) -> None:
        self._what = ""
        self._began_s = 0.0
        self._phases: list[tuple[str, float]] = []

    @property
    def is_open(self) -> bool:
        """Whether there is something to recover from."""
        return bool(self._what)

    def begin(self, what: str, now_s: float) -> None:
        """This has happened: "pserver-0 was lost"."""
        if not self._what:
            self._what, self._began_s, self._phases = what, now_s, []

    def ended(self, phase: str, now_s: float) -> None:
        """A phase has come to its end; of those that are gone through again the last one counts."""
        if self._what:
            self._phases = [p for p in self._phases if p[0] != phase] + [(phase, now_s)]

    def close(self, now_s: float) -> str:
        """The job has recovered; returns what took how long, in words."""
        since_s, parts = self._began_s, []
        for phase, at_s in self._phases:
            parts.append(f"{at_s - since_s:.2f} s {phase}")
            since_s = at_s
        what, self._what = self._what, ""
        return ": ".join(part for part in (f"{now_s - self._began_s:.2f} s after {what}", ", ".join(parts)) if part)
