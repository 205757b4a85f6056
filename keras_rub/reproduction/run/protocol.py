"""The paper's search for networks at large radii, and who they are."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import keras
import numpy as np
import scipy.spatial.distance

import keras_rub
from keras_rub import PerturbationSet, attacks, paper_radius
from keras_rub.datasets import Dataset
from keras_rub.reproduction.compact import to_columns, to_rows
from keras_rub.reproduction.context import Context
from keras_rub.reproduction.jobs import Job
from keras_rub.reproduction.plans import IMAGE_DEFENCES, ProtocolPlan
from keras_rub.reproduction.run.trainer import Trainer
from keras_rub.training import Recipe

Radii = dict[Any, list[float]]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One network of the search.

    Attributes:
        dataset: name of the data set.
        normalization: of its inputs.
        title: the paper's name of the defence.
        number: what it trains for.
        rate: the learning rate.
    """

    dataset: str
    normalization: str
    title: str
    number: float
    rate: float

    @property
    def name(self) -> str:
        """A name for files."""
        return (
            f"{self.dataset}-{self.normalization}-{self.title}-"
            f"{self.number:g}-{self.rate:g}"
        )


def candidates(plan: ProtocolPlan, dataset: str) -> list[Candidate]:
    """All networks of the search on one data set."""
    return [
        Candidate(dataset, normalization, title, number, rate)
        for normalization, title in itertools.product(
            plan.normalizations, plan.defences
        )
        for number in ((0.0,) if title == "Nominal" else plan.numbers)
        for rate in plan.rates
    ]


def search(
    context: Context, plan: ProtocolPlan, dataset: str
) -> dict[Candidate, dict[str, Any]]:
    """Accuracies on validation samples under the paper's attacks.

    The networks of one defence, kind of inputs and radius are a job.

    Returns:
        A dict with an entry a network: `clean`, and from the norm to a list
        with a number a radius of the plan.
    """
    groups: dict[tuple, list[Candidate]] = {}
    for found in candidates(plan, dataset):
        key = (found.normalization, found.title, found.number)
        groups.setdefault(key, []).append(found)
    done = context.do(
        {key: _search_job(context, plan, some) for key, some in groups.items()}
    )
    return {
        candidate: result
        for key, part in done.items()
        for candidate, result in zip(groups[key], part["networks"], strict=True)
    }


def _settings(plan: ProtocolPlan, first: Candidate, **more: Any) -> dict:
    return {
        "dataset": first.dataset,
        "normalization": first.normalization,
        "defence": first.title,
        "number": first.number,
        "recipe": plan.recipe(first.title),
        **more,
    }


def _search_job(context, plan, group) -> Job:
    first = group[0]

    def work():
        data = context.load(first.dataset, first.normalization)
        x, y = (part[: plan.validation] for part in data.validation)
        trainer = _trainer(plan, first, data)
        prober = _Prober(data, plan.architecture)
        found = []
        for candidate in group:
            base = _train(trainer, candidate, data)
            found.append(prober.attack(base, x, y, plan.radii))
        keras.backend.clear_session()
        return {"networks": found}

    name = first.name.rsplit("-", 1)[0]
    return Job(
        f"protocol-{name}",
        _settings(
            plan,
            first,
            rates=[candidate.rate for candidate in group],
            radii={str(norm): list(r) for norm, r in plan.radii.items()},
            validation=plan.validation,
        ),
        work,
    )


def _trainer(plan, candidate, data) -> Trainer:
    # Constant rates and no clipping of gradients, as in the paper.
    return Trainer(
        plan.recipe(candidate.title), data, keras.optimizers.Adam(1e-3)
    )


def _train(trainer, candidate, data) -> keras.Model:
    _, norm = IMAGE_DEFENCES[candidate.title]
    rho = paper_radius(candidate.number, norm, data.input_shape)
    return trainer.train(rho, rate=candidate.rate)


class _Prober:
    """The paper's attacks on networks of one shape, compiled once."""

    def __init__(self, data: Dataset, architecture: str):
        self._network = Recipe(
            defense="nominal", architecture=architecture
        ).build(data)
        # The published code keeps pixels in [0, 1] there, and gives
        # standardised ones bounds that are never reached.
        self._range = data.input_range

    def attack(self, base, x, y, radii) -> dict[str, Any]:
        """The smaller accuracy of both attacks, from the norm."""
        self._network.set_weights(base.get_weights())
        keras.utils.set_random_seed(0)
        found: dict[str, Any] = {}
        for norm, values in radii.items():
            both = []
            for kind in attacks.PAPER:
                attack = attacks.make(
                    kind, self._network, norm, input_range=self._range
                )
                points = attack.sweep(x, y, list(values))
                right = [np.mean(attack.predict(p) == y) for p in points]
                both.append(right)
            found[str(norm)] = np.min(both, axis=0).round(5).tolist()
            found["clean"] = float(np.mean(attack.predict(x) == y))
        return found


