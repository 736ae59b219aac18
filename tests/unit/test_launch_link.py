"""The launcher's talk with the master, over a network that is a list."""

from collections.abc import Iterable

from evergrad.launch.link import MasterLink
from evergrad.messages import AnyMessage, AskStatus, Exited, Message, Noted, Send, StopJob


class Line:
    """A network that records what is sent and delivers what it was given."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.coming: list[AnyMessage] = []

    def exchange(self, sends: Iterable[Send], timeout_s: float) -> list[tuple[str, AnyMessage]]:
        self.sent = [send.message for send in sends]
        coming, self.coming = self.coming, []
        return [("master", message) for message in coming]

    def close(self) -> None:
        pass


def test_the_status_is_asked_for_every_half_second() -> None:
    link = MasterLink(line := Line(), "master")
    asked = []
    for tenth in range(11):
        link.turn(100 + tenth / 10, 0.0)
        asked.append(sum(isinstance(m, AskStatus) for m in line.sent))
    assert asked == [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1]


def test_what_is_told_is_sent_again_under_one_id_until_it_is_answered() -> None:
    link = MasterLink(line := Line(), "master")
    link.tell(lambda request: Exited(request, "trainer-0", 41))
    link.turn(1.0, 0.0)
    (first,) = (m for m in line.sent if isinstance(m, Exited))
    line.coming = [Noted(first.request)]
    link.turn(2.0, 0.0)
    assert first in line.sent
    assert link.is_all_told
    link.turn(3.0, 0.0)
    assert first not in line.sent


def test_what_is_told_does_not_wait_for_the_next_half_second() -> None:
    link = MasterLink(line := Line(), "master")
    link.turn(1.0, 0.0)
    link.tell(lambda request: StopJob(request, "enough"))
    link.turn(1.1, 0.0)
    assert any(isinstance(m, StopJob) for m in line.sent)
