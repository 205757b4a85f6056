"""The paper's search for networks at large radii, and who they are."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import scipy.spatial.distance
import tensorflow as tf

import keras_rub
from keras_rub import PerturbationSet, attacks, paper_radius, tracing
from keras_rub.attacks import ascent
from keras_rub.attacks.losses import LOSSES
from keras_rub.datasets import Dataset
from keras_rub.reproduction.compact import to_columns, to_rows
from keras_rub.reproduction.context import Context
from keras_rub.reproduction.jobs import Job
from keras_rub.reproduction.plans import IMAGE_DEFENCES, ProtocolPlan
from keras_rub.reproduction.run.networks import Network, scale_logits
from keras_rub.reproduction.run.trainer import Trainer
from keras_rub.training import Recipe

Radii = dict[Any, list[float]]

_TOGETHER = 20  # training steps


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One network of the search.

    Attributes:
        dataset: name of the data set.
        normalization: of its inputs.
        title: the paper's name of the defence.
        number: what it trains for.
        rate: the learning rate.
        steps: training steps.
        batch_size: samples a step.
        seed: of weights and batches.
    """

    dataset: str
    normalization: str
    title: str
    number: float
    rate: float
    steps: int
    batch_size: int
    seed: int = 0

    @property
    def name(self) -> str:
        """A name for files."""
        return f"{self.group_name}-{self.rate:g}"

    @property
    def group_name(self) -> str:
        """The same for all that differ in the rate only."""
        return (
            f"{self.dataset}-{self.normalization}-{self.title}-"
            f"{self.number:g}-{self.steps}-of-{self.batch_size}"
            + (f"-seed-{self.seed}" if self.seed else "")
        )

    def recipe(self, plan: ProtocolPlan) -> Recipe:
        """How it is trained, but for radius and rate."""
        return plan.recipe(
            self.title,
            steps=self.steps,
            batch_size=self.batch_size,
            seed=self.seed,
        )


def candidates(plan: ProtocolPlan, dataset: str) -> list[Candidate]:
    """All networks of the search on one data set."""
    return _of_grids(plan.grids, dataset)


def _of_grids(grids, dataset) -> list[Candidate]:
    return [
        Candidate(
            dataset, normalization, title, number, rate, grid.steps,
            batch_size, seed,
        )
        for grid in grids
        if dataset in grid.datasets
        for seed, batch_size, normalization, title in itertools.product(
            grid.seeds, grid.batch_sizes, grid.normalizations, grid.defences
        )
        for number in ((0.0,) if title == "Nominal" else grid.numbers)
        for rate in grid.rates
    ]  # fmt: skip


