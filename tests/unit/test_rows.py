"""The rows of one batch: which are pulled, how they lie in memory, and what is handed back."""

import numpy as np
import pytest
import torch

import evergrad as eg
from evergrad.job.rows import BatchRows


def batch_rows(pull=None, training=True, names=("a", "b")):
    modules = [eg.Embedding(name, 2) for name in names]
    rows = BatchRows(modules, {name: i for i, name in enumerate(names)}, pull or ones, training)
    for module in modules:
        module.source = rows
    return rows, modules


def wanted(rows, batch):
    """The keys that a batch is known to need, by table."""
    rows.number(batch)
    return rows.wanted()


def ones(table, keys):
    return np.ones((keys.size, 2), np.float32)


def test_keys_are_asked_for_once_however_often_they_stand_in_a_batch():
    rows, _ = batch_rows()
    found = wanted(rows, {"a": torch.tensor([[3, 3], [-1, 3]]), "b": torch.tensor([5], dtype=torch.int32)})
    assert [(table, keys.tolist(), keys.dtype) for table, keys in found] == [
        (0, [3, -1], np.int64),
        (1, [5], np.int64),
    ]


def test_a_table_the_batch_does_not_name_is_not_asked_for():
    rows, _ = batch_rows()
    assert [table for table, _ in wanted(rows, {"b": torch.tensor([1])})] == [1]


def test_the_order_of_keys_follows_from_the_ids_alone():
    """So the gradients of a batch are computed in the same order wherever the rows come from."""
    ids = torch.from_numpy(np.random.default_rng(0).integers(-50, 50, 300))
    orders = [wanted(batch_rows()[0], {"a": ids})[0][1].tolist() for _ in range(2)]
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == sorted(set(ids.tolist()))


@pytest.mark.parametrize("offset", range(5))
def test_rows_lie_in_memory_of_torchs_whatever_memory_they_came_in(offset):
    """Products of torch differ in the last bit with the alignment of what they read."""
    memory = np.arange(64, dtype=np.float32)[offset : offset + 6].reshape(3, 2)
    memory_of_b = np.array(memory)
    memory.flags.writeable = offset % 2 == 0
    rows, (module, _) = batch_rows()
    batch = {"a": torch.tensor([1, 2, 3]), "b": torch.tensor([1, 2, 3])}
    assert len(wanted(rows, batch)) == 2
    rows.take([memory, memory_of_b])
    for read in (module(batch["a"]), module(batch["a"]), rows.find("a", batch["a"], None).rows):
        assert read.data_ptr() % 64 == 0
        assert read.tolist() == memory_of_b.tolist()


def test_gradients_come_in_the_order_of_tables_with_keys_and_rows_in_step():
    rows, (a, b) = batch_rows()
    (b(torch.tensor([4, 9])).sum() + 2 * a(torch.tensor([7, 8, 7])).sum()).backward()
    first, second = rows.gradients()
    assert (first.table, dict(zip(first.keys.tolist(), first.grads[:, 0].tolist(), strict=True))) == (0, {7: 4, 8: 2})
    assert (second.table, dict(zip(second.keys.tolist(), second.grads[:, 0].tolist(), strict=True))) == (
        1,
        {4: 1, 9: 1},
    )


def test_a_table_that_no_gradient_has_reached_is_not_among_them():
    rows, (a, b) = batch_rows()
    b(torch.tensor([1]))
    a(torch.tensor([1])).sum().backward()
    assert [g.table for g in rows.gradients()] == [0]


def test_keys_pulled_in_pieces_have_one_gradient_each():
    rows, (a, _) = batch_rows()
    out = sum(a(torch.tensor(ids)).sum() for ids in ([1, 2], [2, 3], [3, 4, 1]))
    out.backward()
    (found,) = rows.gradients()
    assert dict(zip(found.keys.tolist(), found.grads[:, 0].tolist(), strict=True)) == {1: 2, 2: 2, 3: 2, 4: 1}


def test_a_piece_that_no_gradient_reached_counts_as_zeros():
    rows, (a, _) = batch_rows()
    a(torch.tensor([1])).sum().backward()
    a(torch.tensor([2]))
    (found,) = rows.gradients()
    assert dict(zip(found.keys.tolist(), found.grads[:, 0].tolist(), strict=True)) == {1: 1, 2: 0}


def test_rows_want_no_gradient_in_evaluation():
    rows, (a, _) = batch_rows(training=False)
    assert not a(torch.tensor([1])).requires_grad
    assert rows.gradients() == []


def test_a_pull_that_fails_leaves_the_batch_usable():
    attempts = []

    def pull(table, keys):
        attempts.append(keys.tolist())
        if len(attempts) == 1:
            raise OSError
        return ones(table, keys)

    _, (a, _) = batch_rows(pull)
    with pytest.raises(OSError):  # noqa: PT011
        a(torch.tensor([1, 2]))
    assert (a(torch.tensor([1, 2])) == 1).all()
    assert attempts == [[1, 2], [1, 2]]


def test_rows_can_be_read_in_inference_mode():
    _, (a, _) = batch_rows(training=False)
    with torch.inference_mode():
        assert (a(torch.tensor([1]) + 1) == 1).all()
