"""Tasks, todo -> pending -> done, and the attempts at them."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from evergrad.master.dispatch import AttemptNumbers, TaskPool
from evergrad.messages import Attempt, Member, Term

A, B, C = Member("a"), Member("b"), Member("c")


def pool_of(count, owners=None, term=1):
    return TaskPool(range(count), AttemptNumbers(Term(term)), {} if owners is None else owners)


def hand_out(pool, member, now=0.0, backup_after_s=None):
    handed = pool.hand_out(member, now, backup_after_s)
    assert handed is not None
    return handed


def test_attempts_are_numbered_by_term_and_counter_and_none_twice():
    numbers = AttemptNumbers(Term(3))
    assert [numbers.next() for _ in range(3)] == [Attempt(3, 1), Attempt(3, 2), Attempt(3, 3)]


def test_two_pools_with_the_same_numbers_have_no_attempt_in_common():
    numbers = AttemptNumbers(Term(1))
    one, other = TaskPool([0], numbers, {}), TaskPool([0], numbers, {})
    assert hand_out(one, A)[1] != hand_out(other, A)[1]


def test_tasks_are_handed_out_in_order_and_each_once():
    pool = pool_of(3)
    assert [hand_out(pool, m)[0] for m in (A, B, C)] == [0, 1, 2]
    assert pool.hand_out(A, 0.0, None) is None


def test_a_pool_without_tasks_is_done_at_once():
    assert pool_of(0).all_done()


def test_a_task_reported_done_says_when_it_was_handed_out():
    pool = pool_of(1)
    _, attempt = hand_out(pool, A, now=4.0)
    assert not pool.all_done()
    assert pool.finish(attempt) == (0, 4.0)
    assert pool.all_done()
    assert pool.done == 1


def test_a_task_reported_done_twice_counts_once():
    pool = pool_of(2)
    _, attempt = hand_out(pool, A)
    pool.finish(attempt)
    assert pool.finish(attempt) is None
    assert pool.done == 1


@pytest.mark.parametrize("attempt", [Attempt(1, 99), Attempt(0, 1)])
def test_an_attempt_nobody_was_given_counts_for_nothing(attempt):
    pool = pool_of(1)
    hand_out(pool, A)
    assert pool.finish(attempt) is None


def test_what_a_member_gives_up_goes_to_another_as_another_attempt():
    pool = pool_of(1)
    _, first = hand_out(pool, A)
    pool.release(A)
    index, second = hand_out(pool, B)
    assert index == 0
    assert second != first


def test_an_attempt_given_up_that_is_reported_done_after_all_counts():
    pool = pool_of(1)
    _, attempt = hand_out(pool, A)
    pool.release(A)
    assert pool.finish(attempt) == (0, None)
    assert pool.all_done()


def test_of_two_attempts_the_first_reported_done_counts_and_the_other_does_not():
    pool = pool_of(1)
    _, first = hand_out(pool, A)
    pool.release(A)
    _, second = hand_out(pool, B)
    assert pool.finish(first) is not None
    assert pool.finish(second) is None
    assert pool.all_done()


def test_to_give_up_after_another_has_done_it_changes_nothing():
    pool = pool_of(1)
    _, first = hand_out(pool, A)
    _, second = hand_out(pool, B, now=10.0, backup_after_s=1.0)
    pool.finish(second)
    pool.release(A)
    assert pool.finish(first) is None
    assert pool.all_done()


def test_a_member_that_gives_up_nothing_changes_nothing():
    pool = pool_of(1)
    _, attempt = hand_out(pool, A)
    pool.release(B)
    assert pool.pending() == {0: (A, 0.0)}
    assert pool.finish(attempt) == (0, 0.0)


def test_a_member_is_given_the_task_it_had_before():
    pool = pool_of(3, owners={0: A, 1: B, 2: A})
    assert hand_out(pool, B)[0] == 1


def test_a_member_that_had_none_is_given_one_that_nobody_had():
    pool = pool_of(3, owners={0: A, 1: B})
    assert hand_out(pool, C)[0] == 2


def test_a_member_is_given_anothers_task_rather_than_none():
    pool = pool_of(1, owners={0: A})
    assert hand_out(pool, B)[0] == 0


def test_a_task_pending_for_too_long_goes_to_a_second_member_and_to_no_third():
    pool = pool_of(1)
    hand_out(pool, A, now=0.0)
    assert pool.hand_out(B, 1.0, 1.0) is None
    assert hand_out(pool, B, now=1.1, backup_after_s=1.0)[0] == 0
    assert pool.hand_out(C, 99.0, 1.0) is None


def test_a_task_pending_for_long_goes_to_no_second_member_while_there_are_others_to_do():
    pool = pool_of(2)
    hand_out(pool, A, now=0.0)
    assert hand_out(pool, B, now=50.0, backup_after_s=1.0)[0] == 1


def test_a_task_whose_second_attempt_is_given_up_is_still_pending():
    pool = pool_of(1)
    hand_out(pool, A, now=0.0)
    hand_out(pool, B, now=5.0, backup_after_s=1.0)
    pool.release(A)
    assert pool.pending() == {0: (B, 5.0)}
    assert pool.hand_out(A, 5.0, None) is None


def test_an_attempt_that_has_failed_goes_back_to_todo_and_is_counted_once():
    pool = pool_of(1)
    _, first = hand_out(pool, A)
    assert pool.fail(first) == (0, 1)
    assert pool.fail(first) is None
    assert pool.finish(first) is None, "it was said to have failed"
    _, second = hand_out(pool, B)
    assert pool.fail(second) == (0, 2)
    assert not pool.all_done()


def test_an_attempt_given_up_may_still_fail():
    pool = pool_of(1)
    _, first = hand_out(pool, A)
    pool.release(A)
    assert pool.fail(first) == (0, 1)
    assert hand_out(pool, B)[0] == 0


def test_a_task_of_which_another_attempt_is_open_is_not_handed_out_again_when_one_fails():
    pool = pool_of(1)
    _, first = hand_out(pool, A)
    hand_out(pool, B, now=5.0, backup_after_s=1.0)
    assert pool.fail(first) == (0, 1)
    assert pool.pending() == {0: (B, 5.0)}
    assert pool.hand_out(C, 5.0, None) is None


def test_no_attempt_at_a_task_set_aside_counts_any_more():
    pool = pool_of(2)
    _, first = hand_out(pool, A)
    _, second = hand_out(pool, B)
    pool.set_aside(0)
    assert (pool.done, pool.left()) == (1, {1})
    assert pool.finish(first) is None
    assert pool.fail(first) is None
    pool.finish(second)
    assert pool.all_done()


def test_a_task_back_in_todo_can_be_set_aside():
    pool = pool_of(1)
    hand_out(pool, A)
    pool.release(A)
    pool.set_aside(0)
    assert pool.all_done()
    assert pool.hand_out(B, 0.0, None) is None


@pytest.mark.parametrize("owners", [None, {}])
def test_fresh_tasks_are_those_never_handed_out(owners):
    pool = TaskPool(range(2), AttemptNumbers(Term(1)), owners)
    assert pool.has_fresh()
    hand_out(pool, A)
    assert pool.has_fresh()
    hand_out(pool, B)
    pool.release(B)
    assert not pool.has_fresh()
    assert pool.left() == {0, 1}


def test_what_is_pending_is_younger_by_a_time_in_which_nobody_could_report():
    pool = pool_of(1)
    hand_out(pool, A, now=1.0)
    pool.excuse(10.0, now=20.0)
    assert pool.pending() == {0: (A, 11.0)}


def test_what_was_handed_out_at_the_end_of_such_a_time_is_new_and_not_from_later():
    pool = pool_of(1)
    hand_out(pool, A, now=19.0)
    pool.excuse(10.0, now=20.0)
    assert pool.pending() == {0: (A, 20.0)}


def test_an_attempt_is_held_by_whom_it_was_handed_to_until_it_is_done_given_up_or_failed():
    pool = pool_of(3)
    (_, first), (_, second), (_, third) = (hand_out(pool, m) for m in (A, B, C))
    assert pool.holds(A, first)
    assert not pool.holds(B, first)
    pool.finish(first)
    pool.release(B)
    pool.fail(third)
    assert not any(pool.holds(m, a) for m, a in ((A, first), (B, second), (C, third)))


class Pool(RuleBasedStateMachine):
    """A pool under any order of events, against the plainest account of them."""

    attempts = Bundle("attempts")

    def __init__(self):
        super().__init__()
        self.count, self.now = 4, 0.0
        self.pool = pool_of(self.count)
        self.task_of, self.done, self.open, self.failed = {}, set(), {}, set()

    @rule(target=attempts, member=st.sampled_from([A, B, C]), backup=st.sampled_from([None, 2.0]))
    def ask(self, member, backup):
        self.pool.release(member)
        self.open.pop(member, None)
        handed = self.pool.hand_out(member, self.now, backup)
        free = set(range(self.count)) - self.done - {self.task_of[a] for a in self.open.values()}
        if handed is None:
            assert not free
            return None
        index, attempt = handed
        assert attempt not in self.task_of
        assert index not in self.done
        assert index in free or (backup is not None and not free)
        self.task_of[attempt] = index
        self.open[member] = attempt
        return attempt

    @rule(attempt=attempts)
    def report(self, attempt):
        finished = self.pool.finish(attempt) if attempt is not None else None
        if attempt is None or attempt in self.failed or self.task_of[attempt] in self.done:
            assert finished is None
        else:
            assert finished[0] == self.task_of[attempt]
            self.done.add(finished[0])
            self.open = {m: a for m, a in self.open.items() if self.task_of[a] != finished[0]}

    @rule(attempt=attempts)
    def fail(self, attempt):
        failed = self.pool.fail(attempt) if attempt is not None else None
        if attempt is None or attempt in self.failed or self.task_of[attempt] in self.done:
            assert failed is None
            return
        index = self.task_of[attempt]
        self.failed.add(attempt)
        self.open = {m: a for m, a in self.open.items() if a != attempt}
        assert failed == (index, len([a for a in self.failed if self.task_of[a] == index]))
        if failed[1] == 3:
            self.pool.set_aside(index)
            self.done.add(index)
            self.open = {m: a for m, a in self.open.items() if self.task_of[a] != index}

    @rule(attempt=consumes(attempts))
    def lose(self, attempt):
        """A report that never comes."""

    @rule(member=st.sampled_from([A, B, C]))
    def die(self, member):
        self.pool.release(member)
        self.open.pop(member, None)

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def wait(self, seconds):
        self.now += seconds

    @invariant()
    def the_pool_agrees(self):
        assert self.pool.done == len(self.done)
        assert self.pool.all_done() == (len(self.done) == self.count)
        assert self.pool.left() == set(self.task_of.values()) - self.done
        assert self.pool.has_fresh() == (len(set(self.task_of.values())) < self.count)
        assert all(self.pool.holds(m, a) for m, a in self.open.items())
        assert self.pool.pending().keys() == {self.task_of[a] for a in self.open.values()}
        holders = [m for m, _ in self.pool.pending().values()]
        assert len(holders) == len(set(holders))


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=30)