def judge(
    context: Context, plan: ProtocolPlan, chosen: dict[Candidate, Radii]
) -> dict[Candidate, dict[str, Any]]:
    """What the chosen networks are worth on test samples; a job each.

    Args:
        context: `Context`.
        plan: `ProtocolPlan`.
        chosen: from the network to the radii, by norm, that it was chosen
            for.

    Returns:
        A dict with `rows` as of `keras_rub.Evaluation`, under all attacks,
        and `zero_gradient`, the share of the samples that are right but whose
        cross entropy has no gradient.
    """
    found = context.do(
        {
            candidate: _judge_job(context, plan, candidate, radii)
            for candidate, radii in chosen.items()
        }
    )
    return {key: _with_rows(result) for key, result in found.items()}


def _with_rows(result: dict[str, Any]) -> dict[str, Any]:
    return {**result, "rows": to_rows(result["rows"])}


def _judge_job(context, plan, candidate, radii) -> Job:
    def work():
        data = context.load(candidate.dataset, candidate.normalization)
        base = _train(_trainer(plan, candidate, data), candidate, data)
        return _strong(base, data, plan, radii)

    return Job(
        f"judge-{candidate.name}",
        _settings(
            plan,
            candidate,
            rate=candidate.rate,
            radii={str(norm): values for norm, values in radii.items()},
            samples=plan.samples,
            attacks=plan.attacks,
        ),
        work,
    )


def _strong(base, data, plan, radii) -> dict[str, Any]:
    """All attacks on test samples, and the share without a gradient."""
    keras.utils.set_random_seed(0)
    x, y = (part[: plan.samples] for part in data.test)
    result = keras_rub.evaluate(
        base,
        x,
        y,
        radii=radii,
        norms=list(radii),
        attacks=plan.attacks,
        certificates=False,
        perturbations=PerturbationSet(input_range=data.input_range),
        examples=0,
        verbose=0,
    )
    assert result.signs is not None
    right = result.predicted == result.labels
    zero = result.signs.zero_gradient & right
    keras.backend.clear_session()
    return {
        "samples": len(result),
        "rows": to_columns(result.rows),
        "zero_gradient": float(zero.sum() / max(right.sum(), 1)),
    }


def scale(
    context: Context, plan: ProtocolPlan, dataset: str
) -> dict[tuple[str, float], dict[str, Any]]:
    """One network with its logits multiplied, under all attacks.

    The classes and everything that can be proved of them stay the same.

    Returns:
        From the defence and the factor to what `judge` returns, with `noise`:
        from the norm to the accuracy at random points of each radius.
    """

    def job(title, number):
        candidate = Candidate(dataset, "standard", title, number, 1e-3)

        def work():
            data = context.load(dataset, "standard")
            base = _train(_trainer(plan, candidate, data), candidate, data)
            weights = base.get_weights()
            found = []
            for factor in plan.factors:
                # Kernel and bias of the last layer.
                last = [part * np.float32(factor) for part in weights[-2:]]
                base.set_weights([*weights[:-2], *last])
                radii = {norm: list(r) for norm, r in plan.radii.items()}
                found.append(_strong(base, data, plan, radii))
            return {
                "factors": found,
                "noise": _noise(base, data, plan),
            }

        return Job(
            f"scale-{candidate.name}",
            _settings(
                plan,
                candidate,
                rate=candidate.rate,
                factors=list(plan.factors),
                radii={str(norm): list(r) for norm, r in plan.radii.items()},
                samples=plan.samples,
                attacks=plan.attacks,
            ),
            work,
        )

    done = context.do({pair: job(*pair) for pair in plan.scaled})
    return {
        (title, factor): {**_with_rows(part), "noise": result["noise"]}
        for (title, _), result in done.items()
        for factor, part in zip(plan.factors, result["factors"], strict=True)
    }


