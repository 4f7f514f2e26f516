"""A program: cases in single precision on both engines, one line of JSON for each. Without the tests' settings."""

import json
import sys
from dataclasses import asdict

import jax

from rookery.testing import contract

from .cases import HARD, job, ragged, single

if __name__ == "__main__":
    assert not jax.config.jax_enable_x64
    for given in sys.argv[1:]:
        name, kind = given.split("-")
        found = contract.in_single(job(name, single(ragged(kind)), **HARD))
        print(json.dumps({"case": given, **asdict(found)}), flush=True)
