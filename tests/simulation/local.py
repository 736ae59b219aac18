"""The steps a trainer takes by itself in `LocalSGD`, with the real copy of the model that it has for them."""

from evergrad.job.local import LocalModel

from .arithmetic import Batch, gradients, keys_of
from .plan import Plan


def local_model(plan: Plan) -> LocalModel:
    """A trainer's own copy, with the rules of the model."""
    tables = [(kind.spec.dim, kind.spec.rule) for kind in plan.kinds]
    return LocalModel(tables, plan.groups, plan.update.keep_inner_state)


def step_locally(plan: Plan, local: LocalModel, batch: Batch) -> None:
    """Take the step of a batch whose rows and dense values are here."""
    rows = [local.rows(table, keys) for table, keys in keys_of(plan, batch)]
    groups = [local.dense(number) for number in range(len(plan.groups))]
    found = gradients(plan, batch, rows, groups)
    local.step(found.rows, found.spans, batch.ids.size)
    local.evict += found.evict