def trained(
    context: Context, plan: ProtocolPlan, dataset: str
) -> dict[Recipe, dict[str, Any]]:
    """Networks that are trained for the radii, under all attacks.

    Returns:
        From the recipe to what `judge` returns, at the radii of its norm that
        are not above its own and above those of the others.
    """

    def job(recipe):
        radii = {recipe.norm: _served(plan, recipe)}

        def work():
            data = context.load(dataset, "standard")
            base = Trainer(recipe, data).train(recipe.rho)
            return _strong(base, data, plan, radii)

        return Job(
            f"trained-{dataset}-{recipe.defense}-L{recipe.norm}-{recipe.rho:g}",
            {
                "dataset": dataset,
                "recipe": recipe,
                "radii": radii[recipe.norm],
                "samples": plan.samples,
                "attacks": plan.attacks,
            },
            work,
        )

    found = context.do({recipe: job(recipe) for recipe in plan.trained})
    return {key: _with_rows(result) for key, result in found.items()}


def _served(plan, recipe) -> list[float]:
    """The radii that this network is the nearest one for."""
    smaller = [
        other.rho
        for other in plan.trained
        if other.norm == recipe.norm and other.rho < recipe.rho
    ]
    return [
        rho
        for rho in plan.radii[recipe.norm]
        if max(smaller, default=0.0) < rho <= recipe.rho
    ]


def _noise(base, data, plan) -> dict[str, list[float]]:
    """Accuracy where foolbox's attacks begin, from the norm."""
    x, y = (part[: plan.samples] for part in data.test)
    rng = np.random.default_rng(0)
    found = {}
    for norm, radii in plan.radii.items():
        if norm == "inf":
            noise = rng.uniform(-1.0, 1.0, x.shape)
        elif norm == 2:
            noise = rng.normal(size=x.shape)
            flat = noise.reshape(len(x), -1)
            flat /= np.linalg.norm(flat, axis=1, keepdims=True)
        else:
            continue
        found[str(norm)] = [
            float(np.mean(_predict(base, x + rho * noise) == y))
            for rho in radii
        ]
    return found


def _predict(base, x) -> np.ndarray:
    return base.predict(x.astype("float32"), verbose=0).argmax(axis=-1)


def ceilings(
    context: Context, plan: ProtocolPlan, dataset: str
) -> dict[str, dict[str, list[float]]]:
    """What no classifier can exceed on the first test samples.

    Returns:
        From the normalisation and the norm to a share for each radius.
    """

    def job(normalization):
        def work():
            data = context.load(dataset, normalization)
            x, y = (part[: plan.grouped] for part in data.test)
            return {
                str(norm): [ceiling(x, y, norm, rho) for rho in radii]
                for norm, radii in plan.radii.items()
            }

        settings = {
            "radii": {str(norm): list(r) for norm, r in plan.radii.items()},
            "samples": plan.grouped,
        }
        return Job(f"ceiling-{dataset}-{normalization}", settings, work)

    return context.do({name: job(name) for name in plan.normalizations})


def ceiling(x: np.ndarray, y: np.ndarray, norm: int | str, rho: float) -> float:
    """A bound of the accuracy that any classifier keeps within a radius.

    Samples that can be moved to one and the same point get one class there:
    of such a group at most the most frequent class is right. Those near the
    centre of the samples are a group, the others are paired with one of
    another class at most two radii away, whose midpoint both reach. A convex
    valid range does not change that.

    Args:
        x: array [n, *features].
        y: int array [n].
        norm: 1, 2 or `"inf"`.
        rho: the radius.
    """
    # Rounding must not make a group of what is just too far apart.
    rho = rho * (1 - 1e-5)
    flat = x.reshape(len(x), -1).astype("float64")
    order = np.inf if norm == "inf" else float(norm)
    middle = 0.5 * (flat.min(axis=0) + flat.max(axis=0))
    best = 1.0
    for centre in (flat.mean(axis=0), middle):
        far = np.linalg.norm(flat - centre, order, axis=1) > rho
        near = y[~far]
        kept = np.bincount(near).max() if near.size else 0
        rest = np.flatnonzero(far)
        pairs = _pairs(flat[rest], y[rest], norm, 2 * rho)
        best = min(best, (kept + len(rest) - pairs) / len(x))
    return float(best)


def _pairs(x, y, norm, reach) -> int:
    """How many disjoint pairs of two classes are found, nearest first."""
    if len(x) < 2:
        return 0
    metric = {1: "cityblock", 2: "euclidean", "inf": "chebyshev"}[norm]
    distances = scipy.spatial.distance.cdist(x, x, metric)
    distances[y[:, None] == y] = np.inf
    first, second = np.nonzero(np.triu(distances <= reach))
    free = np.ones(len(x), bool)
    for place in np.argsort(distances[first, second], kind="stable"):
        a, b = first[place], second[place]
        if free[a] and free[b]:
            free[a] = free[b] = False
    return int(np.sum(~free)) // 2
