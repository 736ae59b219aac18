"""What the floats of a row, and of a dense group's state, are called: torch's names, where torch has the rule."""

from typing import NamedTuple

from evergrad.optim import RuleName, RuleSpec

VALUES = "values"
STEP = "step"
"""How often a dense parameter was updated."""


class Part(NamedTuple):
    """Some of a row's floats: `width` of them from `start` on; `is_vector`: one for each element of the value."""

    name: str
    start: int
    width: int
    is_vector: bool

    def shape(self, rows: int) -> tuple[int, ...]:
        """The shape of the tensor that holds it of so many rows."""
        return (rows, self.width) if self.is_vector else (rows,)


def element_states(rule: RuleSpec) -> tuple[str, ...]:
    """What is kept for each element of a value, in the order of a row and of a dense group's state."""
    match rule.name:
        case RuleName.SGD:
            return ("momentum_buffer",) if rule.state_width else ()
        case RuleName.ADAGRAD:
            return ("sum",)
        case RuleName.ROWWISE_ADAGRAD:
            return ()
        case RuleName.ADAM | RuleName.ADAMW:
            return ("exp_avg", "exp_avg_sq")
        case RuleName.FTRL:
            return ("z", "n")


def row_parts(rule: RuleSpec, dim: int) -> tuple[Part, ...]:
    """The parts of a row in their order: its value, what is kept for each element, what is kept once."""
    names = (VALUES, *element_states(rule))
    parts = tuple(Part(name, number * dim, dim, True) for number, name in enumerate(names))
    if rule.row_width(dim) == len(names) * dim:
        return parts
    once = "sum" if rule.name is RuleName.ROWWISE_ADAGRAD else "momentum_begun"
    return (*parts, Part(once, len(names) * dim, 1, False))
