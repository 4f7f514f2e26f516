"""The methods that are compared: all splits, penalties and hospitals of one method are one compiled run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from rookery.algorithms import Ditto, FedAvg, FedBiOLocal, FineTuned, WeightedNodesProx
from rookery.algorithms.server_optimizer import with_server_optimizer
from rookery.data.clients import Clients
from rookery.engines.engine import Job
from rookery.engines.simulation.sweep import Sweep
from rookery.problems.problems import Bilevel, SingleLevel, WeightedNodes
from rookery.problems.variables import adapt
from rookery.run.arguments import checked
from rookery.run.solve import solve
from rookery.run.worth.designs import Site, samples
from rookery.run.worth.fits import RIDGE, losses_of, minimise, row_losses, smoothness, total_loss

ALONE, POOLED, FLOOR, CHANCE = "alone", "pooled", "commoner class", "chance"
FLOORS = (FLOOR, CHANCE)  # not trained
FEDERATED = ("FedAvg", "FedAdam", "fine-tuned", "Ditto", "own intercept", "learnt weights")
METHODS = (ALONE, *FEDERATED, POOLED, FLOOR)
SURVIVAL_METHODS = (*(name for name in METHODS if name not in ("own intercept", FLOOR)), CHANCE)
ABOUT = {
    ALONE: "the hospital's own model; its penalty is chosen on its own validation rows.",
    "FedAvg": "one model for all, with the penalty that is best on the validation rows of all.",
    "FedAdam": "the same with Adam at the server.",
    "fine-tuned": "FedAvg's model, trained further on the hospital's own rows.",
    "Ditto": "a model of the hospital's own that stays near FedAvg's, with a pull chosen on its own validation rows.",
    "own intercept": "common weights and an intercept of the hospital's own (FedBiOLocal).",
    "learnt weights": "WeightedNodesProx with the hospital's validation rows as the centre learns how much each "
    "hospital's rows count; the model is then trained with these weights.",
    POOLED: "one model on the rows of all hospitals: a bound for common models, not something a federation offers.",
    FLOOR: "always say the commoner class of the hospital's training rows; for AUC, the Brier score and the "
    "calibration error, always give the share of positive rows.",
    CHANCE: "the same risk for all patients.",
}
ABOUT_TIMES = ABOUT | {
    "FedAvg": "one model for all, with the penalty that is best on the validation rows of all. Cox's loss compares a "
    "patient only with those of the same hospital, so each hospital has a baseline hazard of its own, and there is no "
    "intercept to share.",
    POOLED: "one model on the rows of all hospitals, which also compares patients of different hospitals: a bound for "
    "common models, not something a federation offers.",
}

PENALTIES = (0.003, 0.01, 0.05, 0.2, 0.8)
_UNTUNED = 3  # the position of the penalty where a hospital cannot choose
_ROUNDS, _LOCAL_STEPS = 100, 5
_SERVER_STEP = 0.03  # of FedAdam
_TUNING = (0.01, 0.03, 0.1, 0.3, 1.0)  # fine-tuning's steps, as shares of the common step
_TUNING_STEPS = 50
_PULLS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # Ditto's λ
_NODE_PENALTIES, _NODE_ROUNDS, _NODE_STEPS = (0.01, 0.1, 0.3), 60, 10

Models = Float[np.ndarray, "hospitals splits d"]


@dataclass(frozen=True)
class Study:
    """The sites, and what the methods share."""

    sites: tuple[Site, ...]

    @property
    def survival(self) -> bool:
        """Whether the rows have times and events."""
        return self.sites[0].survival

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods for these rows; the last is the floor, which needs no features."""
        return SURVIVAL_METHODS if self.survival else METHODS

    @property
    def count(self) -> int:
        """The number of splits."""
        return len(self.sites[0].splits.train)

    @property
    def shares(self) -> np.ndarray:
        """Each hospital's weight in a common model, by its training rows."""
        sizes = np.array([each.splits.train[0].sum() for each in self.sites])
        return sizes / sizes.sum()

    @property
    def width(self) -> int:
        """The length of a model: its weights and its intercept."""
        return self.sites[0].maps.shape[2]

    def clients(self) -> Clients:
        """Return the hospitals as clients, weighted by their training rows."""
        return Clients(samples(self.sites, [each.used for each in self.sites]), weights=self.shares.tolist())

    def validation_loss(self, models: Any) -> np.ndarray:
        """Return the loss on each hospital's validation rows: [hospitals, splits, …] of its models [splits, …, d]."""
        losses = []
        for each, own in zip(self.sites, models, strict=True):
            of_site = []
            for i, rows in enumerate(each.splits.validation):
                scores = own[i] @ each.features(i, rows).T
                of_site.append(losses_of(scores, each.positive[rows], self.survival).mean(axis=-1))
            losses.append(of_site)
        return np.array(losses)

    def chosen_together(self, models: Float[np.ndarray, "hospitals designs candidates d"]) -> np.ndarray:
        """Return for each split the candidate with the least loss on the validation rows of all hospitals."""
        return np.argmin(np.tensordot(self.shares, self.validation_loss(models[:, : self.count]), 1), axis=-1)

    def chosen_by_each(
        self, models: Float[np.ndarray, "hospitals designs candidates d"], otherwise: int | None = None
    ) -> Models:
        """Return each hospital's models for all its training rows, by the loss on its own validation rows.

        `otherwise`: the candidate to take where the validation rows cannot choose; see `Site.can_choose`.
        """
        best = np.argmin(self.validation_loss(models[:, : self.count]), axis=-1)
        if otherwise is not None:
            best = np.where([each.can_choose() for each in self.sites], best, otherwise)
        return np.take_along_axis(models[:, self.count :], best[..., None, None], axis=2)[:, :, 0]

    def everywhere(self, models: np.ndarray) -> np.ndarray:
        """Return the same models for every hospital."""
        return np.broadcast_to(models, (len(self.sites), *models.shape))


