"""Bounded staleness: who may begin another batch."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from evergrad.master.pace import Behind, Pace
from evergrad.messages import Attempt, Member

A, B, C = Member("a"), Member("b"), Member("c")


def attempt(number):
    return Attempt(1, number)


def pace_of(most, *members):
    pace = Pace(most)
    for number, member in enumerate(members):
        pace.take(member, attempt(number))
    return pace


def leave(pace, member):
    """A trainer has no task any more."""
    pace.release(member)
    pace.settle(lambda member, attempt: True)


def go_on(pace, member, batches):
    """Have a trainer begin so many batches of its task, as far as it may; returns how many it has begun."""
    begun = 0
    while begun < batches and pace.may_begin(member, begun):
        begun += 1
    return begun


def test_a_trainer_begins_a_batch_when_it_has_done_at_most_so_many_more_than_the_slowest():
    assert go_on(pace_of(3, A, B), A, 99) == 4
    pace = pace_of(3, A, B)
    go_on(pace, A, 99)
    assert pace.may_begin(B, 0)
    assert not pace.may_begin(A, 4)
    assert pace.may_begin(B, 1)
    assert pace.may_begin(A, 4)


def test_without_any_staleness_trainers_go_in_lockstep():
    pace = pace_of(0, A, B, C)
    assert all(pace.may_begin(member, 0) for member in (A, B, C))
    for done in range(1, 5):
        assert [pace.may_begin(member, done) for member in (A, B, C)] == [False, False, True]
        assert [pace.may_begin(member, done) for member in (A, B)] == [True, True]


def test_one_alone_waits_for_nobody():
    assert go_on(pace_of(0, A), A, 50) == 50


def test_the_same_question_has_the_same_effect_and_an_older_one_none():
    pace = pace_of(1, A, B)
    assert pace.may_begin(A, 0)
    assert pace.may_begin(A, 1)
    assert pace.may_begin(A, 0)
    assert not pace.may_begin(A, 2)
    assert pace.may_begin(B, 0)
    assert pace.behind(A) == Behind(B, 2)


def test_one_that_joins_counts_from_the_slowest_on():
    pace = pace_of(2, A, B)
    for done in range(10):
        assert pace.may_begin(A, done)
        assert pace.may_begin(B, done)
    pace.take(C, attempt(7))
    assert pace.behind(C).batches == 0
    assert go_on(pace, C, 99) == 3, "it counts nine as done, as the others do"


def test_one_that_had_no_task_for_a_while_counts_from_the_slowest_on():
    pace = pace_of(1, A, B)
    leave(pace, B)
    assert go_on(pace, A, 20) == 20
    pace.take(B, attempt(5))
    assert pace.may_begin(A, 20)
    assert pace.behind(A) == Behind(B, 1)


def test_one_that_was_ahead_still_is_with_its_next_task():
    pace = pace_of(2, A, B)
    assert go_on(pace, A, 2) == 2
    pace.finish(attempt(0))
    leave(pace, A)
    pace.take(A, attempt(3))
    assert pace.may_begin(A, 0)
    assert not pace.may_begin(A, 1)


def test_a_slow_one_that_gets_its_next_task_at_once_is_as_far_behind_as_before():
    pace = pace_of(2, A, B)
    assert pace.may_begin(B, 0)
    assert go_on(pace, A, 9) == 3
    pace.finish(attempt(1))
    pace.release(B)
    pace.take(B, attempt(4))
    pace.settle(lambda member, attempt: True)
    assert pace.behind(A) == Behind(B, 2)
    assert go_on(pace, A, 9) == 4


def test_nobody_waits_for_one_that_is_gone_or_has_no_task():
    pace = pace_of(1, A, B)
    assert go_on(pace, A, 9) == 2
    leave(pace, B)
    assert pace.may_begin(A, 2)
    assert pace.behind(B) is None


def test_a_task_that_another_has_done_holds_nobody_up():
    pace = pace_of(1, A, B, C)
    go_on(pace, A, 9)
    pace.unsettle()
    pace.settle(lambda member, _: member is A)
    assert pace.may_begin(A, 2)


def test_one_that_finds_its_whole_task_done_has_done_nothing_more():
    pace = pace_of(0, A, B)
    pace.finish(attempt(0))
    assert pace.behind(A) == Behind(A, 0)
    assert pace.may_begin(A, 0)


class Race(RuleBasedStateMachine):
    """Trainers that begin batches and get and leave tasks in any order, against the plainest account of it."""

    @initialize(most=st.integers(0, 3))
    def start(self, most):
        self.most, self.pace, self.tasks = most, Pace(most), 0
        self.known, self.held, self.slowest = {}, {}, 0

    def note(self, member, batches):
        self.known[member] = batches
        if self.held:
            slowest = min(self.known[m] for m in self.held)
            assert slowest >= self.slowest
            self.slowest = slowest

    @rule(member=st.sampled_from([A, B, C]))
    def get_a_task(self, member):
        if member not in self.held:
            self.tasks += 1
            self.pace.take(member, attempt(self.tasks))
            before = max(self.known.get(member, 0), self.slowest)
            self.held[member] = [self.tasks, before, 0]
            self.note(member, before)

    @rule(member=st.sampled_from([A, B, C]))
    def ask_to_begin(self, member):
        if member not in self.held:
            return
        _, before, begun = self.held[member]
        may = self.pace.may_begin(member, begun)
        self.note(member, before + begun)
        assert may == (before + begun <= self.slowest + self.most)
        self.held[member][2] += may

    @rule(member=st.sampled_from([A, B, C]), is_done=st.booleans(), gets_another=st.booleans())
    def leave_a_task(self, member, is_done, gets_another):
        if member not in self.held:
            return
        number, before, begun = self.held[member]
        if is_done:
            self.pace.finish(attempt(number))
            self.note(member, before + begun)
        self.pace.release(member)
        if gets_another:
            self.tasks += 1
            self.pace.take(member, attempt(self.tasks))
            self.held[member] = [self.tasks, self.known[member], 0]
        else:
            del self.held[member]
        self.pace.settle(lambda member, attempt: True)
        self.note(member, self.known[member])

    @invariant()
    def the_slowest_need_not_wait(self):
        for member in getattr(self, "held", ()):
            if self.known[member] == self.slowest:
                behind = self.pace.behind(member)
                assert (behind.batches, self.known[behind.member]) == (0, self.slowest)


TestRace = Race.TestCase
TestRace.settings = settings(max_examples=100, stateful_step_count=40)
