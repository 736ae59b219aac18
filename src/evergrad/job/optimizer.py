"""The optimizer of a job: a `torch.optim.Optimizer` whose step is taken on the pservers, or by the job itself here."""

from collections.abc import Callable, Sequence
from inspect import unwrap
from typing import Any, Protocol

import torch

from evergrad.errors import ConfigError
from evergrad.job.dense import Group
from evergrad.optim import Rule, fixed_rate, learning_rate

# As they are inside: torch wraps both so that the first call imports its compiler, which takes seconds.
_add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
_zero_grad = unwrap(torch.optim.Optimizer.zero_grad)


class TakesSteps(Protocol):
    """What the optimizer tells of its calls."""

    def on_step(self) -> None:
        """The gradients of the present batch are complete."""

    def on_zero_grad(self) -> None:
        """The gradients of the present batch begin anew."""


class JobOptimizer(torch.optim.Optimizer):
    """What `job.optimizer` returns.

    Its parameter groups are one for each dense rule, then one for each table (without parameters, with the key
    "table"). Their "lr" is the learning rate of the present step. Optimizer state lives on the pservers (in `LocalSGD`
    with the job's copy of the model), so `state_dict` holds none.
    """

    def __init__(self, job: TakesSteps, groups: Sequence[Group], tables: Sequence[tuple[str, Rule]]) -> None:
        self._job = job
        self._rules: list[Rule] = [g.rule for g in groups if g.rule is not None] + [rule for _, rule in tables]
        dense: list[dict[str, Any]] = [{"params": g.tensors} for g in groups if g.rule is not None]
        rows: list[dict[str, Any]] = [{"params": [], "table": name} for name, _ in tables]
        super().__init__([*dense, *rows], {"lr": 0.0})
        self._dense = len(dense)
        self._parameters = [tensor for group in dense for tensor in group["params"]]
        self.at_step(0)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Torch's way to make the groups.

        Raises:
            ConfigError: called later: what is trained is agreed on when the job starts.
        """
        if hasattr(self, "_dense"):
            raise ConfigError("a job's optimizer takes no further parameters; give job.optimizer the whole model")
        _add_param_group(self, param_group)

    def at_step(self, step: int) -> None:
        """Take the learning rates of a step."""
        for group, rule in zip(self.param_groups, self._rules, strict=True):
            if callable(rule.lr) or "given" not in group:
                group["lr"] = learning_rate(rule.lr, step)
                group["given"] = True

    def fixed_rates(self) -> tuple[float | None, ...]:
        """The learning rates as given, of dense groups and of tables; None for a function of the step."""
        return tuple(fixed_rate(rule) for rule in self._rules)

    def rates(self) -> tuple[list[float], list[float]]:
        """The learning rates of dense groups and of tables."""
        rates = [learning_rate(group["lr"], 0) for group in self.param_groups]
        return rates[: self._dense], rates[self._dense :]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Hand the batch's gradients to the pservers, which decide when and how to apply them; `LocalSGD` does it here.

        Raises:
            ConfigError: called outside `job.batches`, or twice for one batch.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._job.on_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of dense parameters and of rows."""
        if set_to_none:
            for parameter in self._parameters:
                parameter.grad = None
        else:
            _zero_grad(self, set_to_none)
        self._job.on_zero_grad()
