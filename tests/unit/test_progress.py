"""What the master notes of members that compute otherwise than the others."""

from evergrad.master.master import Master
from evergrad.messages import Join, Member, Request, Role


def join(master: Master, name: str, numerics: str, role: Role = Role.TRAINER) -> None:
    master.handle(name, Join(Request(1), role, Member(f"{name}.1"), name, 1, numerics), 0.0)


def notes(master: Master) -> tuple[str, ...]:
    return master.status(Request(1), 0.0).notes


def test_a_trainer_whose_numbers_may_differ_is_noted_in_the_status() -> None:
    master = Master("job", 1, 5.0)
    join(master, "one", "torch 2, 1 threads")
    join(master, "two", "torch 2, 1 threads")
    assert notes(master) == ()
    join(master, "three", "torch 2, 4 threads")
    (note,) = notes(master)
    assert note.startswith("three computes otherwise than the first trainer (torch 2, 4 threads; torch 2, 1 threads)")
    assert note.endswith("the same bits cannot be promised")


def test_who_says_nothing_of_its_numbers_is_compared_with_nobody() -> None:
    """A process that joins only to tell of a failure has none."""
    master = Master("job", 1, 5.0)
    join(master, "one", "")
    join(master, "two", "torch 2, 1 threads")
    join(master, "three", "")
    assert notes(master) == ()
