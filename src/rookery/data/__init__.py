"""Clients, data sets, and ways to divide data sets among clients."""

from rookery.data.datasets import DATASETS, Dataset, load
from rookery.data.files import DataError
from rookery.data.partition import PARTITIONS, dirichlet, iid, partition_picture, shards
from rookery.data.variants import long_tailed, noisy_labels

__all__ = [
    "DATASETS",
    "PARTITIONS",
    "DataError",
    "Dataset",
    "dirichlet",
    "iid",
    "load",
    "long_tailed",
    "noisy_labels",
    "partition_picture",
    "shards",
]
