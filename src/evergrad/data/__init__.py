"""Datasets: what a trainer reads batches from.

`order.py` says which sample comes when, a `Dataset` turns sample ids into a batch, and the master knows a dataset only
as a number of samples and a fingerprint. Torch is imported when the first batch is made.
"""

from evergrad.data.columns import Bags, Columns, Ragged
from evergrad.data.dataset import Dataset, as_dataset
from evergrad.data.map import Map

__all__ = ["Bags", "Columns", "Dataset", "Map", "Ragged", "as_dataset"]
