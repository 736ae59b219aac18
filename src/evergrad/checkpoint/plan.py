"""Where, when and how many checkpoints, as a user says it."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from math import isfinite
from os import PathLike

from evergrad.checkpoint.storage import absolute_url
from evergrad.checks import whole_number
from evergrad.errors import ConfigError
from evergrad.messages import CheckpointSpec

Best = Callable[[Mapping[str, float]], float]
_UNITS_S = {"s": 1.0, "sec": 1.0, "second": 1.0, "min": 60.0, "minute": 60.0, "h": 3600.0, "hour": 3600.0}
_WAYS = "give a number of steps, or text as '500 steps', '30 s', '10 min', '2 h'"


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Checkpoints of a job: of its beginning, of each epoch's end, of its own end, and in between as `every` says.

    Args:
        url: a folder of this machine that all processes see, or a URL as `s3://bucket/folder`.
        every: a whole number of steps (batches in `Async`), a `timedelta`, or text: "500 steps", "30 s", "10 min",
            "2 h". None, or "1 epoch": only those that are made anyway.
        keep: how many of the newest stay. The best one, the newest that is known to be good, and what the job last
            fell back to stay besides.
        best: of the metrics given to `job.report`, a number of which less is better, as `lambda m: -m["auc"]`; the
            checkpoint of the epoch with the least is kept. It is called where the script runs.
    """

    url: str | PathLike[str]
    every: int | str | timedelta | None = None
    keep: int = 3
    best: Best | None = None

    def spec(self, place_of: Callable[[object], str] = absolute_url) -> CheckpointSpec:
        """The plan as it crosses the wire.

        Args:
            place_of: what makes of the URL one that other processes understand.

        Raises:
            ConfigError: there is something in it that cannot be done.
        """
        if self.best is not None and not callable(self.best):
            raise ConfigError(f"Checkpoints: best is {self.best!r}; give a function, as lambda m: -m['auc']")
        keep = whole_number("Checkpoints: keep", self.keep, least=1)
        steps, seconds = _interval(self.every)
        return CheckpointSpec(place_of(self.url), steps, seconds, keep)

    def score(self, metrics: Mapping[str, float]) -> float | None:
        """What `best` makes of metrics; None without `best`, or where it is nan.

        Raises:
            ConfigError: it makes no number of them.
        """
        if self.best is None:
            return None
        try:
            score = float(self.best(metrics))
        except (KeyError, TypeError, ValueError, ArithmeticError) as exc:
            there = ", ".join(sorted(metrics)) or "none"
            raise ConfigError(
                f"Checkpoints: best= fails with {type(exc).__name__}: {exc}; the metrics reported are {there}"
            ) from exc
        return score if score == score else None


def _interval(every: object) -> tuple[int | None, float | None]:
    """Steps, or seconds, or neither."""
    if every is None:
        return None, None
    if isinstance(every, timedelta):
        return None, _positive(every, every.total_seconds())
    if not isinstance(every, str):
        if isinstance(every, float):
            raise ConfigError(f"Checkpoints: every is {every!r}, which has no unit; {_WAYS}")
        return whole_number("Checkpoints: every", every, least=1), None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)?\s*([a-z]+?)s?\s*", every.lower())
    if found is None:
        raise ConfigError(f"Checkpoints: every is {every!r}; {_WAYS}")
    number, unit = float(found[1] or 1), found[2]
    if unit == "epoch" and number != 1:
        raise ConfigError(f"Checkpoints: every is {every!r}; each epoch ends with a checkpoint anyway: leave it out")
    if unit == "epoch":
        return None, None
    if unit == "step" and number == int(number):
        return whole_number("Checkpoints: every", int(number), least=1), None
    if unit not in _UNITS_S:
        raise ConfigError(f"Checkpoints: every is {every!r}; {_WAYS}")
    return None, _positive(every, number * _UNITS_S[unit])


def _positive(every: object, seconds: float) -> float:
    if not (isfinite(seconds) and seconds > 0):
        raise ConfigError(f"Checkpoints: every is {str(every)!r}; give a time above zero")
    return seconds
