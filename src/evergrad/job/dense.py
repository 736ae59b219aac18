"""Dense parameters and buffers of a torch model as the flat groups that the pservers hold."""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from evergrad.errors import ConfigError
from evergrad.kernels.merge import all_finite
from evergrad.messages import AnyArray, Flags, GroupKind, GroupSpec, ParameterSpec
from evergrad.optim import RowWiseAdagrad, Rule, checked_rule

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)

Rules = Rule | Mapping[str, Rule]


class NotFinite(Exception):
    """A gradient or buffer has NaN or infinity."""

    def __init__(self, where: str) -> None:
        super().__init__(f"NaN or infinity in {where}")


class Group:
    """One flat group: its parameters or buffers in the model, and its rule if it is trained.

    `outer` is the rule of the pservers where that is not the same (`LocalSGD`).
    """

    def __init__(
        self, kind: GroupKind, rule: Rule | None, named: Sequence[tuple[str, Tensor]], outer: Rule | None = None
    ) -> None:
        self.kind, self.rule = kind, rule
        self.tensors = [tensor for _, tensor in named]
        specs = tuple(ParameterSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in named)
        self.spec = GroupSpec(kind, (outer or rule).spec() if rule else None, specs)
        self._dtype = np.int64 if kind is GroupKind.LOWEST else np.float32

    def values(self) -> AnyArray:
        """The model's values, flat."""
        return self._flat(self.tensors)

    def gradients(self) -> tuple[AnyArray, Flags]:
        """Gradients, flat, and which parameters have one.

        Raises:
            NotFinite: one has NaN or infinity.
        """
        grads = [g.to_dense() if g is not None and g.is_sparse else g for g in (t.grad for t in self.tensors)]
        return self._flat(grads, check=True), _flags(grads)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for tensor in self.tensors:
            tensor.grad = None

    def changed(self, before: AnyArray) -> tuple[AnyArray, Flags]:
        """Buffers, flat, and which differ from what was pulled; zeros for those that do not.

        Raises:
            NotFinite: one that differs has NaN or infinity.
        """
        values = self._flat(self.tensors)
        differs = [not np.array_equal(values[a:b], before[a:b], equal_nan=True) for a, b in self._spans()]
        kept = [tensor if has else None for tensor, has in zip(self.tensors, differs, strict=True)]
        return self._flat(kept, check=self.kind is GroupKind.AVERAGED), _flags(kept)

    def refuse_gradients(self) -> None:
        """Raise ConfigError if a frozen parameter has a gradient, which nothing would be done with."""
        for parameter, tensor in zip(self.spec.parameters, self.tensors, strict=True):
            if tensor.grad is not None:
                raise ConfigError(
                    f"parameter {parameter.name!r} was frozen when job.optimizer was called and has a gradient now; set"
                    " requires_grad before, and keep it"
                )

    def check_finite(self, flat: AnyArray, what: str) -> None:
        """Raise NotFinite if flat values have NaN or infinity; `what` they are of a parameter or buffer."""
        if flat.dtype == np.float32 and not all_finite(flat):
            spans = zip(self.spec.parameters, self._spans(), strict=True)
            raise NotFinite(f"{what} {next(p for p, (a, b) in spans if not all_finite(flat[a:b])).name!r}")

    def load(self, values: AnyArray) -> None:
        """Put flat values into the model."""
        flat = torch.from_numpy(values if values.flags.writeable else values.copy())
        with torch.no_grad():
            for tensor, (a, b) in zip(self.tensors, self._spans(), strict=True):
                tensor.copy_(flat[a:b].view(tensor.shape))

    def _spans(self) -> Iterator[tuple[int, int]]:
        start = 0
        for parameter in self.spec.parameters:
            yield start, start + parameter.size
            start += parameter.size

    def _flat(self, tensors: Sequence[Tensor | None], check: bool = False) -> AnyArray:
        what = "the gradient of" if self.kind is GroupKind.TRAINED else "buffer"
        flat: AnyArray = np.empty(self.spec.size, self._dtype)
        target = torch.from_numpy(flat)
        for tensor, (a, b) in zip(tensors, self._spans(), strict=True):
            target[a:b] = 0 if tensor is None else tensor.detach().reshape(-1)
        if check:
            self.check_finite(flat, what)
        return flat


