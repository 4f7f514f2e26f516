"""What is wrong is said at once: one clear error, before anything is compiled, that names what, where and the fix."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

import rookery as rk
from rookery.engines.engine import PROGRAMS

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
        ([rows(), {"a": np.ones((3, 2)), "t": np.ones(4)}], r"client 1's arrays .*leading axis .*'a'\]: 3.*'t'\]: 4"),
        ([rows(), rows(), rows(0)], r"lower: client 2 is empty; .*at least one sample"),
        ([rows(), {"a": np.ones((3, 2))}], r"lower: client 1's data has the structure"),
        ([rows(), {"a": np.ones((2, 5)), "t": np.ones(2)}], r"client 1's \['a'\] has .*shape \(5,\).*0's \(2,\)"),
        ([rows(), {"a": np.ones((2, 2)), "t": 1.0}], r"client 1's \['t'\] is a single number; .*leading axis"),
        ([{"a": np.array(["cat", "dog"])}], r"\['a'\] has the type .*arrays of real numbers"),
        ([], r"lower is an empty list: .*at least one client"),
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
        lambda: rk.Clients(lower=[rows()] * 2, upper=[rows()] * 3), r"lower has data of 2 clients and upper of 3: give"
    )
    refused(lambda: rk.Clients(), r"needs data: give lower=")


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, 2.0], r"weights has the shape \(2,\); give one number for each of the 3 clients"),
        ([1.0, -1.0, 1.0], r"weights must be finite, not negative"),
        ([1.0, np.nan, 1.0], r"weights must be finite"),
        ([0.0, 0.0, 0.0], r"weights .*not all zero"),
        ("equal", r"weights='equal' is not known: give numbers"),
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
        ((np.ones(2), {"w": np.ones(2, int)}), r"init: y\['w'\] has the type int64; .*use .astype\(float\)"),
        ((np.ones(2), {"w": np.array([1.0, np.nan])}), r"init: y\['w'\] must be finite; it has NaN"),
        ((np.array([np.inf, 0.0]), {"w": np.ones(2)}), r"init: x must be finite"),
        ((np.ones(2), {"w": "zeros"}), r"init: y\['w'\] must be a floating-point array; got 'zeros'"),
        ((np.ones(2), None), r"init: y must have at least one array to start from; got None"),
    ],
)  # fmt: skip
def test_init(init: Any, message: str) -> None:
    refused(lambda: solve(init=init), message)


def test_init_of_a_compositional_problem_that_does_not_fit() -> None:
    message = r"init: y is \(3,\), and the inner function's value is \(2,\); they must agree"
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
        r"scope must be \"global\" or \"client\"; got 'local'",
    )  # type: ignore[arg-type]


def test_one_number_of_local_steps_for_all() -> None:
    refused(
        lambda: solve(algorithm=rk.FedBiO(local_steps=(1, 3))),  # type: ignore[arg-type]
        r"FedBiO: local_steps=\(1, 3\) is not an integer, at least 1",
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
        ({"upper_step": -0.1}, r"upper_step=-0.1 is not a positive number"),
        ({"upper_step": 0.0}, r"upper_step=0.0 is not a positive number"),
        ({"lower_step": float("nan")}, r"lower_step=nan is not a positive number"),
        ({"lower_step": float("inf")}, r"lower_step=inf is not a positive number"),
        ({"lower_step": "0.1"}, r"lower_step='0.1' is not a positive number"),
        ({"lower_step": None}, r"lower_step=None is not a positive number"),
        ({"lower_step": True}, r"lower_step=True is not a positive number"),
        ({"lower_step": [0.1, 0.2]}, r"lower_step=\[0.1, 0.2\] is not a positive number"),
        ({"upper_step": lambda t: 0.1 * t - 0.5}, r"upper_step=-0.5 in round 0 is not a positive number"),
        ({"hessian_step": 0.0}, r"hessian_step=0.0 is not a positive number, or 'auto'"),
        ({"hessian_step": "Auto"}, r"hessian_step='Auto' is not a positive number, or 'auto'"),
        ({"neumann": "exact"}, r"neumann='exact' is not one of 'sum', 'random', 'cg'"),
        ({"neumann_terms": 0}, r"neumann_terms=0 is not an integer, at least 1"),
        ({"neumann_terms": 2.5}, r"neumann_terms=2.5 is not an integer"),
        ({"lower_rounds": 0}, r"lower_rounds=0 is not an integer, at least 1"),
        ({"batch_size": 0}, r"batch_size=0 is not an integer, at least 1, or None"),
        ({"lower_local_steps": [1, 2]}, r"lower_local_steps has 2 entries; give one for each of the 3 clients"),
        ({"upper_local_steps": np.array([1, 2, 3, 4])}, r"upper_local_steps has 4 entries; give one for each of the 3"),
        (
            {"upper_local_steps": [1, 0, 2]},
            r"upper_local_steps=\[1, 0, 2\] is not one positive integer for each client",
        ),
        ({"upper_local_steps": (3, 1)}, r"upper_local_steps=\(3, 1\) is not a range \(low, high\)"),
        ({"lower_local_steps": rk.Epochs(0)}, r"lower_local_steps=.* is not Epochs of a positive number"),
        ({"lower_local_steps": 0}, r"lower_local_steps=0 is not an integer, at least 1"),
        ({"resample": 1}, r"resample=1 is not True or False"),
    ],
)
def test_hyperparameters(given: dict[str, Any], message: str) -> None:
    refused(lambda: solve(algorithm=rk.FedNest(**{"hessian_step": 0.1} | given)), f"FedNest: {message}")


def test_local_steps_of_a_single_level_method() -> None:
    method = rk.FedAvg(local_steps=[1, 2])
    refused(
        lambda: solve(SINGLE, ONE_LEVEL, method, np.ones(2)),
        "FedAvg: local_steps has 2 entries; give one for each of the 3",
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
    with pytest.raises(ValueError, match="evaluate returns 'seconds', a name that the history uses itself; call it"):
        solve(SINGLE, ONE_LEVEL, rk.FedAvg(), np.ones(2), evaluate=lambda x, y: {"seconds": 1.0})


def test_other_slips_at_the_border(tmp_path: Path) -> None:
    """A value of the wrong kind is named, before anything is compiled."""
    given = {"problem": SINGLE, "clients": ONE_LEVEL, "algorithm": rk.FedAvg(step=0.1), "init": np.ones(2)}
    refused(lambda: rk.Clients(upper=rows()), "upper is a dict; give a list", TypeError)
    refused(lambda: rk.Clients(upper=[rows()], weights=["a"]), "weights=.*one number per client")
    refused(lambda: rk.Clients(upper=[{"a": np.ones(2, complex)}]), "complex128; data are arrays of real numbers")
    refused(lambda: solve(**given, seed=1.5), r"seed must be an integer from 0 to 2\*\*64 - 1; got 1.5")
    refused(lambda: solve(**given, engine=rk.Simulation), "give rk.Simulation", TypeError)
    refused(lambda: solve(**given, callbacks=print), "callbacks is a function; give a list", TypeError)
    refused(lambda: solve(**given | {"algorithm": rk.FedAvg(local_steps=lambda t: 1)}), "only a step size may be a sch")
    python = rk.FedAvg(step=lambda t: 0.1 if t < 5 else 0.01)
    refused(lambda: solve(**given | {"algorithm": python}), "schedule step can't be compiled")
    with pytest.raises(TypeError, match="evaluate must return a dict of numbers"):
        solve(**given, evaluate=lambda x, y: {"vector": x})


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
        ({"clients": rk.Clients(lower=[rows()] * N)}, "these clients have none: give Clients.lower=.*center=rows"),
        ({"clients": rk.Clients([rows()] * N, [rows()] * N, center=rows())}, "one data set for each client"),
        ({"clients": rk.Clients([rows()] * N, weights=[1, 2, 1], center=rows())}, "learns the clients' weights.*init="),
        ({"clients": rk.Clients([rows()] * N, center={"a": np.ones((1, 2))})}, "on the centre's data.*KeyError"),
        ({"cohort": 2}, "WeightedNodesProx needs all 3 clients in every round; got cohort=2"),
        ({"init": (np.array([0.9, 0.1, 0.0]), np.ones(2))}, "from 0 to cap=0.5"),
        ({"init": (np.array([0.5, 0.1, 0.1]), np.ones(2))}, "w must add up to 1"),
        ({"init": (None, np.array([1, 2]))}, "theta has the type int"),
        ({"algorithm": rk.WeightedNodesABA(refresh=1.5)}, "refresh=1.5 is not a number above 0, at most 1"),
        ({"algorithm": rk.WeightedNodesABA(average="theory")}, "give strong_convexity=μ"),
        ({"algorithm": rk.FedAvg()}, "FedAvg does not solve WeightedNodes problems"),
    ],
)
def test_weighted_nodes(changed: dict[str, Any], message: str) -> None:
    given = {"problem": NODES, "clients": WITH_CENTER, "algorithm": rk.WeightedNodesProx(), "init": np.ones(2)}
    refused(lambda: solve(**given | changed), message)


def test_the_center_and_the_weights() -> None:
    refused(lambda: rk.Clients([rows()], center_client=0), "there are none: give center")
    refused(lambda: rk.Clients([rows()], center=rows(), center_client=1), "center_client=1: .* from 0 to 0")
    refused(lambda: rk.Clients([rows()], center={"a": np.ones(0)}), "center: client 0 is empty")
    run = solve(SINGLE, ONE_LEVEL, rk.FedAvg(), np.ones(2))
    assert not hasattr(run, "weights")
    with pytest.raises(AttributeError, match="learns no weights of the clients"):
        _ = run.weights
