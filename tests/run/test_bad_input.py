"""What is wrong is said at once: one clear error, before anything is compiled, that names what, where and the fix."""

import inspect
import pickle
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import rookery as rk
from rookery.engines import checks
from rookery.engines.engine import PROGRAMS
from rookery.language.metrics import check_numbers

N = 3


def rows(count: int = 2, value: float = 1.0) -> dict[str, np.ndarray]:
    return {"a": np.full((count, 2), value), "t": np.full(count, value)}


def upper(x: Any, y: Any, b: Any) -> Any:
    return jnp.mean((b["a"] @ y["w"] - b["t"]) ** 2) + jnp.sum(x**2)


def lower(x: Any, y: Any, b: Any) -> Any:
    return jnp.mean((b["a"] @ y["w"] - b["t"]) ** 2) + jnp.sum(x) * jnp.sum(y["w"] ** 2)


BILEVEL = rk.Bilevel(upper, lower)
SINGLE = rk.SingleLevel(lambda x, b: jnp.mean((b["a"] @ x - b["t"]) ** 2))
MINIMAX = rk.Minimax(upper)
COMPOSITIONAL = rk.Compositional(lambda x, b: jnp.mean(b["a"], axis=0) * x, lambda value: jnp.sum(value**2))
CLIENTS = rk.Clients(lower=[rows()] * N, upper=[rows()] * N)
ONE_LEVEL = rk.Clients(upper=[rows()] * N)
INIT = (np.ones(2), {"w": np.ones(2)})
METHOD = rk.FedNest(hessian_step=0.1)


def solve(
    problem: Any = BILEVEL, clients: Any = CLIENTS, algorithm: Any = METHOD, init: Any = INIT, **given: Any
) -> Any:
    return rk.solve(problem, clients, algorithm, init, **{"rounds": 1} | given)


def refused(call: Callable[[], Any], message: str, kind: type[Exception] = ValueError) -> None:
    """The call raises this, in one line, and compiles nothing."""
    compiled = PROGRAMS.made
    with pytest.raises(kind, match=message) as caught:
        call()
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value).strip()
    assert PROGRAMS.made == compiled


# The data.


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([rows(), {"a": np.ones((3, 2)), "t": np.ones(4)}], r"client 1's arrays .*leading axes .*'a'\]: 3.*'t'\]: 4"),
        ([rows(), rows(), rows(0)], r"lower: client 2 must have at least one sample; it has none"),
        ([rows(), {"a": np.ones((3, 2))}], r"lower: client 1's data must have the structure of client 0's"),
        ([rows(), {"a": np.ones((2, 5)), "t": np.ones(2)}], r"client 1's \['a'\] .*0's, of shape \(2,\).*got \(5,\)"),
        ([rows(), {"a": np.ones((2, 2)), "t": 1.0}], r"client 1's \['t'\] must .*leading axis .*; got a single number"),
        ([{"a": np.array(["cat", "dog"])}], r"\['a'\] must be an array of real numbers; its type is"),
        ([], r"lower must have at least one client; got an empty list"),
    ],
)  # fmt: skip
def test_data(parts: Any, message: str) -> None:
    refused(lambda: rk.Clients(lower=parts), message)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_data_that_is_not_finite(value: float) -> None:
    bad = rows(4)
    bad["a"][2, 1] = value
    message = r"upper: \['a'\] is not finite .*sample 2 of client 1; clean or fill"
    refused(lambda: rk.Clients(lower=[rows()] * 3, upper=[rows(3), bad, rows(5)]), message)


def test_levels_of_different_length() -> None:
    refused(
        lambda: rk.Clients(lower=[rows()] * 2, upper=[rows()] * 3),
        r"lower and upper must have one entry per client each; got 2 and 3 entries",
    )
    refused(lambda: rk.Clients(), r"needs data; got none. Give lower=")


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, 2.0], r"weights must be one number for each of the 3 clients; got an array of shape \(2,\)"),
        ([1.0, -1.0, 1.0], r"weights must be finite, not negative"),
        ([1.0, np.nan, 1.0], r"weights must be finite"),
        ([0.0, 0.0, 0.0], r"weights .*not all zero"),
        ("equal", r"weights must be numbers, .*; got 'equal'"),
    ],
)
def test_weights(weights: Any, message: str) -> None:
    refused(lambda: rk.Clients(upper=[rows()] * 3, weights=weights), message)


# The run.


@pytest.mark.parametrize("cohort", [N + 1, 0, -1, 1.5])
def test_cohort(cohort: Any) -> None:
    refused(
        lambda: solve(cohort=cohort), rf"cohort must be an integer from 1 to 3, .*or None for all of them; got {cohort}"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rounds": -1}, "rounds must be an integer of at least 0; got -1"),
        ({"every": 0}, "every must be an integer of at least 1; got 0"),
    ],
)
def test_rounds_and_every(given: Any, message: str) -> None:
    refused(lambda: solve(**given), message)


