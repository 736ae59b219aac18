"""What a training script works with: `init`, the `Job` it returns, and what stands behind them."""

from evergrad.job.job import Job, init

__all__ = ["Job", "init"]
