"""Settings for all tests, made before anything is traced: double precision, and programs compiled in haste."""

import os

# The tests' programs are tiny and run once: nearly all their time is the compiler's, and half of that its optimizer's.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")

import jax

jax.config.update("jax_enable_x64", True)
