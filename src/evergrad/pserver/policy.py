"""Which keys of a table have rows: the rules, as facts of its spec.

All of it happens inside an update, the *step* (the n-th update of the table), in this order:

1. *Expiry*, in the slots whose turn it is: a row not met for more than `ttl` steps is evicted, a candidate not met for
   that long forgotten. A slot's turn comes every `period` steps, by its number and the step alone, so a row lives at
   most `period` - 1 steps longer, and a pull may see it until then. A key met again in the very step its row is evicted
   starts anew.
2. Keys with a row count as met. A key without one is *wanted* when this is the `min_count`-th step in which it is met;
   before that it is a candidate: it reads as its initial value, its gradient is dropped, and only its number of steps
   and the last of them are kept.
3. *Room*: with `max_rows` each slot has its share of them. Where the wanted keys of a slot do not fit in, rows not met
   in this step are evicted, the least recently met first (`evict="recent"`: by last step, key) or the least often met
   (`evict="count"`: by number of steps, counted on from `min_count`, then last step, key). If that does not suffice,
   the least of the wanted keys get rows and the others none in this step: they stay what they were, and their gradients
   are dropped.
4. Rows are made and the rule is applied.

An evicted key is one never met. A slot is the unit of everything, and slots are never split between pservers: hence the
same rows for any number of them.
"""

from dataclasses import dataclass

from evergrad.messages import Evict, TableSpec

LONGEST_PERIOD = 1024
"""Steps between two looks at a slot, at most: 16 slots a step, a thousandth of the rows."""
CANDIDATE_TTL = 16_384
"""Steps after which a candidate is forgotten in a table without `ttl`."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A table's policy.

    Attributes:
        min_count: in how many steps a key must be met to have a row.
        ttl: how many steps a row outlives the last in which it was met; negative without limit.
        candidate_ttl: the same of a candidate.
        period: every how many steps a slot is searched for what has expired; 0 for never.
        max_rows: 0 for no limit. Each slot may have an equal share of it, but at least one: a limit below 16,384 acts
            as if it were that, and the shares add up to any other. As keys do not fall evenly, some slots are full
            before the table is.
        by_count: whether the least often used are evicted.
    """

    min_count: int
    ttl: int
    candidate_ttl: int
    period: int
    max_rows: int
    by_count: bool

    @property
    def is_none(self) -> bool:
        """Whether every key met has a row for ever."""
        return self.period == 0 and self.max_rows == 0

    @property
    def has_notes(self) -> bool:
        """Whether it is kept of each row when and how often it was met."""
        return self.ttl >= 0 or self.max_rows > 0


def policy_of(spec: TableSpec) -> Policy:
    """The policy of a table."""
    ttl = -1 if spec.ttl is None else spec.ttl
    candidate_ttl = CANDIDATE_TTL if spec.ttl is None else spec.ttl
    expires = ttl >= 0 or spec.min_count > 1
    return Policy(
        spec.min_count,
        ttl,
        candidate_ttl,
        min(LONGEST_PERIOD, 1 << max(candidate_ttl, 1).bit_length() - 1) if expires else 0,
        spec.max_rows or 0,
        spec.evict == Evict.COUNT,
    )
