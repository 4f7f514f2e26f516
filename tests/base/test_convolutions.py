"""Convolutions and pooling as products: the same numbers as XLA's, in values, gradients and second derivatives."""

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rookery as rk
from rookery.base import convolutions
from rookery.base.convolutions import as_products
from rookery.base.jaxprs import within
from rookery.engines.engine import PROGRAMS, Job

REWRITTEN = ("conv_general_dilated", "reduce_window", "select_and_scatter_add", "select_and_gather_add")


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def drawn(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape) for shape in shapes]


def primitives(jaxpr: Any) -> set[str]:
    """The names of all primitives in a jaxpr, and in those within it."""
    found = {str(eqn.primitive) for eqn in jaxpr.eqns}
    return found.union(*(primitives(inner) for eqn in jaxpr.eqns for inner in within(eqn.params)))


def left(fn: Callable[..., Any], *args: Any) -> set[str]:
    """What is not rewritten in a function."""
    return {name for name in primitives(jax.make_jaxpr(fn)(*args).jaxpr) if name.startswith(REWRITTEN)}


def agree(found: Any, expected: Any, tolerance: float = 1e-10) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), found, expected)
    jax.tree.map(lambda a, b: np.testing.assert_equal(jnp.asarray(a).dtype, jnp.asarray(b).dtype), found, expected)


def all_derivatives(fn: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """The value of a nonlinear function of fn's; its gradient; and second derivatives, each way round."""
    along = [jnp.cos(7 * a) for a in args]
    total = lambda *a: jnp.sum(jnp.sin(fn(*a)))
    gradient = jax.grad(total, tuple(range(len(args))))
    inner = lambda *a: sum(jnp.vdot(g, v) for g, v in zip(gradient(*a), along, strict=True))

    def both(*args: Any) -> Any:
        forward = jax.jvp(gradient, args, tuple(along))
        backward = jax.grad(inner, tuple(range(len(args))))(*args)
        mixed = jax.grad(lambda *a: jax.jvp(total, a, tuple(along))[1])(*args)
        return fn(*args), forward, backward, mixed

    return both


def same(fn: Callable[..., Any], *args: Any) -> None:
    """fn's derivatives agree with XLA's, and nothing is left to rewrite."""
    every = all_derivatives(fn, *args)
    assert left(every, *args)
    assert not left(as_products(every), *args)
    agree(jax.jit(as_products(every))(*args), jax.jit(every)(*args))


# Convolutions.

LAYOUTS = {1: ("NCH", "OIH", "NCH"), 2: ("NCHW", "OIHW", "NCHW"), 3: ("NHWDC", "HWDIO", "NHWDC")}
CASES = [
    # kernel, strides, padding, lhs and rhs dilation, feature and batch groups, features in a group, out
    ((3,), (2,), "SAME", (1,), (1,), 1, 1, 3, 4),
    ((3, 3), (1, 1), "VALID", (1, 1), (1, 1), 1, 1, 3, 4),
    ((3, 3), (1, 1), "SAME", (1, 1), (1, 1), 1, 1, 22, 2),  # a product for each row; the product first
    ((3, 2), (2, 3), "SAME", (1, 1), (1, 2), 1, 1, 2, 3),
    ((2, 3), (1, 2), ((2, 1), (-1, 3)), (2, 1), (2, 1), 1, 1, 3, 2),
    ((1, 1), (1, 1), "VALID", (1, 1), (1, 1), 1, 1, 3, 2),
    ((3, 3), (2, 2), "SAME", (1, 1), (1, 1), 2, 1, 2, 6),
    ((3, 3), (1, 1), "SAME", (1, 1), (1, 1), 5, 1, 1, 5),  # depthwise
    ((3, 2), (2, 1), ((0, 1), (1, 1)), (1, 2), (1, 1), 1, 2, 3, 4),
    ((7, 6), (1, 1), "VALID", (1, 1), (1, 1), 1, 1, 2, 3),  # the kernel as large as the image
    ((2, 2, 2), (1, 2, 1), "SAME", (1, 1, 1), (1, 1, 1), 1, 1, 2, 3),
]


QUICK = [CASES[k] for k in (4, 8)]  # between them: strides, padding, both dilations, groups


@pytest.mark.parametrize("case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES], ids=str)
def test_convolutions_agree_with_xla(case: Any) -> None:
    kernel, strides, padding, spread, dilation, groups, batches, features, out = case
    sizes = (7, 6, 5)[: len(kernel)]
    specs = lax.conv_dimension_numbers((1,) * (len(kernel) + 2), (1,) * (len(kernel) + 2), LAYOUTS[len(kernel)])
    put = lambda spec, values: tuple(value for _, value in sorted(zip(spec, values, strict=True)))
    image = put(specs.lhs_spec, (4, features * groups, *sizes))
    weights = put(specs.rhs_spec, (out, features, *kernel))
    if isinstance(padding, str):
        reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
        padding = lax.padtype_to_pads(sizes, reach, strides, padding)

    def convolve(image: Any, weights: Any) -> Any:
        return lax.conv_general_dilated(
            image, weights, strides, padding, spread, dilation, LAYOUTS[len(kernel)], groups, batches
        )

    same(convolve, *drawn(0, image, weights))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(("NHWC", "HWIO", "NHWC"), marks=pytest.mark.slow),
        pytest.param(("NCHW", "HWIO", "NHWC"), marks=pytest.mark.slow),
        ("HWNC", "IOWH", "CWHN"),
    ],
)
def test_any_layout(layout: tuple[str, str, str]) -> None:
    sizes = {"N": 2, "C": 3, "H": 6, "W": 5}, {"I": 3, "O": 4, "H": 3, "W": 2}
    image, kernel = (tuple(size[name] for name in names) for size, names in zip(sizes, layout, strict=False))
    convolve = lambda a, k: lax.conv_general_dilated(a, k, (2, 1), "SAME", dimension_numbers=layout)
    same(convolve, *drawn(1, image, kernel))