@pytest.mark.parametrize(
    ("init", "message"),
    [
        (np.ones(2), r"init must be a pair \(x, y\) for a Bilevel problem; got a ndarray"),
        ([np.ones(2), {"w": np.ones(2)}], r"init must be a pair \(x, y\).*; got a list"),
        ((np.ones(2), {"w": np.ones(2)}, 1.0), r"init must be a pair \(x, y\).*; got a tuple of 3"),
        ((np.ones(2), {"v": np.ones(2)}), r"Bilevel.upper fails on init .*KeyError: 'w'.*y is \['v'\] \(2,\)"),
        ((np.ones(2), {"w": np.ones(3)}), r"Bilevel.upper fails on init .*y is \['w'\] \(3,\)"),
        ((np.ones(2), {"w": np.ones(2, int)}), r"init: y\['w'\] must be floating point; .* int64\. Use .astype"),
        ((np.ones(2), {"w": np.array([1.0, np.nan])}), r"init: y\['w'\] must be finite; it has NaN"),
        ((np.array([np.inf, 0.0]), {"w": np.ones(2)}), r"init: x must be finite"),
        ((np.ones(2), {"w": "zeros"}), r"init: y\['w'\] must be a floating-point array; got 'zeros'"),
        ((np.ones(2), None), r"init: y must have at least one array to start from; got None"),
    ],
)  # fmt: skip
def test_init(init: Any, message: str) -> None:
    refused(lambda: solve(init=init), message)


def test_init_of_a_compositional_problem_that_does_not_fit() -> None:
    message = r"init: y must have the shape of the inner function's value, \(2,\); its shape is \(3,\)"
    refused(lambda: solve(COMPOSITIONAL, init=(np.ones(2), np.ones(3))), message)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda x, y, b: (b["a"] @ y["w"] - b["t"]) ** 2, r"must .*returns an array of shape \(1,\)\. Use jnp"),
        (lambda x, y, b: jnp.sum(x) * 1j, r"must return a real floating-point number; it returns one of type complex"),
        (lambda x, y, b: jnp.sum(x > 0), r"must return a real floating-point number; it returns one of type int"),
        (lambda x, y, b: {"loss": jnp.sum(x)}, r"must return one number.*it returns a dict"),
        (lambda x, y, b: b["image"].mean(), r"fails on init .*one sample: KeyError: 'image'.*a batch is \['a'\]"),
    ],
)  # fmt: skip
def test_losses(loss: Any, message: str) -> None:
    refused(lambda: solve(rk.Bilevel(loss, lower)), f"Bilevel.upper {message}")
    refused(lambda: solve(rk.Bilevel(upper, loss)), f"Bilevel.lower {message}")
    refused(lambda: solve(rk.Minimax(loss), ONE_LEVEL), f"Minimax.objective {message}")


def test_a_failing_inner_function() -> None:
    problem = rk.Compositional(lambda x, b: b["image"] @ x, lambda value: jnp.sum(value))
    refused(
        lambda: solve(problem, init=(np.ones(2), np.ones(2))), r"Compositional.inner fails on init .*KeyError: 'image'"
    )


# The algorithm, and whether it goes with the problem.


@dataclass(frozen=True)
class BilevelOnly:
    """A method that knows bilevel problems only."""

    solves: ClassVar[tuple[type, ...]] = (rk.Bilevel,)


@pytest.mark.parametrize(
    ("problem", "clients", "algorithm", "message"),
    [
        (BILEVEL, CLIENTS, rk.FedAvg(), r"FedAvg does not solve Bilevel problems \(it solves: SingleLevel\)\.$"),
        (
            BILEVEL,
            CLIENTS,
            rk.ScaffoldSaddle(),
            r"ScaffoldSaddle does not solve Bilevel problems \(it solves: Minimax\)",
        ),
        (MINIMAX, ONE_LEVEL, BilevelOnly(), r"BilevelOnly does not solve Minimax .*Give it problem.as_bilevel\(\)"),
        (COMPOSITIONAL, CLIENTS, BilevelOnly(), r"does not solve Compositional .*Give it problem.as_bilevel\(\)"),
        (MINIMAX, CLIENTS, METHOD, r"A Minimax problem needs clients with one data set, and these have two"),
    ],
)
def test_a_problem_that_the_algorithm_does_not_solve(problem: Any, clients: Any, algorithm: Any, message: str) -> None:
    init = (np.ones(2), np.ones(2)) if problem is COMPOSITIONAL else INIT
    refused(lambda: solve(problem, clients, algorithm, init), message)


def test_a_lower_level_of_each_clients_own() -> None:
    problem = rk.Bilevel(upper, lower, lower_scope="client")
    refused(
        lambda: solve(problem), r"FedNest needs a lower level that is one for all; this problem's is each client's own"
    )
    refused(
        lambda: solve(algorithm=rk.FedBiOLocal()),
        r"FedBiOLocal needs a lower level that is each client's own; this problem's is one for all",
    )
    refused(
        lambda: solve(rk.Bilevel(upper, lower, lower_scope="local")),
        r"Bilevel: lower_scope must be \"global\" or \"client\"; got 'local'",
    )  # type: ignore[arg-type]


def test_one_number_of_local_steps_for_all() -> None:
    refused(
        lambda: solve(algorithm=rk.FedBiO(local_steps=(1, 3))),  # type: ignore[arg-type]
        r"FedBiO: local_steps must be an integer of at least 1.*; got \(1, 3\)",
    )