def fit_all(study: Study, progress: Callable[[str], None]) -> tuple[dict[str, Models], np.ndarray]:
    """Return each method's models, and the mean learnt weights: for each hospital, its weight for every other."""
    fitted: dict[str, Models] = {}
    progress(ALONE)
    fitted[ALONE] = _alone(study)
    progress(POOLED)
    fitted[POOLED] = _pooled(study)
    step = 1 / (max(map(smoothness, study.sites)) + RIDGE + max(PENALTIES))
    clients, average = study.clients(), FedAvg(step, _LOCAL_STEPS)
    progress("FedAvg")
    common, penalties = _common(study, clients, average)
    fitted["FedAvg"] = study.everywhere(common[study.count :])
    progress("FedAdam")
    adaptive, _ = _common(study, clients, with_server_optimizer(average, upper=optax.adam(_SERVER_STEP)))
    fitted["FedAdam"] = study.everywhere(adaptive[study.count :])

    loss = SummedOwn(penalties)
    progress("fine-tuned")
    tuned = [FineTuned(step, _LOCAL_STEPS, share * step, _TUNING_STEPS) for share in _TUNING]
    fitted["fine-tuned"] = _personal(study, clients, loss, tuned, common, 1)
    progress("Ditto")
    near = [Ditto(step, _LOCAL_STEPS, 1 / (1 / step + pull), _LOCAL_STEPS, proximal=pull) for pull in _PULLS]
    fitted["Ditto"] = _personal(study, clients, loss, near, np.zeros_like(common), _ROUNDS)
    if not study.survival:
        progress("own intercept")
        fitted["own intercept"] = _own_intercept(study, clients, step)
    progress("learnt weights")
    fitted["learnt weights"], weights = _learnt_weights(study, step)
    return fitted, weights


@dataclass(frozen=True)
class Summed:
    """The losses of all designs and penalties, summed: a step moves each model along its own gradient."""

    penalties: tuple[float, ...]

    def __call__(self, models: Array, batch: Any) -> Array:
        """Return the loss of models [designs, penalties, d]."""
        return total_loss(models, batch, jnp.asarray(self.penalties, jnp.float32))


