"""Who is there, and who has been silent for too long."""

from math import inf

from evergrad.master.members import Members, MemberState
from evergrad.messages import Address, Member, Place, Role


def member(name, role=Role.TRAINER, seen_s=0.0, place=None):
    address = Address(f"tcp://127.0.0.1:{5000 + place}") if place is not None else None
    state = MemberState(Member(name), role, name.split(".")[0], 7, seen_s)
    state.place, state.address = Place(place) if place is not None else None, address
    return state


def members(*states, lease_s=5.0):
    found = Members(lease_s)
    for state in states:
        found.add(state)
    return found


def test_a_member_silent_for_longer_than_the_lease_is_reported():
    there = members(member("a", seen_s=0.0), member("b", seen_s=3.0))
    assert there.silent(5.0) == []
    assert [m.member for m in there.silent(5.1)] == ["a"]


def test_whatever_is_heard_of_a_member_renews_its_lease():
    there = members(member("a"))
    assert there.heard(Member("a"), 4.0) is there[Member("a")]
    assert there.silent(8.9) == []


def test_without_a_lease_nobody_is_ever_silent():
    assert members(member("a"), lease_s=inf).silent(1e18) == []


def test_nothing_is_heard_of_one_that_is_no_member():
    there = members(member("a"))
    there.remove(Member("a"))
    assert there.heard(Member("a"), 1.0) is None
    assert Member("a") not in there
    assert there.remove(Member("a")) is None
    assert there.is_empty


def test_trainers_come_in_the_order_in_which_they_joined():
    there = members(member("b"), member("p", Role.PSERVER, place=0), member("a"))
    assert [m.member for m in there.trainers()] == ["b", "a"]


def test_pservers_are_known_by_place():
    there = members(member("p", Role.PSERVER, place=1), member("q", Role.PSERVER, place=0), member("a"))
    assert {place: m.member for place, m in there.pservers().items()} == {0: "q", 1: "p"}


def test_a_process_is_found_by_name_and_pid_together():
    there = members(member("trainer-1.x"))
    assert there.named("trainer-1", 7).member == "trainer-1.x"
    assert there.named("trainer-1", 8) is None
    assert there.named("trainer-2", 7) is None


def test_the_status_says_how_long_each_was_silent():
    (status,) = members(member("trainer-1.x", seen_s=2.0)).status(3.5, lambda member: f"{member} waits")
    assert (status.name, status.silent_s, status.doing) == ("trainer-1", 1.5, "trainer-1.x waits")


def test_what_members_have_refused_is_added_up():
    members = Members(5.0)
    for name, counters in (("a", {"malformed messages": 2}), ("b", {"malformed messages": 1, "repeated pushes": 4})):
        members.add(MemberState(Member(name), Role.PSERVER, name, 1, 0.0, counters=counters))
    assert members.counters() == {"malformed messages": 3, "repeated pushes": 4}
    members.remove(Member("b"))
    assert members.counters() == {"malformed messages": 3, "repeated pushes": 4}, "of those that are gone too"