def test_things_of_the_wrong_kind() -> None:
    refused(
        lambda: solve(algorithm=rk.FedNest),
        r"algorithm must be an instance, FedNest\(\.\.\.\); got the class itself",
        TypeError,
    )
    refused(lambda: solve(problem=upper), r"problem must be an rk.Bilevel, .*; got a function", TypeError)
    refused(lambda: solve(clients=[rows()]), r"clients must be rk.Clients\(.*; got a list", TypeError)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"upper_step": -0.1}, r"upper_step must be a positive number.*; got -0.1"),
        ({"upper_step": 0.0}, r"upper_step must be a positive number.*; got 0.0"),
        ({"lower_step": float("nan")}, r"lower_step must be a positive number.*; got nan"),
        ({"lower_step": float("inf")}, r"lower_step must be a positive number.*; got inf"),
        ({"lower_step": "0.1"}, r"lower_step must be a positive number.*; got '0.1'"),
        ({"lower_step": None}, r"lower_step must be a positive number.*; got None"),
        ({"lower_step": True}, r"lower_step must be a positive number.*; got True"),
        ({"lower_step": [0.1, 0.2]}, r"lower_step must be a positive number.*; got \[0.1, 0.2\]"),
        ({"upper_step": lambda t: 0.1 * t - 0.5}, r"upper_step must be a positive number.*; got -0.5 in round 0"),
        ({"hessian_step": 0.0}, r"hessian_step must be a positive number or 'auto'.*; got 0.0"),
        ({"hessian_step": "Auto"}, r"hessian_step must be a positive number or 'auto'.*; got 'Auto'"),
        ({"neumann": "exact"}, r"neumann must be one of 'sum', 'random', 'cg'.*; got 'exact'"),
        ({"neumann_terms": 0}, r"neumann_terms must be an integer of at least 1.*; got 0"),
        ({"neumann_terms": 2.5}, r"neumann_terms must be an integer.*; got 2.5"),
        ({"lower_rounds": 0}, r"lower_rounds must be an integer of at least 1.*; got 0"),
        ({"batch_size": 0}, r"batch_size must be an integer of at least 1, or None.*; got 0"),
        ({"lower_local_steps": [1, 2]}, r"lower_local_steps must have an entry for each of the 3 clients; got 2"),
        (
            {"upper_local_steps": np.array([1, 2, 3, 4])},
            r"upper_local_steps must have an entry for each of the 3 clients; got 4",
        ),
        (
            {"upper_local_steps": [1, 0, 2]},
            r"upper_local_steps must be .* a list with an integer for each client; got \[1, 0, 2\]",
        ),
        ({"upper_local_steps": (3, 1)}, r"upper_local_steps must be an integer of at least 1, a range.*; got \(3, 1\)"),
        ({"lower_local_steps": rk.Epochs(0)}, r"lower_local_steps must be .*Epochs of a positive number.*; got Epochs"),
        ({"lower_local_steps": 0}, r"lower_local_steps must be an integer of at least 1.*; got 0"),
        ({"resample": 1}, r"resample must be True or False.*; got 1"),
    ],
)
def test_hyperparameters(given: dict[str, Any], message: str) -> None:
    refused(lambda: solve(algorithm=rk.FedNest(**{"hessian_step": 0.1} | given)), f"FedNest: {message}")


def test_local_steps_of_a_single_level_method() -> None:
    method = rk.FedAvg(local_steps=[1, 2])
    refused(
        lambda: solve(SINGLE, ONE_LEVEL, method, np.ones(2)),
        "FedAvg: local_steps must have an entry for each of the 3 clients; got 2",
    )


# What can be seen only once the run has begun.


def test_keep_best_of_no_metric() -> None:
    given = {"evaluate": lambda x, y: {"accuracy": 0.5}, "keep_best": "+acuracy"}
    message = r"keep_best='\+acuracy' must name a metric that evaluate returns; it returns accuracy\. Did you mean 'acc"
    with pytest.raises(ValueError, match=message):
        solve(SINGLE, ONE_LEVEL, rk.FedAvg(), np.ones(2), **given)
    with pytest.raises(ValueError, match=r"keep_best='-loss' needs evaluate=\.\.\."):
        solve(SINGLE, ONE_LEVEL, rk.FedAvg(), np.ones(2), keep_best="-loss")


def test_a_metric_with_a_taken_name() -> None:
    with pytest.raises(ValueError, match="evaluate must not return 'seconds', a column of the history"):
        solve(SINGLE, ONE_LEVEL, rk.FedAvg(), np.ones(2), evaluate=lambda x, y: {"seconds": 1.0})


def test_other_slips_at_the_border(tmp_path: Path) -> None:
    """A value of the wrong kind is named, before anything is compiled."""
    given = {"problem": SINGLE, "clients": ONE_LEVEL, "algorithm": rk.FedAvg(step=0.1), "init": np.ones(2)}
    refused(lambda: rk.Clients(upper=rows()), "upper must be a list with one entry per client; got a dict", TypeError)
    refused(lambda: rk.Clients(upper=[rows()], weights=["a"]), "weights must be one number per client")
    refused(
        lambda: rk.Clients(upper=[{"a": np.ones(2, complex)}]),
        "must be an array of real numbers; its type is complex128",
    )
    refused(lambda: solve(**given, seed=1.5), r"seed must be an integer from 0 to 2\*\*64 - 1; got 1.5")
    refused(lambda: solve(**given, engine=rk.Simulation), "engine must be rk.Simulation", TypeError)
    refused(lambda: solve(**given, callbacks=print), "callbacks must be a list of functions", TypeError)
    refused(
        lambda: solve(**given | {"algorithm": rk.FedAvg(local_steps=lambda t: 1)}),
        "got the function <lambda>. Only a field .* may be a sch",
    )
    python = rk.FedAvg(step=lambda t: 0.1 if t < 5 else 0.01)
    refused(lambda: solve(**given | {"algorithm": python}), "schedule step can't be compiled")
    with pytest.raises(TypeError, match="evaluate must return a dict of numbers"):
        solve(**given, evaluate=lambda x, y: {"vector": x})
    for wrong, said in ((3, "it returns an int"), ({3: 1.0}, "the name 3 is an int"), ("a", "it returns a str")):
        with pytest.raises(TypeError, match=rf"{said}\."):
            check_numbers("evaluate", wrong)


