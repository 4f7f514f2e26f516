"""A program: cases in single precision on both engines, one line of JSON for each. Without the tests' settings."""

import json
import sys

import jax
import numpy as np

import rookery as rk

from .cases import HARD, job, ragged, single
from .runs import outcome

if __name__ == "__main__":
    assert not jax.config.jax_enable_x64
    for given in sys.argv[1:]:
        name, kind = given.split("-")
        what = job(name, single(ragged(kind)), **HARD)
        here, there = outcome(rk.Simulation(block=2), what), outcome(rk.Federation(), what)
        pairs = list(zip(*(jax.tree.leaves((own.state, own.memory)) for own in (here, there)), strict=True))
        apart = [np.max(np.abs(np.float64(a) - np.float64(b)) / np.maximum(1, np.abs(b)), initial=0) for a, b in pairs]
        kinds = sorted({str(a.dtype) for pair in pairs for a in pair if a.dtype.kind == "f"})
        same = here.counts == there.counts and here.exchanges == there.exchanges
        print(json.dumps({"case": given, "difference": max(apart), "types": kinds, "ledger": same}), flush=True)
