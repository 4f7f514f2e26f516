"""What a method's fields may be follows from their annotations, however they are written, and never from a name."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

import rookery as rk
from rookery import hyperparameters
from rookery.fed import Share
from rookery.tune import step_sizes

SQUARES = rk.SingleLevel(lambda x, b: jnp.mean((x - b) ** 2))
CLIENTS = rk.Clients(upper=[np.array([1.0, 2.0]), np.array([3.0])])
ZERO = np.zeros(())


class State(NamedTuple):
    x: Any
    y: Any = ()


class Descends:
    """Gradient descent, for methods that differ in their fields alone."""

    solves: ClassVar[tuple[type, ...]] = (rk.SingleLevel,)

    def init(self, fed: Any, x: Any, y: Any, key: Any) -> State:
        return State(x)

    def round(self: Any, fed: Any, state: State, key: Any) -> State:
        gradient = fed.mean(fed.map(lambda c, k: c.f_x(state.x, (), c.upper()), key))
        return State(self.moved(state.x, gradient))

    def moved(self: Any, x: Any, gradient: Any) -> Any:
        return x - self.step * gradient


def solve(method: Any, **given: Any) -> float:
    return float(rk.solve(SQUARES, CLIENTS, method, ZERO, 2, **given).x)


@dataclass(frozen=True)
class Texts(Descends):
    """Its annotations are texts, as this file's import makes them."""

    step: rk.Step = 0.1
    momentum: Share = 0.5
    local_steps: rk.Steps = 1
    kind: Literal["a", "b"] = "a"


def test_annotations_that_are_texts_are_understood() -> None:
    assert isinstance(Texts.__annotations__["step"], str)
    assert solve(Texts(step=0.1)) == pytest.approx(solve(Texts(step=lambda t: 0.1)))
    assert step_sizes(Texts()) == ["step"]
    for given, said in [
        ({"step": -1.0}, "step must be a positive number; got -1.0"),
        ({"momentum": 2.0}, "momentum must be a number above 0 and at most 1; got 2.0"),
        ({"local_steps": 0}, "local_steps must be an integer of at least 1, .*; got 0"),
        ({"kind": "c"}, "kind must be one of 'a', 'b'; got 'c'"),
    ]:
        with pytest.raises(ValueError, match=f"Texts: {said}"):
            solve(Texts(**given))


def test_names_of_a_functions_own_scope_are_understood_where_they_can_be() -> None:
    import rookery as local_name
    from rookery.fed import Step  # noqa: F401

    @dataclass(frozen=True)
    class Inside(Descends):
        step: local_name.Step = 0.1
        other: Unknown = 3  # type: ignore[name-defined]  # noqa: F821

    assert solve(Inside()) == pytest.approx(solve(Texts()))
    assert step_sizes(Inside()) == ["step"]
    with pytest.raises(ValueError, match="step must be a positive number; got 0"):
        solve(Inside(step=0.0))


@dataclass(frozen=True)
class Untyped(Descends):
    step: Any = 0.1
    upper_step: float = 0.2


def test_steps_whose_annotation_says_little_can_be_tuned() -> None:
    assert step_sizes(Untyped()) == ["step", "upper_step"]
    evaluate = lambda x, y: {"loss": jnp.mean((x - 2.25) ** 2)}
    found = rk.tune(SQUARES, CLIENTS, Untyped(), ZERO, rounds=4, search=["step"], metric="loss", evaluate=evaluate)
    assert found.best is not None
    assert found.best.step != 0.1


@dataclass(frozen=True)
class OtherWords(Descends):
    """Its fields are called as those of other methods are, and mean something else."""

    step: rk.Step = 0.1
    server: str = "proxy"
    size: int = 0
    direction: str = "up"
    momentum: float = -3.0
    output: tuple[str, ...] = ("x",)
    optimizer: str = "mine"


def test_a_name_has_no_rule() -> None:
    assert solve(OtherWords()) == pytest.approx(solve(Texts()))
    assert step_sizes(OtherWords()) == ["step"]


@dataclass(frozen=True)
class Proximal(Descends):
    """With a function among its fields, which is no schedule."""

    step: rk.Step = 0.1
    prox: Any = jnp.asarray
    penalty: float = 0.0

    def moved(self, x: Any, gradient: Any) -> Any:
        return self.prox(x - self.step * gradient)


def test_a_function_is_a_schedule_only_where_a_step_is_expected() -> None:
    seen: list[Any] = []
    halved = lambda z: seen.append(z) or 0.5 * z
    plain, proximal = solve(Proximal(prox=lambda z: z)), solve(Proximal(prox=halved))
    assert plain == pytest.approx(solve(Texts()))
    assert 0 < proximal < plain
    assert all(np.shape(z) == () and jnp.issubdtype(z.dtype, jnp.floating) for z in seen)
    with pytest.raises(ValueError, match=r"penalty must be a number; got the function <lambda>\. Only .* rk\.Step"):
        solve(Proximal(penalty=lambda t: 0.1))


def test_every_field_of_the_librarys_methods_has_a_rule() -> None:
    for name in rk.algorithms.__all__:
        cls = getattr(rk, name)
        for field in dataclasses.fields(cls):
            assert hyperparameters.expected(cls, field.name), f"{name}.{field.name}"
