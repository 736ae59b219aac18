"""Time, and a network that loses, delays, doubles and reorders messages, and is cut in two at times."""

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from evergrad.messages import AnyMessage, Message
from evergrad.wire.codec import Codec

MEAN_DELAY_S, MEAN_SLOW_S = 0.02, 1.5


class Clock:
    """A time of its own, which passes from event to event."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, delay_s: float, act: Callable[[], None]) -> None:
        """Act after a while."""
        heapq.heappush(self._queue, (self.now_s + delay_s, next(self._numbers), act))

    def turn(self) -> bool:
        """Go to the next event; returns whether there was one."""
        if not self._queue:
            return False
        self.now_s, _, act = heapq.heappop(self._queue)
        act()
        return True


@dataclass(frozen=True)
class Cut:
    """Until `until_s` some members are cut off from the others.

    `one_way`: what they send is lost, and not what they are sent.
    """

    members: frozenset[str]
    until_s: float
    one_way: bool

    def parts(self, src: str, to: str) -> bool:
        if self.one_way:
            return src in self.members and to not in self.members
        return (src in self.members) != (to in self.members)


@dataclass
class Weather:
    """How bad the network is: chances that a message is lost, doubled or slow."""

    loss: float = 0.0
    duplicate: float = 0.0
    slow: float = 0.0


class Network:
    """Carries messages through the real codec.

    Args:
        clock: the time.
        rng: decides what happens to each message.
        weather: how bad it is; may change.
        deliver: is handed what arrives, as (from, to, decode).
        events: counts what was done to messages.
    """

    def __init__(
        self,
        clock: Clock,
        rng: random.Random,
        weather: Weather,
        deliver: Callable[[str, str, Callable[[], AnyMessage]], None],
        events: Counter[str],
    ) -> None:
        self.cuts: list[Cut] = []
        self.era = 0
        """What was sent in an older one does not arrive."""
        self.weather, self.events = weather, events
        self._clock, self._rng, self._deliver = clock, rng, deliver
        self._codec = Codec("simulation")

    def carry(self, src: str, to: str, message: Message) -> list[bytes]:
        """Send a message, as the network of this run does; returns its frames."""
        frames = [bytes(frame) for frame in self._codec.encode(message)]
        random_, weather = self._rng.random, self.weather
        era, copies = self.era, 1
        if random_() < weather.duplicate:
            self.events["doubled"] += 1
            copies = 2
        for _ in range(copies):
            if random_() < weather.loss:
                self.events["lost"] += 1
                continue
            delay_s = self._rng.expovariate(1 / MEAN_DELAY_S)
            if random_() < weather.slow:
                self.events["slow"] += 1
                delay_s += self._rng.expovariate(1 / MEAN_SLOW_S)
            self._clock.at(delay_s, lambda: self._arrive(era, src, to, frames))
        return frames

    def are_linked(self, src: str, to: str) -> bool:
        """Whether a message gets through now."""
        if self.cuts:
            self.cuts = [cut for cut in self.cuts if cut.until_s > self._clock.now_s]
        return not any(cut.parts(src, to) for cut in self.cuts)

    def _arrive(self, era: int, src: str, to: str, frames: list[bytes]) -> None:
        if era != self.era:
            return
        if self.are_linked(src, to):
            self._deliver(src, to, lambda: self._codec.decode(frames))
        else:
            self.events["cut off"] += 1
