"""Settings for all tests, made before anything is traced: double precision, four devices, quick compilation."""

import functools
import gc
import importlib.util
import itertools
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

# The tests' programs are tiny and run once: nearly all their time is the compiler's, and most of that its optimizer's;
# what is left over is less in one piece than cut up for several threads. Newer compilers have no older emitters, and
# end the process where they don't know a flag.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_disable_hlo_passes=while-loop-invariant-code-motion"
    + (
        " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
        if version("jaxlib").startswith("0.10.")
        else ""
    ),
)
# Where in the source each of a program's operations comes from is not asked here, and takes a part of lowering.
os.environ.setdefault("JAX_INCLUDE_FULL_TRACEBACKS_IN_LOCATIONS", "0")
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
os.environ["ROOKERY_CACHE"] = "off"  # the command line writes nothing into the user's cache

import jax
import pytest
import typer.main
from jax._src.interpreters import mlir

from covered import QUICK_FOR, own_name

# Every small program is lowered in a context of its own, and loading its dialects is a fourth of the time that takes.
if hasattr(mlir, "make_ir_context"):
    mlir.make_ir_context = functools.cache(mlir.make_ir_context)
# Every call of the command line makes all commands anew, and most of that time is reading their parameters.
typer.main.get_params_from_function = functools.cache(typer.main.get_params_from_function)
typer.main.get_command_from_info = functools.cache(typer.main.get_command_from_info)
# Hypothesis tries constants of all our files, and newer versions read them on every worker.
if importlib.util.find_spec("hypothesis.internal.conjecture.providers"):
    from hypothesis.internal.conjecture import providers

    if hasattr(providers, "_get_local_constants"):
        providers._get_local_constants = lambda: providers._local_constants
gc.set_threshold(200_000, 20, 100)  # tracing makes many objects that live long: looking for garbage finds little
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_enable_compilation_cache", False)  # without a folder it computes keys, and keeps nothing
jax.config.update("jax_num_cpu_devices", 4)  # for meshes; everything else runs on the first


COLLECTED = pytest.StashKey[dict[str, bool]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What a quick test covers is slow. (Examples in src, too: a hook for each item is not called for them here.)"""
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if name in QUICK_FOR or own_name(name) in QUICK_FOR:
            item.add_marker(pytest.mark.slow)
        found = item.config.stash.setdefault(COLLECTED, {})
        found[name] = item.get_closest_marker("slow") is not None


@pytest.fixture
def collected(request: pytest.FixtureRequest) -> dict[str, bool]:
    """All tests that this session has found, run or not, by name: whether each is slow."""
    return request.config.stash[COLLECTED]


@pytest.hookimpl(trylast=True, specname="pytest_collection_modifyitems")
def pytest_groups(items: list[pytest.Item]) -> None:
    """Tests of one group go to one worker: pytest-xdist 3.8 adds its name to an id that pytest 9.2 no longer reads."""
    for item in items:
        named = getattr(item, "_nodeid", item.nodeid)
        if named != item.nodeid:
            item._id = type(item.id).parse(named)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of one file, too, where they are in no group: what they share is then compiled once, not by each worker."""
    from xdist.scheduler import LoadGroupScheduling

    class ByFile(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            group = super()._split_scope(nodeid)
            return group.partition("::")[0] if group == nodeid else group

    config.option.loadscopereorder = False  # as collected: a long one does not come last because its tests are few
    return ByFile(config, log) if config.getvalue("dist") == "loadgroup" else None


# Every compiled program holds a few of the memory maps that a process may have (65,530 by default on Linux).
MAPS = Path("/proc/self/maps")
MANY = 20_000
_tests = itertools.count()


@pytest.fixture(autouse=True)
def _room_for_programs() -> Iterator[None]:
    """After a test: forget all compiled programs once there are many."""
    yield
    if next(_tests) % 50 == 0 and MAPS.exists() and MAPS.read_bytes().count(b"\n") > MANY:
        jax.clear_caches()
        gc.collect()


def pytest_sessionfinish() -> None:
    """Last of all pytest looks for garbage, five times: not among what all tests have left."""
    gc.freeze()