NODES = rk.WeightedNodes(SINGLE.loss, cap=0.5)
WITH_CENTER = rk.Clients(lower=[rows()] * N, center=rows())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"problem": rk.WeightedNodes(SINGLE.loss, cap=0.2)},
            "cap=0.2 the weights of 3 clients can't add up to 1.*1/3",
        ),
        ({"problem": rk.WeightedNodes(SINGLE.loss, cap=1.5)}, "cap must be a number above 0 and at most 1; got 1.5"),
        ({"clients": rk.Clients(lower=[rows()] * N)}, "these clients have none. Give Clients.lower=.*center=rows"),
        ({"clients": rk.Clients([rows()] * N, [rows()] * N, center=rows())}, "needs clients with one data set"),
        ({"clients": rk.Clients([rows()] * N, weights=[1, 2, 1], center=rows())}, "learns the clients' weights.*init="),
        ({"clients": rk.Clients([rows()] * N, center={"a": np.ones((1, 2))})}, "on the centre's data.*KeyError"),
        ({"cohort": 2}, "WeightedNodesProx needs all 3 clients in every round; got cohort=2"),
        ({"init": (np.array([0.9, 0.1, 0.0]), np.ones(2))}, "from 0 to cap=0.5"),
        ({"init": (np.array([0.5, 0.1, 0.1]), np.ones(2))}, "w must add up to 1"),
        ({"init": (None, np.array([1, 2]))}, "theta must be floating point; its type is int"),
        ({"algorithm": rk.WeightedNodesABA(refresh=1.5)}, "refresh must be a number above 0 and at most 1.*; got 1.5"),
        ({"algorithm": rk.WeightedNodesABA(average="theory")}, "Set strong_convexity="),
        ({"algorithm": rk.FedAvg()}, "FedAvg does not solve WeightedNodes problems"),
    ],
)
def test_weighted_nodes(changed: dict[str, Any], message: str) -> None:
    given = {"problem": NODES, "clients": WITH_CENTER, "algorithm": rk.WeightedNodesProx(), "init": np.ones(2)}
    refused(lambda: solve(**given | changed), message)


def test_the_center_and_the_weights() -> None:
    refused(lambda: rk.Clients([rows()], center_client=0), "needs the centre's data; got none. Give center")
    refused(lambda: rk.Clients([rows()], center=rows(), center_client=1), "center_client must be .* from 0 to 0")
    refused(lambda: rk.Clients([rows()], center={"a": np.ones(0)}), "center: client 0 must have at least one sample")
    run = solve(SINGLE, ONE_LEVEL, rk.FedAvg(), np.ones(2))
    assert not hasattr(run, "weights")
    with pytest.raises(AttributeError, match="learns no weights of the clients"):
        _ = run.weights


# By category: each call raises one line that says what was given. Nothing is compiled.


CLEAN = {"problem": SINGLE, "clients": ONE_LEVEL, "algorithm": rk.FedAvg(step=0.1), "init": np.ones(2)}
TABLE = pd.DataFrame({"site": ["a", "a", "b", "b"], "v": [1.0, 2.0, 3.0, 4.0], "ill": [0, 1, 0, 1]})


def runs(**given: Any) -> Callable[[], Any]:
    return lambda: solve(**CLEAN | given)


def bilevel(upper_loss: Any = upper, lower_loss: Any = lower, **given: Any) -> Callable[[], Any]:
    return lambda: solve(rk.Bilevel(upper_loss, lower_loss), **given)


def minimax(objective: Any) -> Callable[[], Any]:
    return runs(problem=rk.Minimax(objective), init=INIT, algorithm=METHOD)


def composed(inner: Any) -> Callable[[], Any]:
    return lambda: solve(rk.Compositional(inner, jnp.sum), init=np.ones(2))


def levels(second: Any, outer: Any = jnp.sum, **given: Any) -> Callable[[], Any]:
    inner = (lambda x, b: jnp.mean(b["a"], axis=0) * x, second)
    given = {"init": np.ones(2), "algorithm": rk.FedMSA()} | given
    return lambda: solve(rk.MultiLevel(inner, outer), **given)


def single(loss: Any) -> Callable[[], Any]:
    return runs(problem=rk.SingleLevel(loss))


def fedavg(**given: Any) -> Callable[[], Any]:
    return lambda: solve(**CLEAN | {"algorithm": rk.FedAvg(**given)})


def tuned(**given: Any) -> Callable[[], Any]:
    measured = {"evaluate": lambda x, y: {"loss": jnp.sum(x)}, "metric": "loss"}
    return lambda: rk.tune(SINGLE, ONE_LEVEL, rk.FedAvg(), np.ones(2), 4, **measured | given)


def table(**given: Any) -> Callable[[], Any]:
    return lambda: rk.Clients.from_frame(**{"table": TABLE, "by": "site", "label": "ill"} | given)


class Point(NamedTuple):
    """The state of a user's method."""

    x: Any
    y: Any = ()


def own(
    round_: Any = lambda self, fed, s, k: Point(s.x - fed.mean(fed.map(lambda c, k: c.f_x(s.x, (), c.upper(k)), k))),
    init: Any = lambda self, fed, x, y, key: Point(x),
    solves: Any = (rk.SingleLevel,),
    frozen: bool = True,
) -> Callable[[], Any]:
    """A run of a user's method."""
    members = {"init": init, "round": round_} | ({} if solves is None else {"solves": solves})
    made: Any = type("FedX", (), {name: value for name, value in members.items() if value is not None})
    return runs(algorithm=(dataclass(frozen=True)(made) if frozen else made)())