@dataclass(frozen=True)
class SummedOwn:
    """The losses of all designs, each with its split's penalty, summed."""

    penalties: tuple[float, ...]  # of each split

    def __call__(self, models: Array, batch: Any) -> Array:
        """Return the loss of models [designs, d]."""
        penalties = jnp.asarray(self.penalties * 2, jnp.float32)
        free = total_loss(models[:, None], batch, jnp.zeros(1, jnp.float32))
        return free + penalties @ jnp.sum(models[:, :-1] ** 2, axis=1) / 2


def _picked(models: Any, best: np.ndarray) -> np.ndarray:
    """Return the models [designs, d] of each split's penalty."""
    every = np.asarray(models, float)
    return every[np.arange(len(every)), np.concatenate([best, best])]


def _common(study: Study, clients: Clients, method: Any) -> tuple[np.ndarray, tuple[float, ...]]:
    """Return a method's common models [designs, d], and each split's penalty, which all hospitals choose together."""
    start = np.zeros((2 * study.count, len(PENALTIES), study.width), np.float32)
    run = solve(SingleLevel(Summed(PENALTIES)), clients, method, start, _ROUNDS, progress=False)
    best = study.chosen_together(study.everywhere(np.asarray(run.x, float)))
    return _picked(run.x, best), tuple(PENALTIES[place] for place in best)


def _personal(
    study: Study, clients: Clients, loss: "SummedOwn", methods: Sequence[Any], start: np.ndarray, rounds: int
) -> Models:
    """Return each hospital's own models by the method that is best on its own validation rows.

    With times, the middle method is taken where the validation rows cannot choose.
    """
    begin = start.astype(np.float32)
    runs = [solve(SingleLevel(loss), clients, method, begin, rounds, progress=False) for method in methods]
    otherwise = len(methods) // 2 if study.survival else None
    return study.chosen_by_each(np.stack([np.asarray(run.memory, float) for run in runs], axis=2), otherwise)


def _minimised(study: Study, shares: Any, together: bool = False) -> np.ndarray:
    """Return the exact models for all penalties: [designs, penalties, d]."""
    sites, designs = study.sites, range(2 * study.count)
    return np.stack([minimise(sites, [s.used[d] for s in sites], d, shares, PENALTIES, together) for d in designs])


def _alone(study: Study) -> Models:
    own = np.eye(len(study.sites))
    return study.chosen_by_each(np.stack([_minimised(study, shares) for shares in own]), _UNTUNED)


def _pooled(study: Study) -> Models:
    models = _minimised(study, study.shares, together=True)
    picked = _picked(models, study.chosen_together(study.everywhere(models)))
    return study.everywhere(picked[study.count :])


def _own_intercept(study: Study, clients: Clients, step: float) -> Models:
    """Return common weights with each hospital's own intercept: a lower level of each client's own."""

    def of(penalties: tuple[float, ...]) -> Callable[[Array, Array, Any], Array]:
        loss = Summed(penalties)
        return lambda weights, own, batch: loss(jnp.concatenate([weights, own[..., None]], axis=-1), batch)

    problem = Bilevel(of(PENALTIES), of((0.0,) * len(PENALTIES)), lower_scope="client")
    # At the best intercept the loss does not change with it, so one term of the hypergradient's series is enough.
    method = FedBiOLocal(step, step, local_steps=_LOCAL_STEPS, neumann_terms=1, hessian_step=step)
    start = np.zeros((2 * study.count, len(PENALTIES), study.width - 1), np.float32)
    run = solve(problem, clients, method, (start, start[..., 0]), _ROUNDS, progress=False)
    own = np.asarray(run.memory, float)[..., None]
    models = np.concatenate(
        [np.broadcast_to(np.asarray(run.x, float), (*own.shape[:-1], study.width - 1)), own], axis=-1
    )
    best = study.chosen_together(models)
    return np.stack([_picked(each, best)[study.count :] for each in models])


