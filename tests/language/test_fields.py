"""What a method's fields may be follows from their annotations, however they are written, and never from a name."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, Optional

import jax.numpy as jnp
import numpy as np
import pytest

import rookery as rk
from rookery.language import hyperparameters
from rookery.language.fed import Share
from rookery.run.search import step_sizes

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
    from rookery.language.fed import Step  # noqa: F401

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


@dataclass(frozen=True)
class Made(Descends):
    """Its __post_init__ makes a field and an attribute of what is given, and checks it."""

    step: rk.Step = 0.1
    words: list[str] = dataclasses.field(default_factory=lambda: ["a", "b"])
    ragged: Any = dataclasses.field(default_factory=lambda: [[1], [2, 3]])
    half: float = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        if not callable(self.step) and self.step > 10:
            raise ValueError("step is too large")
        object.__setattr__(self, "half", 0.5 * (0.1 if callable(self.step) else self.step))
        object.__setattr__(self, "quarter", 0.5 * self.half)

    @cached_property
    def rest(self) -> Any:
        return 0.25 * self.step

    def moved(self: Any, x: Any, gradient: Any) -> Any:
        assert (self.words, self.ragged) == (["a", "b"], [[1], [2, 3]])
        return x - (self.half + self.quarter + self.rest) * gradient


@pytest.mark.parametrize("step", [0.1, lambda t: 0.1])
def test_what_a_post_init_makes_is_kept(step: Any) -> None:
    method = Made(step=step)
    if not callable(step):
        assert method.rest == pytest.approx(0.025)  # and is then in the record's __dict__
    assert solve(method) == pytest.approx(solve(Texts()))


def test_what_a_post_init_makes_differs_between_candidates() -> None:
    evaluate = lambda x, y: {"at": x}
    found = rk.tune(SQUARES, CLIENTS, Made(), ZERO, 1, search={"step": [0.05, 0.2]}, metric="+at", evaluate=evaluate)
    np.testing.assert_allclose(found.table["last"], 4.5 * found.table["step"], rtol=1e-6)
    with pytest.raises(ValueError, match="Made has no hyperparameter 'half'; it has: step, words, ragged"):
        rk.tune(SQUARES, CLIENTS, Made(), ZERO, 2, search=["half"], metric="+at", evaluate=evaluate)


@dataclass(frozen=True)
class Forward(Descends):
    step: Optional["rk.Step"] = 0.1  # noqa: UP037, UP045

    def moved(self, x: Any, gradient: Any) -> Any:
        return x - (0.1 if self.step is None else self.step) * gradient


def test_a_text_within_an_annotation_is_understood() -> None:
    assert solve(Forward(None)) == solve(Forward(0.1)) == pytest.approx(solve(Forward(lambda t: 0.1)))
    with pytest.raises(ValueError, match="step must be a positive number or None; got -1"):
        solve(Forward(-1))


def test_numbers_that_no_field_may_be() -> None:
    steps = "local_steps must be an integer of at least 1, .*; got"
    for given, said in [
        ({"step": np.bool_(True)}, "step must be a positive number; got"),
        ({"step": np.complex64(1)}, "step must be a positive number; got"),
        ({"step": jnp.array(1 + 0j)}, "step must be a positive number; got"),
        ({"step": 10**400}, "step must be a positive number; got"),
        ({"step": lambda t: 1j}, "the schedule step must return a real number; got complex"),
        ({"step": lambda t: True}, "the schedule step must return a real number; got bool"),
        ({"local_steps": 2**33}, r"local_steps must be below 2\*\*31; got 8589934592"),
        ({"local_steps": (1, 2**33)}, r"local_steps must be below 2\*\*31; got"),
        ({"local_steps": [1, 2**33]}, r"local_steps must be below 2\*\*31; got"),
        ({"local_steps": [1, [2]]}, steps),
        ({"local_steps": ["a", "b"]}, steps),
    ]:
        with pytest.raises(ValueError, match=said):
            hyperparameters.check(Texts(**given), 2)
    with pytest.raises(ValueError, match=r"Epochs\(passes=1e\+30\) makes \d+ steps; at most 2\*\*31 - 1"):
        rk.explain(SQUARES, CLIENTS, rk.FedAvg(local_steps=rk.Epochs(1e30)), ZERO)
    hyperparameters.check(Texts(step=np.float32(0.1), local_steps=np.int64(3)), 2)


def test_every_field_of_the_librarys_methods_has_a_rule() -> None:
    for name in rk.algorithms.__all__:
        cls = getattr(rk, name)
        for field in dataclasses.fields(cls):
            assert hyperparameters.expected(cls, field.name), f"{name}.{field.name}"