def groups_of(model: nn.Module, rules: Rules | None, outer: Rule | None = None) -> list[Group]:
    """The dense groups of a model: one for each rule, one for frozen parameters, one for each kind of buffers.

    Args:
        model: the torch model.
        rules: for its parameters.
        outer: the pservers' rule, if not these.
    Raises:
        ConfigError: a parameter has no rule or a type that cannot be kept, or a pattern fits nothing.
    """
    for name, tensor in (*model.named_parameters(), *_buffers(model)):
        _check(name, tensor)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [Group(GroupKind.TRAINED, rule, named, outer) for rule, named in _by_rule(trained, rules)]
    frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
    floats = [(name, b) for name, b in _buffers(model) if b.dtype in FLOATS]
    integers = [(name, b) for name, b in _buffers(model) if b.dtype in INTEGERS]
    others = ((GroupKind.FROZEN, frozen), (GroupKind.AVERAGED, floats), (GroupKind.LOWEST, integers))
    return groups + [Group(kind, None, named) for kind, named in others if named]


def patterns_of(rules: Rules | None) -> dict[str, Rule]:
    """Rules by pattern, in the order in which they are tried; one rule alone fits everything."""
    if rules is None:
        return {}
    return dict(rules) if isinstance(rules, Mapping) else {"*": rules}


def _by_rule(named: list[tuple[str, nn.Parameter]], rules: Rules | None) -> list[tuple[Rule, list[tuple[str, Tensor]]]]:
    if rules is None and named:
        raise ConfigError(
            f"parameter {named[0][0]!r} has no rule; give job.optimizer a dense= rule, as eg.Adam(lr=1e-3)"
        )
    patterns = patterns_of(rules)
    by_pattern: dict[str, list[tuple[str, Tensor]]] = {pattern: [] for pattern in patterns}
    for name, parameter in named:
        fitting = next((pattern for pattern in patterns if fits(name, pattern)), None)
        if fitting is None:
            raise ConfigError(
                f"parameter {name!r} fits none of the patterns of dense=; add one for it, or '*' at the end"
            )
        if isinstance(patterns[fitting], RowWiseAdagrad):
            raise ConfigError(
                f"parameter {name!r} is given RowWiseAdagrad by dense=, which keeps one number for each row of a table;"
                " use eg.Adagrad for parameters"
            )
        by_pattern[fitting].append((name, parameter))
    empty = [pattern for pattern, fit in by_pattern.items() if not fit and isinstance(rules, Mapping)]
    if empty:
        raise ConfigError(f"dense= has a rule for {empty[0]!r}, which no parameter is left for; correct or remove it")
    return [(patterns[pattern], fit) for pattern, fit in by_pattern.items() if fit]


def check_rules(argument: str, rules: object) -> None:
    """Refuse what is neither a rule of ours nor a mapping of them.

    Raises:
        ConfigError: says which rules there are.
    """
    if isinstance(rules, Mapping):
        for rule in rules.values():
            checked_rule(f"{argument}=", rule)
    elif rules is not None:
        checked_rule(f"{argument}=", rules)


def fits(name: str, pattern: str) -> bool:
    """Whether a rule given for `pattern`, a name or a shell pattern of names, is one for `name`."""
    return name == pattern or fnmatchcase(name, pattern)


def _buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers that belong to the model's state: persistent ones."""
    passing = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    return [(name, buffer) for name, buffer in model.named_buffers() if name not in passing]


def _check(name: str, tensor: Tensor) -> None:
    is_parameter = isinstance(tensor, nn.Parameter)
    what = "parameter" if is_parameter else "buffer"
    if tensor.is_meta or isinstance(tensor, nn.parameter.UninitializedParameter | nn.parameter.UninitializedBuffer):
        raise ConfigError(f"{what} {name!r} has no values yet; initialize the model before job.optimizer")
    if tensor.dtype not in (FLOATS if is_parameter else FLOATS + INTEGERS):
        raise ConfigError(
            f"{what} {name!r} is {tensor.dtype}; pservers keep dense values as float32 (float16 and bfloat16 are"
            " converted), so call .float() on it first"
        )
    if is_parameter and not bool(torch.isfinite(tensor).all()):
        raise ConfigError(f"parameter {name!r} has NaN or infinity among its initial values; initialize it")


def _flags(tensors: Sequence[object]) -> NDArray[np.uint8]:
    return np.array([t is not None for t in tensors], np.uint8)