def _node_loss(theta: dict[str, Array], batch: Any) -> Array:
    """Return the penalised loss of one candidate, whose split and penalty stand beside its model."""
    split = jnp.round(jax.lax.stop_gradient(theta["split"])).astype(int)
    penalty = jax.lax.stop_gradient(theta["penalty"])

    def of_site(sample: Any) -> Array:
        scores = sample["rows"] @ (sample["maps"][split] @ theta["model"])
        ridge = penalty * jnp.sum(theta["model"][:-1] ** 2) + RIDGE * theta["model"][-1] ** 2
        weights = sample["weights"][split]
        return weights @ row_losses(scores, sample, weights > 0) + sample["penalised"] * ridge / 2

    return jnp.mean(jax.vmap(of_site)(batch))


def _learnt_weights(study: Study, step: float) -> tuple[Models, np.ndarray]:
    """Return models refitted with the weights that `WeightedNodesProx` learnt, and the mean of these weights.

    The centre is the hospital's own validation rows; the nodes are its other training rows, and the training rows of
    the others.
    """
    count, sites = study.count, study.sites
    method = WeightedNodesProx(step, step, 1.0, steps=_NODE_STEPS, sync_every=_NODE_STEPS)
    splits = np.tile(np.arange(count), len(_NODE_PENALTIES))
    penalties = np.repeat(_NODE_PENALTIES, count)
    models, weights = [], []
    for k, own in enumerate(sites):
        used = [each.splits.fit if each is own else each.splits.train for each in sites]
        maps = [each.maps[:count] if each is own else each.maps[count:] for each in sites]
        parts = [replace(each, maps=each_maps) for each, each_maps in zip(sites, maps, strict=True)]
        nodes = samples(parts, used)
        (center,) = samples([parts[k]], [own.splits.validation])
        center = {name: _padded(array, nodes[0][name].shape) for name, array in center.items()}
        mark = lambda sample, flag: {**sample, "penalised": np.full(1, flag, np.float32)}
        clients = Clients([mark(node, 1) for node in nodes], center=mark(center, 0))
        start = {"model": np.zeros(study.width, np.float32), "split": np.float32(0), "penalty": np.float32(0.1)}
        thetas, learnt = _swept(clients, method, (study.shares, start), splits, penalties)
        loss = study.validation_loss(np.stack([thetas.reshape(-1, count, study.width).swapaxes(0, 1)] * len(sites)))[k]
        best = np.argmin(loss, axis=-1)
        shares = learnt.reshape(-1, count, len(sites))[best, np.arange(count)]
        train = [each.splits.train for each in sites]
        models.append(
            [
                minimise(sites, [rows[i] for rows in train], count + i, shares[i], [_NODE_PENALTIES[best[i]]])[0]
                for i in range(count)
            ]
        )
        weights.append(shares.mean(axis=0))
    return np.array(models), np.array(weights)


def _padded(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    return np.pad(array, [(0, most - own) for most, own in zip(shape, array.shape, strict=True)])


def _swept(
    clients: Clients, method: Any, start: tuple[Any, Any], splits: np.ndarray, penalties: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Run a candidate for each split and penalty side by side; return their models and their weights."""
    problem = WeightedNodes(_node_loss)
    models = adapt(problem, start)
    sweep = Sweep(checked(Job(models.problem, clients, method, models.init, None), _NODE_ROUNDS), set())
    carries = sweep.start({}, len(splits))
    given = {"split": jnp.asarray(splits, jnp.float32), "penalty": jnp.asarray(penalties, jnp.float32)}
    carries = carries._replace(state=carries.state._replace(y=carries.state.y | given))
    carries, *_ = sweep.advance({}, carries, jnp.arange(len(splits)), 0, _NODE_ROUNDS)
    return np.asarray(carries.state.y["model"], float), np.asarray(carries.state.x, float)