def mapped(work: Any) -> Any:
    return lambda self, fed, s, k: Point(s.x - fed.mean(fed.map(lambda c, k: work(c, s.x, k), k)))


def squares(pred: Any, b: Any) -> Any:
    return jnp.mean((pred - b["t"]) ** 2)


FAULTS: dict[str, list[tuple[Callable[[], Any], str]]] = {
    "channel": [
        (runs(channel="clip"), "channel must be a channel such as rk.clip\\(1.0\\), or a dict .*; got 'clip'"),
        (runs(channel={"x, y, u": "clip"}), "channel must be .*; got 'clip'"),
        (runs(channel=3), "channel must be .*; got 3"),
        (runs(channel=rk.clip), "channel must be .*; got <function clip"),
        (runs(channel=[rk.clip(1.0)]), "channel must be .*; got \\["),
        (runs(channel={"nothing": rk.clip(1.0)}), "nothing"),
        (lambda: rk.chain("clip"), "rk.chain must be given channels such as rk.clip\\(1.0\\); got 'clip'"),  # type: ignore[arg-type]
        (lambda: rk.clip(-1.0), "-1.0"),
        (lambda: rk.clip("a"), "'a'"),  # type: ignore[arg-type]
        (lambda: rk.gaussian(-1.0), "-1.0"),
        (runs(faults=0.5), "0.5"),
        (runs(faults={"dropout": 0.5}), "dropout"),
        (lambda: rk.Faults(dropout=2), "2"),
        (lambda: rk.Faults(minimum=0), "0"),
    ],
    "engine": [
        (runs(engine="simulation"), "'simulation'"),
        (runs(engine=rk.Simulation), "Simulation"),
        (runs(engine=3), "3"),
        (lambda: rk.Simulation(block=0), "block must be an integer of at least 1, .*; got 0"),
        (lambda: rk.Simulation(block="all"), "'all'"),
        (lambda: rk.Simulation(debug=1), "debug must be True or False; got 1"),  # type: ignore[arg-type]
        (lambda: rk.Simulation(precision="float8"), "float8"),
        (runs(engine=rk.Simulation(mesh="some")), "some"),
        (lambda: rk.Simulation(convolutions="fast"), "fast"),
        (lambda: rk.Federation(deadline=-1), "deadline must be a positive number; got -1"),
    ],
    "algorithm": [
        (lambda: rk.FedBiO(lr=0.1), "FedBiO has no hyperparameter 'lr'. Did you mean upper_step or lower_step"),  # type: ignore[call-arg]
        (lambda: rk.FedBiO(learning_rate=0.1), "'learning_rate'. Did you mean upper_step"),  # type: ignore[call-arg]
        (lambda: rk.FedBiO(uper_step=0.1), "'uper_step'. Did you mean upper_step\\?"),  # type: ignore[call-arg]
        (lambda: rk.FedAvg(qqq=0.1), "'qqq'. It has: step, "),  # type: ignore[call-arg]
        (lambda: replace(rk.FedAvg(), lr=0.1), "'lr'. Did you mean step\\?"),  # type: ignore[call-arg]
        (fedavg(step=-0.1), "step.*-0.1"),
        (fedavg(step="fast"), "step.*'fast'"),
        (fedavg(step=None), "step.*None"),
        (fedavg(step=np.ones(2)), "step"),
        (fedavg(local_steps=0), "local_steps.*0"),
        (fedavg(local_steps=2.5), "local_steps.*2.5"),
        (fedavg(local_steps=(3, 1)), "local_steps.*\\(3, 1\\)"),
        (fedavg(batch_size=0), "batch_size.*0"),
        (fedavg(batch_size="all"), "batch_size.*'all'"),
        (runs(algorithm="FedAvg"), "algorithm must be the method itself, rk.FedAvg\\(...\\); got its name, 'FedAvg'"),
        (runs(algorithm=rk.FedAvg), "algorithm must be an instance, FedAvg\\(...\\); got the class itself"),
        (runs(algorithm=None), "algorithm must be a method, e.g. rk.FedNest\\(...\\); got None"),
        (runs(algorithm={"step": 0.1}), "algorithm must be a method, .*; got a dict"),
        (runs(algorithm=rk.FedNest()), "FedNest does not solve SingleLevel problems"),
    ],
    "init": [
        (runs(init=None), "init: x must have at least one array to start from; got None"),
        (runs(init={}), "init: x must have at least one array to start from; got {}"),
        (runs(init="zeros"), "init: x must be a floating-point array; got 'zeros'"),
        (runs(init=np.ones(2, int)), "int64"),
        (runs(init=np.ones(2, bool)), "must be floating point; its type is bool"),
        (runs(init=np.ones(2, complex)), "must be floating point; its type is complex128"),
        (runs(init=np.array([np.nan, 0])), "init: x must be finite; it has NaN"),
        (runs(init=np.array([np.inf, 0])), "init: x must be finite"),
        (runs(init=np.ones(3)), "SingleLevel.loss fails on init .*x is \\(3,\\), a batch is .* Check the shapes"),
        (runs(init=(np.ones(2), np.ones(2))), "SingleLevel.loss fails on init"),
        (bilevel(init=np.ones(2)), "init must be a pair \\(x, y\\) for a Bilevel problem; got a ndarray"),
        (bilevel(init=(np.ones(2),)), "init must be a pair \\(x, y\\) .*; got a tuple of 1"),
        (bilevel(init=(np.ones(2), np.ones(2))), "Bilevel.upper fails on init"),
        (bilevel(init=None), "init must be a pair .*; got None"),
    ],
    "clients": [
        (runs(clients=None), "clients must be rk.Clients\\(.*; got None"),
        (runs(clients=[rows()]), "clients must be rk.Clients\\(.*; got a list"),
        (lambda: rk.Clients(upper=[rows(), rows(0)]), "client 1 must have at least one sample; it has none"),
        (lambda: rk.Clients(upper=rows()), "dict"),
        (lambda: rk.Clients(upper=[]), "upper"),
        (lambda: rk.Clients(upper=3), "3|int"),
        (lambda: rk.Clients(upper=["a"]), "upper"),
        (lambda: rk.Clients(upper=[{"a": np.array(["x"])}]), "'a'"),
        (lambda: rk.Clients(upper=[{"a": np.array([np.nan])}]), "'a'.*not finite"),
        (lambda: rk.Clients(upper=[rows()], replace="no"), "replace.*'no'"),
        (lambda: rk.Clients.like(upper=np.zeros(2), n=0), "n must be an integer of at least 1; got 0"),
        (runs(cohort=0), "cohort must be an integer from 1 to 3, the number of clients, or None .*; got 0"),
        (runs(cohort=4), "; got 4"),
        (runs(cohort="all"), "; got 'all'"),
        (runs(clients=CLIENTS), "A SingleLevel problem needs clients with one data set, and these have two"),
    ],
    "weights": [
        (lambda: rk.Clients(upper=[rows()] * 2, weights=[1.0]), "weights"),
        (lambda: rk.Clients(upper=[rows()] * 2, weights=[-1.0, 1]), "weights"),
        (lambda: rk.Clients(upper=[rows()] * 2, weights=[0.0, 0]), "weights"),
        (lambda: rk.Clients(upper=[rows()] * 2, weights="sizes"), "weights.*'sizes'"),
        (lambda: rk.Clients(upper=[rows()] * 2, weights=[np.nan, 1]), "weights"),
        (lambda: rk.Clients(upper=[rows()] * 2, weights=3), "weights"),
    ],
    "problems": [
        (runs(problem=None), "problem must be an rk.Bilevel, .*; got None"),
        (runs(problem=upper), "problem must be an rk.Bilevel, .*; got a function"),
        (runs(problem=rk.SingleLevel), "problem must be an rk.Bilevel, .*; got the class SingleLevel itself"),
        (bilevel(lower_loss=3), "Bilevel.lower must be a function of \\(x, y, batch\\); got 3"),
        (bilevel(lower_loss=None), "Bilevel.lower must be a function of \\(x, y, batch\\); got None"),
        (bilevel(upper_loss="mse"), "Bilevel.upper must be a function of \\(x, y, batch\\); got 'mse'"),
        (single(lambda x: jnp.sum(x)), "SingleLevel.loss must be a function of \\(x, batch\\); it takes \\(x\\)"),
        (single(lambda x, b: jnp.mean(b["labels"])), "KeyError: 'labels'. .*a batch is .*Check the key"),
        (single(lambda x, b: jnp.mean(b["tt"] * x[0])), "KeyError: 'tt'. .*Did you mean 't'\\?"),
        (single(lambda x, b: squares(b["a"] @ x, b) if x[0] > 0 else 0.0), "Losses are compiled.*jnp.where"),
        (single(lambda x, b: np.mean(np.asarray(x))), "Losses are compiled.*jnp for np"),
        (single(lambda x, b: jnp.mean(b.a)), "AttributeError: 'dict' object has no attribute 'a'"),
        (single(lambda x, b: undefined(x)), "NameError: name 'undefined' is not defined"),  # type: ignore[name-defined]  # noqa: F821
        (single(lambda x, b: (b["a"] @ x - b["t"]) ** 2), "must return one number.*array of shape \\(1,\\)"),
        (single(lambda x, b: jnp.squeeze((b["a"] @ x - b["t"]) ** 2)), "on \\d samples it returns an array of shape"),
        (single(lambda x, b: None), "it returns None"),
        (single(lambda x, b: (squares(b["a"] @ x, b), {})), "it returns a tuple"),
        (single(lambda x, b: jnp.argmax(b["a"] @ x)), "must return a real floating-point number.*int"),
        (single(lambda x, b: jax.lax.while_loop(lambda v: v < 9, lambda v: v + 1.0, x[0])), "can't be differentiated"),
        (single(lambda x, b: jnp.mean(b["t"])), "SingleLevel.loss must depend on x; its gradient in x is 0 everywhere"),
        (single(lambda x, b: jnp.mean(jnp.sign(b["a"] @ x))), "SingleLevel.loss must depend on x.*sign, round"),
        (bilevel(lambda x, y, b: jnp.sum(x**2)), "Bilevel.upper must depend on y"),
        (bilevel(lower_loss=lambda x, y, b: jnp.sum(x**2)), "Bilevel.lower must depend on y"),
        (bilevel(*[lambda x, y, b: squares(b["a"] @ y["w"], b)] * 2), "Bilevel.lower must depend on x; in both"),
        (minimax(lambda x, y, b: jnp.sum(x**2)), "Minimax.objective must depend on y"),
        (minimax(lambda x, y, b: jnp.sum(y["w"])), "Minimax.objective must depend on x"),
        (bilevel(init=(np.ones(2), {"w": np.ones((2, 1))})), r"shape \(5, 1\) and \(5,\) to \(5, 5\).*Make the"),
        (composed(lambda x, b: b["a"] @ x), "inner must .*one entry per sample"),
        (composed(lambda x, b: b["q"] @ x), "inner fails .*KeyError: 'q'"),
        (composed(3), "Compositional.inner must be .*; got 3"),
        (composed(lambda x, b: jnp.mean(b["a"])), "x has no effect"),
        (runs(problem=rk.MultiLevel([squares], jnp.sum)), "MultiLevel.inner must be a tuple of functions.*got a list"),
        (runs(problem=rk.MultiLevel((), jnp.sum)), "MultiLevel.inner must be a tuple.*; got an empty tuple"),
        (levels(3), "MultiLevel.inner\\[1\\] must be a function of \\(value, batch\\); got 3"),
        (levels(lambda v: v), "MultiLevel.inner\\[1\\] must be .*; it takes \\(v\\)"),
        (levels(lambda v, b: v * b["t"][:, None]), "MultiLevel.inner\\[1\\] must .*one entry per sample.*axis=0"),
        (levels(lambda v, b: v @ jnp.ones(3)), "MultiLevel.inner\\[1\\] fails .*value is \\(2,\\)"),
        (levels(lambda v, b: jnp.mean(b["t"])), "MultiLevel.inner\\[1\\] must depend on the value before it"),
        (levels(lambda v, b: jnp.log(-jnp.exp(v))), "MultiLevel.inner must be finite at init"),
        (levels(lambda v, b: v, lambda v, b: jnp.sum(v)), "MultiLevel.outer must be .* \\(value\\); it takes"),
        (levels(lambda v, b: v, algorithm=METHOD), "FedNest does not solve MultiLevel problems.*Take FedMSA\\.$"),
        (levels(lambda v, b: v, init=(np.ones(2), np.ones(2))), "y must be a tuple .*its shape is \\(2,\\)"),
        (levels(lambda v, b: v, init=(np.ones(2), [np.ones(2)] * 2)), "y must be a tuple .*, in a list"),
    ],
    "evaluate": [
        (runs(evaluate=3), "evaluate must be a function of \\(x, y\\) or \\(x, y, memory\\); got 3"),
        (runs(evaluate=lambda x: {}), "evaluate must be .*; it takes \\(x\\)"),
        (runs(evaluate={"loss": 1}), "evaluate must be .*; got a dict"),
        (runs(evaluate_client=lambda x: {}), "evaluate_client must be .*; it takes \\(x\\)"),
        (runs(every=0), "every must be an integer of at least 1; got 0"),
        (runs(every=1.5), "every must be .*; got 1.5"),
        (runs(rounds=-3), "rounds must be an integer of at least 0; got -3"),
        (runs(rounds="ten"), "rounds must be .*; got 'ten'"),
        (runs(seed=-1), "seed must be .*; got -1"),
        (runs(seed="x"), "seed must be .*; got 'x'"),
        (runs(keep_best="loss"), "loss"),
        (runs(callbacks=3), "3"),
        (runs(callbacks=[3]), "3"),
        (runs(callbacks=print), "got <built-in function print>"),
        (runs(on_nonfinite="raise"), "raise"),
    ],
    "checkpoint": [
        (runs(checkpoint=3), "3"),
        (runs(checkpoint=True), "True"),
        (runs(checkpoint=["a"]), "a"),
    ],
    "tune": [
        (tuned(candidates=0), "candidates must be an integer of at least 1; got 0"),
        (tuned(slots=0), "slots must be an integer of at least 1; got 0"),
        (tuned(metric=3), "3"),
        (tuned(evaluate=3), "evaluate must be .*; got 3"),
        (tuned(evaluate=None), "evaluate"),
        (tuned(search={"stepp": (0.1, 1)}), "stepp"),
        (tuned(search={"step": (1, 0.1)}), "step"),
        (tuned(search=3), "3"),
        (tuned(cohort=9), "got 9"),
    ],
    "frames": [
        (table(by="hospital"), "hospital"),
        (table(label="sick"), "sick"),
        (table(features=["w"]), "w"),
        (table(test=1.5), "1.5"),
        (table(upper=-0.1), "-0.1"),
        (table(seed=-1), "seed must be .*; got -1"),
        (table(table="nothing.csv"), "nothing.csv"),
        (table(table=TABLE.assign(v=["x", "y", "z", "q"])), "v"),
        (table(table=TABLE.assign(v=[1, None, 2, 3])), "v"),
        (table(table=3), "3|int"),
    ],
    "own methods": [
        (own(solves=None), r"FedX must declare which problems it solves, e.g. solves: ClassVar = \(rk.SingleLevel,\)"),
        (own(solves=rk.SingleLevel), r"FedX.solves must be a tuple of problem classes"),
        (own(solves=(rk.Bilevel,)), "FedX does not solve SingleLevel problems"),
        (own(frozen=False), "FedX must be a dataclass: write @dataclass"),
        (own(init=None), "FedX.init must be a function of \\(fed, x, y, key\\); got None"),
        (own(init=lambda self, x, y: Point(x)), "FedX.init must be .*; it takes \\(x, y\\)"),
        (own(None), "FedX.round must be a function of \\(fed, state, key\\); got None"),
        (own(lambda self, fed, s, k: Point(s.x - 0.1 * fed.map(lambda c, k: s.x, k))), "Exchange it first"),
        (own(lambda self, fed, s, k: Point(jnp.sum(fed.map(lambda c, k: s.x, k)))), "Exchange it first, e.g. fed.mean"),
        (own(lambda self, fed, s, k: Point(fed.map(lambda c, k: s.x, k)[0])), "Exchange it first, e.g. fed.mean"),
        (own(mapped(lambda c, x, k: jax.grad(SINGLE.loss)(x, c.upper(k)))), "A batch is not the samples themselves"),
        (own(mapped(lambda c, x, k: c.upper(k) - x)), "A batch is not the samples themselves"),
        (own(mapped(lambda c, x, k: x @ c.upper(k))), "A batch is not the samples themselves"),
        (own(mapped(lambda c, x, k: c.f_x(x, (), c.upper(k, 0)))), "size must be an integer of at least 1; got 0"),
        (own(mapped(lambda c, x, k: c.g_y(x, (), c.lower(k)))), "SingleLevel"),
        (own(lambda self, fed, s, k: s.x), "FedX"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("category", FAULTS)
def test_every_fault_is_one_line_that_says_what_was_given(category: str) -> None:
    wrong = []
    for number, (call, message) in enumerate(FAULTS[category]):
        compiled = PROGRAMS.made
        try:
            call()
            wrong.append(f"{category} {number}: accepted, and not {message!r}")
        except (ValueError, TypeError) as error:
            said = str(error)
            if not re.search(message, said) or "\n" in said.strip() or PROGRAMS.made != compiled:
                wrong.append(f"{category} {number}: {said!r}, and not {message!r}")
        except Exception as error:
            wrong.append(f"{category} {number}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)


# What is accepted with a warning, or refused once the losses have values.


def test_a_loss_that_is_not_finite_at_the_start() -> None:
    broken = lambda x, y, b: lower(x, y, b) + jnp.sum(jnp.log(y["w"] - 1.0))
    refused(bilevel(lower_loss=broken), "Bilevel.lower must be finite at init; .*client 0. .*log, sqrt")
    started = (np.ones(2), {"w": np.full(2, 2.0)})
    assert bilevel(lower_loss=broken, init=started)().rounds == 1


def test_a_mean_over_a_class_is_finite_on_all_samples_if_not_on_a_few() -> None:
    t = np.array([0.0, 0, 0, 0, 0, 1, 1, 0])
    clients = rk.Clients(upper=[{"a": np.arange(16.0).reshape(8, 2), "t": t}] * N)
    masked = lambda x, b: jnp.sum(b["t"] * (b["a"] @ x) ** 2) / jnp.sum(b["t"])
    assert runs(problem=rk.SingleLevel(masked), clients=clients)().rounds == 1


def test_a_sum_is_warned_of_where_clients_are_equal() -> None:
    summed = rk.SingleLevel(lambda x, b: jnp.sum((b["a"] @ x - b["t"]) ** 2))
    data = [rows(4, value) for value in (1.0, 2.0, 3.0)]
    with pytest.warns(UserWarning, match=r"SingleLevel.loss must be a mean over its batch; on 3 samples .*jnp.mean"):
        runs(problem=summed, clients=rk.Clients(upper=data))()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runs(problem=summed, clients=rk.Clients(upper=data))()  # said once
        runs(clients=rk.Clients(upper=data))()


@pytest.mark.parametrize(
    ("problem", "clients", "message"),
    [
        (rk.Bilevel(upper, lambda x, y, b: squares(b["a"] @ y["w"], b)), CLIENTS, "lower does not depend on x"),
        (rk.Bilevel(lower, lower), ONE_LEVEL, "the same function on the same data"),
    ],
)
def test_levels_that_are_not_nested_are_warned_of(problem: Any, clients: Any, message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        checks.check_used(problem, clients, *INIT)


def test_pairs_that_are_meant_are_no_broadcasting() -> None:
    pairs = lambda x, b: jnp.mean(((b["a"] @ x)[:, None] - b["t"][None, :]) ** 2)
    kernel = lambda x, b: jnp.mean((b["a"] @ b["a"].T) @ (b["a"] @ x))
    several = lambda x, b: jnp.mean((b["a"] * x - b["a"][:, :1]) ** 2) + jnp.sum(jnp.outer(x, x))
    for loss in (pairs, kernel, several, lambda x, b: squares(jnp.sum(b["a"] * x, axis=1), b)):
        checks.check_losses(rk.SingleLevel(loss), ONE_LEVEL, np.ones(2), ())


@pytest.mark.parametrize("t", [(4, 1), (4,)])
def test_targets_in_a_column(t: tuple[int, ...]) -> None:
    """(n,) − (n, 1) is refused wherever the column comes from: the data, here."""
    clients = rk.Clients(upper=[{"a": np.ones((4, 2)), "t": np.ones(t)}] * 2)
    call = lambda: checks.check_losses(SINGLE, clients, np.ones(2), ())
    if len(t) == 1:
        call()
    else:
        refused(call, r"SingleLevel.loss broadcasts arrays of shape \(5, 1\) and \(5,\) to \(5, 5\)")


def test_batches_of_one_sample_are_all_there_are_where_every_client_has_one() -> None:
    loss = rk.SingleLevel(lambda x, b: jnp.mean(b * x))  # (n,) by (2,)
    checks.check_losses(loss, rk.Clients(upper=[np.ones(1)] * 2), np.ones(2), ())
    message = r"SingleLevel.loss fails on init and a batch of 5 samples: .*\(5,\), \(2,\)"
    for clients in (rk.Clients(upper=[np.ones(2)] * 2), rk.Clients.like(upper=np.ones(()), n=2)):
        refused(lambda clients=clients: checks.check_losses(loss, clients, np.ones(2), ()), message)


def test_algorithms_stay_plain_dataclasses() -> None:
    method = rk.FedBiO(0.2, lower_step=0.3)
    assert pickle.loads(pickle.dumps(method)) == method == replace(rk.FedBiO(), upper_step=0.2, lower_step=0.3)
    assert list(inspect.signature(rk.FedBiO).parameters)[:2] == ["upper_step", "lower_step"]