@pytest.mark.slow
def test_kernels_of_clients_and_of_samples() -> None:
    """vmapped before and after; a gradient for each sample has groups of the batch."""
    convolve = lambda a, k: lax.conv(a, k, (1, 1), "SAME")
    images, kernels = drawn(2, (3, 2, 3, 5, 5), (3, 4, 3, 3, 3))
    same(jax.vmap(convolve), images, kernels)
    gradient = jax.grad(lambda k, a: jnp.sum(jnp.sin(convolve(a[None], k))))
    each = jax.vmap(gradient, (None, 0))
    assert not left(as_products(each), kernels[0], images[0])
    agree(as_products(each)(kernels[0], images[0]), each(kernels[0], images[0]))
    one = jax.grad(lambda k, a: jnp.sum(jnp.sin(convolve(a, k))))
    agree(jax.vmap(as_products(one))(kernels, images), jax.vmap(one)(kernels, images))


def test_precision_and_types_are_kept() -> None:
    image, kernel = (jnp.asarray(a, jnp.bfloat16) for a in drawn(3, (2, 30, 6, 6), (3, 30, 3, 3)))
    for wanted in (None, jnp.float32):
        convolve = lambda a, k, wanted=wanted: lax.conv_general_dilated(
            a, k, (1, 1), "VALID", precision="highest", preferred_element_type=wanted
        )
        found, expected = (jax.jit(fn)(image, kernel) for fn in (as_products(convolve), convolve))
        assert found.dtype == expected.dtype
        exact = lax.conv(image.astype(jnp.float64), kernel.astype(jnp.float64), (1, 1), "VALID")
        tolerance = 2.0**-8 if wanted is None else 1e-5
        np.testing.assert_allclose(found.astype(float), exact, rtol=tolerance, atol=tolerance)
        dots = [
            e for e in jax.make_jaxpr(as_products(convolve))(image, kernel).eqns if str(e.primitive) == "dot_general"
        ]
        assert dots
        assert all(e.params["precision"] == (lax.Precision.HIGHEST,) * 2 for e in dots)
    whole = [jnp.asarray(10 * a, jnp.int32) for a in (image, kernel)]
    convolve = lambda a, k: lax.conv(a, k, (1, 1), "VALID")
    agree(jax.jit(as_products(convolve))(*whole), convolve(*whole))


def test_what_would_need_too_many_slices_is_left() -> None:
    image, kernel = drawn(4, (1, 1, 400), (1, 1, 200))
    convolve = lambda a, k: lax.conv(a, k, (1,), "VALID")
    assert left(as_products(convolve), image, kernel) == {"conv_general_dilated"}
    agree(as_products(convolve)(image, kernel), convolve(image, kernel))


# Pooling.