def search(
    context: Context, plan: ProtocolPlan, dataset: str
) -> dict[Candidate, dict[str, Any]]:
    """Accuracies on validation samples under the paper's attacks.

    The networks that differ in their learning rate only are a job.

    Returns:
        A dict with an entry a network: `clean`, and from the norm to a list
        with a number a radius of the plan.
    """
    groups: dict[str, list[Candidate]] = {}
    for found in candidates(plan, dataset):
        groups.setdefault(found.group_name, []).append(found)
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
        "recipe": first.recipe(plan),
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

    return Job(
        f"protocol-{first.group_name}",
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
        candidate.recipe(plan),
        data,
        keras.optimizers.Adam(1e-3),
        together=_TOGETHER,
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
    samples = [part[: plan.samples] for part in data.test]
    found = _attacked(base, data, samples, radii, plan.attacks)
    keras.backend.clear_session()
    return found


def _attacked(base, data, samples, radii, attacks) -> dict[str, Any]:
    keras.utils.set_random_seed(0)
    result = keras_rub.evaluate(
        base,
        *samples,
        radii=radii,
        norms=list(radii),
        attacks=attacks,
        certificates=False,
        perturbations=PerturbationSet(input_range=data.input_range),
        examples=0,
        verbose=0,
    )
    assert result.signs is not None
    right = result.predicted == result.labels
    zero = result.signs.zero_gradient & right
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
        candidate = Candidate(
            dataset, "standard", title, number, 1e-3, plan.steps,
            plan.batch_size,
        )  # fmt: skip

        def work():
            data = context.load(dataset, "standard")
            base = _train(_trainer(plan, candidate, data), candidate, data)
            weights = base.get_weights()
            found = []
            for factor in plan.factors:
                base.set_weights(weights)
                scale_logits(base, factor)
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


def networks_of(plan: ProtocolPlan, dataset: str) -> list[Network]:
    """Those that are trained for the radii of some cells, by seeds."""
    trained = plan.trained[dataset]
    return [
        Network(
            dataset,
            "standard",
            f"PGD-L{recipe.norm}",
            dataclasses.replace(recipe, seed=seed),
        )
        for seed in trained.seeds
        for recipe in trained.recipes
    ]


def validate(
    context: Context, plan: ProtocolPlan, dataset: str, networks: list[Network]
) -> dict[Network, list[dict[str, Any]]]:
    """Rows of `networks_of` at all radii, on held-out samples; a job each."""
    cells = plan.trained[dataset].radii
    radii = {norm: list(values) for norm, values in cells.items()}
    found = _attack_all(
        context,
        plan,
        dict.fromkeys(networks, radii),
        "validation",
        plan.validation,
        plan.validation_attacks,
    )
    return {network: result["rows"] for network, result in found.items()}


def test(
    context: Context, plan: ProtocolPlan, chosen: dict[Network, Radii]
) -> dict[Network, dict[str, Any]]:
    """What `judge` says, of networks that are kept in files."""
    return _attack_all(
        context, plan, chosen, "test", plan.samples, plan.attacks
    )


def _attack_all(context, plan, places, part, count, attacks):
    def job(network, radii):
        def work():
            data = context.load(network.dataset, network.normalization)
            samples = [array[:count] for array in getattr(data, part)]
            return _attacked(
                network.load(context), data, samples, radii, attacks
            )

        return Job(
            f"large-{part}-{network.name}",
            {
                **network.settings,
                "radii": {str(norm): r for norm, r in radii.items()},
                "samples": count,
                "attacks": attacks,
            },
            work,
        )

    found = context.do(
        {network: job(network, radii) for network, radii in places.items()}
    )
    return {key: _with_rows(result) for key, result in found.items()}


def _noise(base, data, plan) -> dict[str, list[float]]:
    """Accuracy where foolbox's attacks begin, from the norm."""
    x, y = (part[: plan.samples] for part in data.test)
    rng = np.random.default_rng(0)
    found = {}
    for norm, radii in plan.radii.items():
        noise = _start(x, norm, rng)
        found[str(norm)] = [
            float(np.mean(_predict(base, x + rho * noise) == y))
            for rho in radii
        ]
    return found


def _start(x, norm, rng) -> np.ndarray:
    """Random points of the ball of radius 1, where PGD begins.

    For L2 of the sphere, next to which nearly all of such a ball lies.
    """
    if norm == "inf":
        return rng.uniform(-1.0, 1.0, x.shape)
    noise = rng.normal(size=x.shape)
    flat = noise.reshape(len(x), -1)  # a view
    flat /= np.linalg.norm(flat, axis=1, keepdims=True)
    return noise


def round_off(
    context: Context, plan: ProtocolPlan, dataset: str
) -> dict[Candidate, dict[str, Any]]:
    """PGD by two losses that differ in nothing but rounding.

    The cross entropy is the softplus of the log odds of the other classes, so
    that both have gradients of one direction. In float32 the cross entropy
    loses the part of the own class where its probability rounds to 1.

    Returns:
        From the network to `clean`, `certain` (share of the right samples
        whose own class has probability 1), and from the loss and the norm to
        the accuracy at each radius.
    """

    def job(candidate):
        def work():
            data = context.load(dataset, candidate.normalization)
            base = _train(_trainer(plan, candidate, data), candidate, data)
            x, y = (part[: plan.samples] for part in data.test)
            return pgd_by_both_losses(base, x, y, dict(plan.radii))

        return Job(
            f"rounding-{candidate.name}",
            _settings(
                plan,
                candidate,
                rate=candidate.rate,
                radii={str(norm): list(r) for norm, r in plan.radii.items()},
                samples=plan.samples,
            ),
            work,
        )

    return context.do({c: job(c) for c in _of_grids(plan.rounded, dataset)})


def pgd_by_both_losses(
    base: keras.Model,
    x: np.ndarray,
    y: np.ndarray,
    radii: dict[Any, Sequence[float]],
) -> dict[str, Any]:
    """The work of `round_off`: PGD with foolbox's steps and random start.

    Args:
        base: the network.
        x: array [n, *features].
        y: int array [n].
        radii: from the norm to the radii.
    """
    x, y = tf.constant(x), tf.constant(y, tf.int32)
    probabilities = tf.gather(tf.nn.softmax(base(x)), y, batch_dims=1)
    right = tf.argmax(base(x), axis=-1, output_type=tf.int32) == y
    found: dict[str, Any] = {
        "clean": _mean(right),
        "certain": _mean(tf.boolean_mask(probabilities == 1.0, right)),
    }
    for name in ("cross_entropy", "log_odds"):
        loss = LOSSES[name]
        found[name] = {}
        for norm, values in radii.items():
            attack = _pgd(base, loss, x, y, norm)
            ends = [attack(tf.constant(rho, tf.float32)) for rho in values]
            found[name][str(norm)] = [
                float(np.mean(_predict(base, points.numpy()) == y))
                for points in ends
            ]
    return found


_FOOLBOX_STEPS = {2: (50, 0.025), "inf": (40, 0.01 / 0.3)}


def _pgd(base, loss, x, y, norm):
    """From the radius to the points where PGD ends."""
    steps, step_size = _FOOLBOX_STEPS[norm]

    def attack(rho):
        return ascent.ascend(
            lambda points: loss(base(points), y, None),
            x,
            rho,
            PerturbationSet(norm),
            steps=steps,
            step_size=step_size,
            random_start=True,
            seed=tf.constant([0, 1]),
        )

    radius = tf.TensorSpec([], tf.float32)
    return tracing.compiled(attack, input_signature=[radius])


def _mean(values) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _predict(base, x) -> np.ndarray:
    return base.predict(x.astype("float32"), verbose=0).argmax(axis=-1)


def ceilings(
    context: Context, plan: ProtocolPlan, dataset: str, radii: Radii
) -> dict[str, dict[str, list[float]]]:
    """What no classifier can exceed on the first test samples.

    Args:
        context: `Context`.
        plan: `ProtocolPlan`.
        dataset: name of the data set.
        radii: from the norm to the radii.

    Returns:
        From the normalisation and the norm to a share for each radius; empty
        unless all normalisations are done.
    """

    def job(normalization):
        def work():
            data = context.load(dataset, normalization)
            x, y = (part[: plan.grouped] for part in data.test)
            return {
                str(norm): ceiling(x, y, norm, values)
                for norm, values in radii.items()
            }

        settings = {
            "radii": {str(norm): list(r) for norm, r in radii.items()},
            "samples": plan.grouped,
        }
        return Job(f"ceiling-{dataset}-{normalization}", settings, work)

    found = context.do({name: job(name) for name in plan.normalizations})
    return found if len(found) == len(plan.normalizations) else {}


def ceiling(
    x: np.ndarray, y: np.ndarray, norm: int | str, radii: Sequence[float]
) -> list[float]:
    """Bounds of the accuracy that any classifier keeps within each radius.

    Samples that can be moved to one and the same point get one class there:
    of such a group at most the most frequent class is right. Those near the
    centre of the samples are a group, the others are paired with one of
    another class at most two radii away, whose midpoint both reach. A convex
    valid range does not change that.

    Args:
        x: array [n, *features].
        y: int array [n].
        norm: 1, 2 or `"inf"`.
        radii: the radii.
    """
    flat = x.reshape(len(x), -1).astype("float64")
    order = np.inf if norm == "inf" else float(norm)
    middle = 0.5 * (flat.min(axis=0) + flat.max(axis=0))
    reaches = [
        np.linalg.norm(flat - centre, order, axis=1)
        for centre in (flat.mean(axis=0), middle)
    ]
    metric = {1: "cityblock", 2: "euclidean", "inf": "chebyshev"}[norm]
    distances = scipy.spatial.distance.cdist(flat, flat, metric)
    distances[y[:, None] == y] = np.inf
    first, second = np.nonzero(np.triu(distances < np.inf))
    lengths = distances[first, second]
    by_length = np.argsort(lengths, kind="stable")
    pairs = np.stack([first, second], axis=1)[by_length]
    lengths = lengths[by_length]

    def bound(rho, reach):
        near = reach <= rho
        kept = np.bincount(y[near]).max() if near.any() else 0
        free = ~near
        count = int(free.sum())
        for a, b in pairs[: np.searchsorted(lengths, 2 * rho, "right")]:
            if free[a] and free[b]:
                free[a] = free[b] = False
                count -= 1
        return (kept + count) / len(x)

    return [
        # Rounding must not make a group of what is just too far apart.
        float(min(bound(rho * (1 - 1e-5), reach) for reach in reaches))
        for rho in radii
    ]
