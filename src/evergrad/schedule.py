"""Which samples a task is: arithmetic on positions of the epoch order, the same in the master and in a test.

A position is a place in the epoch order (`data/order.py` turns it into a sample); a task is a range [start, stop) of
positions. In `Sync` the order is cut into K streams whose lengths differ by at most one, and task *k* of step *i* is
the *i*-th batch of stream *k*. In `Async` and in evaluation tasks are consecutive ranges. All functions are O(1); they
expect samples >= 0 and all other counts >= 1.
"""


def stream(samples: int, count: int, index: int) -> range:
    """The positions of stream `index` of `count`."""
    return range(samples * index // count, samples * (index + 1) // count)


def sync_steps(samples: int, count: int, batch_size: int) -> int:
    """How many steps an epoch has with `count` tasks a step: as many as the longest stream has batches."""
    return _parts(_parts(samples, count), batch_size)


def sync_task(samples: int, count: int, batch_size: int, step: int, index: int) -> tuple[int, int]:
    """Task `index` of step `step` of an epoch as (start, stop); start == stop where its stream has run out.

    That happens in the last step only, and in no step to all tasks.
    """
    positions = stream(samples, count, index)
    start = min(positions.start + step * batch_size, positions.stop)
    return start, min(start + batch_size, positions.stop)


def async_tasks(samples: int, batch_size: int, batches_per_task: int) -> int:
    """How many tasks an asynchronous epoch has."""
    return _parts(samples, batch_size * batches_per_task)


def async_task(samples: int, batch_size: int, batches_per_task: int, index: int) -> tuple[int, int]:
    """Task `index` of an asynchronous epoch as (start, stop); only the last may be short."""
    return _consecutive(samples, batch_size * batches_per_task, index)


def eval_tasks(samples: int, batch_size: int) -> int:
    """How many tasks an evaluation has: one a batch."""
    return _parts(samples, batch_size)


def eval_task(samples: int, batch_size: int, index: int) -> tuple[int, int]:
    """Task `index` of an evaluation as (start, stop); only the last may be short."""
    return _consecutive(samples, batch_size, index)


def _parts(whole: int, part: int) -> int:
    return -(-whole // part)


def _consecutive(samples: int, length: int, index: int) -> tuple[int, int]:
    start = min(index * length, samples)
    return start, min(start + length, samples)