@pytest.mark.parametrize(
    ("size", "strides", "padding"),
    [
        ((2, 2), (2, 2), "VALID"),  # windows apart, which leave a row over
        ((3, 2), (2, 1), "SAME"),  # windows that overlap, and padding
        pytest.param((2, 3), (3, 3), ((1, 0), (2, 2)), marks=pytest.mark.slow),
        pytest.param((2, 2), (2, 2), "SAME", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("reducer", ["max", *(pytest.param(own, marks=pytest.mark.slow) for own in ("min", "sum"))])
def test_pooling_agrees_with_xla_with_ties(size: Any, strides: Any, padding: Any, reducer: str) -> None:
    start, fold = {"max": (-jnp.inf, lax.max), "min": (jnp.inf, lax.min), "sum": (0.0, lax.add)}[reducer]
    padding = padding if isinstance(padding, str) else ((0, 0), *padding, (0, 0))

    def pool(a: Any) -> Any:
        return lax.reduce_window(a, start, fold, (1, *size, 1), (1, *strides, 1), padding)

    (image,) = drawn(5, (2, 7, 8, 3))
    positive = np.maximum(image, 0)  # many ties: the first of the largest gets the whole gradient
    slope = jax.grad(lambda a: jnp.sum(jnp.sin(pool(a) + 1)))
    assert not left(as_products(slope), image)
    rewritten, plain = jax.jit(as_products(slope)), jax.jit(slope)
    for given in (image, positive, np.zeros_like(image)):
        agree(rewritten(given), plain(given))
    weigh = lambda a: jnp.sum(jnp.cos(pool(a)) ** 2)
    second = lambda a: (jax.jvp(weigh, (a,), (a,)), jax.jvp(jax.grad(weigh), (a,), (jnp.cos(a),)))
    single = jnp.asarray(positive, jnp.float32)  # XLA has no double precision for this on a CPU
    assert not left(as_products(second), single)
    agree(jax.jit(as_products(second))(single), jax.jit(second)(single), 1e-5)


@pytest.mark.parametrize(("size", "strides", "padding"), [((2, 2), (2, 2), "VALID"), ((3, 3), (2, 2), "SAME")])
def test_pooling_agrees_with_xla_on_infinite_inputs(size: Any, strides: Any, padding: Any) -> None:
    window = (1, *size, 1), (1, *strides, 1), padding
    rng = np.random.default_rng(0)
    for infinite, start, fold in ((-np.inf, -jnp.inf, lax.max), (np.inf, jnp.inf, lax.min)):
        pool = lambda a, start=start, fold=fold: lax.reduce_window(a, start, fold, *window)
        moved = lambda a, t, pool=pool: jax.jvp(pool, (a,), (t,))
        slope = lambda a, pool=pool: jax.vjp(pool, a)[1](jnp.ones_like(pool(a)))
        tangent = rng.normal(size=(40, 5, 5, 1)).astype(np.float32)
        image = np.where(rng.uniform(size=tangent.shape) < 0.7, infinite, tangent[::-1]).astype(np.float32)
        image[0] = -infinite
        agree(jax.jit(as_products(moved))(image, tangent), jax.jit(moved)(image, tangent), 1e-6)
        agree(jax.jit(as_products(slope))(image), jax.jit(slope)(image), 1e-6)


# Where they stand.


@pytest.mark.slow
def test_inside_everything_that_has_a_body() -> None:
    image, kernel = drawn(6, (2, 3, 6, 6), (3, 3, 3, 3))
    convolve = lambda a, k: lax.conv(a, k, (1, 1), "SAME")

    @jax.custom_jvp
    def own_rule(a: Any, k: Any) -> Any:
        return jax.nn.relu(convolve(a, k))

    own_rule.defjvps(lambda t, out, a, k: 2 * convolve(t, k), lambda t, out, a, k: 3 * convolve(a, t))
    own_vjp = jax.custom_vjp(lambda a, k: convolve(a, k))
    own_vjp.defvjp(lambda a, k: (convolve(a, k), (a, k)), lambda held, t: (5 * held[0], 7 * held[1]))
    bodies = {
        "jit": jax.jit(convolve),
        "relu": lambda a, k: jax.nn.relu(convolve(a, k)),
        "checkpoint": jax.checkpoint(lambda a, k: jnp.sin(convolve(a, k))),
        "cond": lambda a, k: lax.cond(a[0, 0, 0, 0] > 0, convolve, lambda a, k: convolve(a, 2 * k), a, k),
        "scan": lambda a, k: lax.scan(lambda a, _: (jnp.sin(convolve(a, k)), None), a, length=2)[0],
        "custom_jvp": own_rule,
        "custom_vjp": own_vjp,
    }
    for name, body in bodies.items():
        total = lambda a, k, body=body: jnp.sum(jnp.sin(body(a, k)))
        for fn in (total, jax.grad(total, (0, 1))):
            assert not left(as_products(fn), image, kernel), name
            agree(jax.jit(as_products(fn))(image, kernel), jax.jit(fn)(image, kernel))
    looped = lambda a, k: lax.while_loop(lambda s: jnp.max(s) < 10, lambda s: s + convolve(s, k) ** 2, a)
    assert not left(as_products(looped), image, kernel)
    agree(as_products(looped)(image, kernel), looped(image, kernel))


def test_a_program_without_convolutions_is_the_same_object() -> None:
    jaxpr = jax.make_jaxpr(lambda a: jax.nn.relu(a @ a))(np.ones((2, 2))).jaxpr
    assert convolutions.rewrite(jaxpr) is jaxpr


# In a run.


class Net(eqx.Module):
    """A convolution, pooling and a linear layer, by Equinox."""

    convolution: eqx.nn.Conv2d
    pool: eqx.nn.MaxPool2d
    last: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        one, two = jax.random.split(key)
        self.convolution = eqx.nn.Conv2d(1, 3, 3, padding=1, key=one)
        self.pool = eqx.nn.MaxPool2d(2, 2)
        self.last = eqx.nn.Linear(27, 2, key=two)

    def __call__(self, image: Any) -> Any:
        return self.last(self.pool(jax.nn.relu(self.convolution(image))).ravel())


def equinox_case(sizes: tuple[int, ...] = (4, 4, 4, 4), side: int = 6) -> tuple[Any, Any, Any]:
    """A problem, its clients and where to start."""
    with jax.enable_x64(False):
        arrays, static = eqx.partition(Net(jax.random.key(0)), eqx.is_array)

    def loss(arrays: Any, batch: Any) -> Any:
        scores = jax.vmap(eqx.combine(arrays, static))(batch["image"])
        return -jnp.mean(jax.nn.log_softmax(scores)[:, 0] * batch["label"])

    rng = np.random.default_rng(0)
    rows = [
        {
            "image": rng.normal(size=(n, 1, side, side)).astype(np.float32),
            "label": rng.normal(size=n).astype(np.float32),
        }
        for n in sizes
    ]
    return rk.SingleLevel(loss), rk.Clients(upper=rows), arrays


def trained(engine: Any, case: Any, **method: Any) -> Any:
    problem, clients, init = case
    method = rk.FedAvg(step=0.1, local_steps=2, **{"batch_size": 2, **method})
    return rk.solve(problem, clients, method, init, rounds=2, cohort=3, engine=engine, progress=False).x


@pytest.mark.slow
@pytest.mark.parametrize("engine", [rk.Simulation(), pytest.param(rk.Federation(), marks=pytest.mark.slow)])
@pytest.mark.parametrize("sizes", [pytest.param((4, 4, 4, 4), marks=pytest.mark.slow), (3, 5, 1, 4)])
def test_both_engines_agree_with_xla(sizes: tuple[int, ...], engine: Any) -> None:
    with jax.enable_x64(False):
        case = equinox_case(sizes)
        expected = trained(rk.Simulation(convolutions="xla"), case)
        agree(trained(engine, case), expected, 1e-5)


def test_a_plan_has_products_alone_and_the_flag_is_part_of_it() -> None:
    with jax.enable_x64(False):
        problem, clients, init = equinox_case()
        job = Job(problem, clients, rk.FedAvg(step=0.1, local_steps=2, batch_size=2), (init, ()), 3)
        plans = {c: rk.Simulation(convolutions=c).open(job)._traced.round for c in ("auto", "products", "xla")}
        names = {c: {n for n in primitives(plan.jaxpr) if n.startswith(REWRITTEN)} for c, plan in plans.items()}
    assert names["xla"] == {"conv_general_dilated", "reduce_window_max", "select_and_scatter_add"}
    assert names["products"] == set()
    same_as_auto = "products" if convolutions.chosen("auto") else "xla"
    assert plans["auto"].fingerprint == plans[same_as_auto].fingerprint
    assert plans["products"].fingerprint != plans["xla"].fingerprint


def test_work_that_is_rare_is_rewritten_too() -> None:
    """`Client.when`, whose branch is traced by itself."""
    image, kernel = drawn(7, (2, 1, 5, 5), (1, 1, 3, 3))
    from rookery.language.loops import rarely

    convolve = lambda k: lax.conv(jnp.asarray(image), k, (1, 1), "VALID")
    zeros = jnp.zeros((2, 1, 3, 3))
    program = lambda products: jax.vmap(lambda c, k: rarely(c, lambda: convolve(k), zeros, products))
    kernels, holds = jnp.stack([kernel, 2 * kernel]), jnp.array([True, False])
    assert not left(program(True), holds, kernels)
    agree(program(True)(holds, kernels), program(False)(holds, kernels))


@pytest.mark.slow
def test_another_shape_of_the_same_problem() -> None:
    with jax.enable_x64(False):
        before = PROGRAMS.made
        for batch in (2, 3, 2):
            case = equinox_case()
            agree(trained(rk.Simulation(), case, batch_size=batch),
                  trained(rk.Simulation(convolutions="xla"), case, batch_size=batch), 1e-5)  # fmt: skip
    assert PROGRAMS.made - before <= 2 * 2 * 2  # two shapes, with and without, a start and a round


@pytest.mark.parametrize("engine", [rk.Simulation, rk.Federation])
def test_no_other_choice(engine: Any) -> None:
    with pytest.raises(ValueError, match=r'convolutions must be "auto", "products" or "xla"; got \'fft\''):
        engine(convolutions="fft")
