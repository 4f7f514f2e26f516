"""Data sets and the ways to divide them among clients."""

from rookery.data.partition import PARTITIONS, dirichlet, iid, shards

__all__ = ["PARTITIONS", "dirichlet", "iid", "shards"]
