"""Image networks: which there are, and how each is trained and kept."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
from typing import Any

import keras
import numpy as np

from keras_rub import paper_radius, training
from keras_rub.files import locked
from keras_rub.reproduction.context import Context
from keras_rub.reproduction.jobs import Job, NotNowError
from keras_rub.reproduction.plans import (
    CNN_DEFENCES,
    IMAGE_DEFENCES,
    MASKED,
    MASKED_FACTOR,
    ImagePlan,
)
from keras_rub.resuming import require_same
from keras_rub.training import Recipe

# Of one image.
SHAPES = {
    "mnist": (28, 28, 1),
    "fashion_mnist": (28, 28, 1),
    "cifar10": (32, 32, 3),
    "digits": (8, 8, 1),
}


@dataclasses.dataclass(frozen=True)
class Network:
    """One network to train.

    Attributes:
        dataset: name of the data set.
        normalization: of its inputs.
        title: the paper's name of the defence.
        recipe: how it is trained.
        factor: what its logits are multiplied by when it is loaded.
    """

    dataset: str
    normalization: str
    title: str
    recipe: Recipe
    factor: float = 1.0

    @property
    def name(self) -> str:
        """Its name in those of jobs."""
        times = "" if self.factor == 1.0 else f"-times-{self.factor:g}"
        return self.trained_name + times

    @property
    def trained_name(self) -> str:
        """Name of its folder, whatever the factor."""
        recipe = self.recipe
        parts = [
            self.dataset, self.normalization, recipe.architecture,
            recipe.defense,
        ]  # fmt: skip
        if recipe.defense != "nominal":
            parts += [f"L{recipe.norm}", f"{recipe.rho:g}"]
        if recipe.seed:
            parts.append(f"seed-{recipe.seed}")
        return "-".join(parts)

    @property
    def kind(self) -> tuple[str, str, int]:
        """Inputs, architecture and seed: all but what it is trained for."""
        recipe = self.recipe
        return self.normalization, recipe.architecture, recipe.seed

    @property
    def settings(self) -> dict[str, Any]:
        """All that decides what it becomes."""
        return {
            "dataset": self.dataset,
            "normalization": self.normalization,
            "recipe": self.recipe,
        }

    def folder(self, context: Context) -> pathlib.Path:
        """Where it is kept."""
        return context.out / "models" / self.trained_name

    def path(self, context: Context) -> pathlib.Path:
        """The file it is in when it is trained."""
        return self.folder(context) / "model.keras"

    def is_trained(self, context: Context) -> bool:
        """Whether there is such a file."""
        return self.path(context).exists()

    def load(self, context: Context) -> keras.Model:
        """The trained network, without its defence; trains it if missing.

        If another process is at that, it waits. The last network is kept, with
        all that was compiled for it.
        """
        self.train(context, wait=True)
        if self not in context.models:
            context.models.clear()
            keras.backend.clear_session()
            model = keras.models.load_model(self.path(context), compile=False)
            base = getattr(model, "base", model)
            scale_logits(base, self.factor)
            context.models[self] = base
        return context.models[self]

    def train(self, context: Context, wait: bool = False) -> None:
        """Trains it, unless it is trained.

        Args:
            context: `Context`.
            wait: whether to wait for another process that trains it. Defaults
                to `False`, a `NotNowError`.
        """
        folder = self.folder(context)
        if self.is_trained(context):
            self._require_own(context)
            return
        if not context.train:
            raise NotNowError(f"{self.name} is not trained")
        lock = folder.with_name(f"{folder.name}.lock")
        with locked(lock, wait) as ours:
            if not ours:
                raise NotNowError(
                    f"{self.name} is being trained by another process"
                )
            if not self.is_trained(context):  # by whom we waited for
                print(f"training {self.name}", flush=True)
                data = context.load(self.dataset, self.normalization)
                training.train_in_folder(self.recipe, data, folder, verbose=0)
                keras.backend.clear_session()

    def _require_own(self, context) -> None:
        """Raises if the folder holds a network of other settings."""
        wanted = {
            "dataset": self.dataset,
            "normalization": self.normalization,
            **self.recipe.to_dict(),
        }
        found = training.read_settings(self.path(context))
        # Beside the settings the file tells the units, and fields that were
        # added since stand at their defaults, as in `records.same`.
        known = {**Recipe().to_dict(), **found}
        known = {k: v for k, v in known.items() if k in wanted}
        require_same(wanted, known, self.folder(context))


def scale_logits(base: keras.Model, factor: float) -> None:
    """Multiplies kernel and bias of the last layer: the classes stay."""
    *others, kernel, bias = base.get_weights()
    scale = np.float32(factor)
    base.set_weights([*others, scale * kernel, scale * bias])


def masked(networks: list[Network]) -> list[Network]:
    """Those without defence, with logits whose gradients vanish."""
    return [
        dataclasses.replace(network, title=MASKED, factor=MASKED_FACTOR)
        for network in networks
        if network.title == "Nominal"
    ]


def rub_networks(plan: ImagePlan) -> list[Network]:
    """The RUB perceptrons of one image set, the small radii first."""
    return [
        Network(plan.dataset, normalization, "RUB", plan.rub_recipe(rho))
        for normalization, radii in (
            ("standard", plan.rub_radii),
            ("unit", plan.unit_radii),
        )
        for rho in radii
    ]


def certified_networks(plan: ImagePlan) -> list[Network]:
    """The RUB networks of a certified table, those of the first seed first.

    Other seeds are of those with standardised inputs.
    """
    found = rub_networks(plan)
    found += [
        Network(plan.dataset, normalization, "RUB", plan.rub_recipe(rho))
        for normalization, radii in plan.certified_only.items()
        for rho in radii
    ]
    found += [
        Network(
            plan.dataset,
            "standard",
            "RUB",
            dataclasses.replace(plan.conv, rho=rho, seed=plan.seeds[0]),
        )
        for rho in plan.conv_radii
        if plan.conv is not None
    ]
    again = [
        dataclasses.replace(
            network, recipe=dataclasses.replace(network.recipe, seed=seed)
        )
        for seed in plan.seeds[1:]
        for network in found
        if network.normalization == "standard"
    ]
    return found + again


def attacked_networks(plan: ImagePlan, cnn: bool = False) -> list[Network]:
    """All networks of a table of attacks, in the order of the paper's rows.

    Args:
        plan: `ImagePlan`.
        cnn: whether the convolutional networks are meant.
    """
    found = []
    for title in CNN_DEFENCES if cnn else IMAGE_DEFENCES:
        if title not in plan.defences:
            continue
        if title == "RUB" and not cnn:
            found += rub_networks(plan)
        else:
            found += _networks_of(plan, title, cnn)
    return found


def _networks_of(plan, title, cnn) -> list[Network]:
    """Those of one defence: each normalisation, each training radius."""
    defense, norm = IMAGE_DEFENCES[title]
    part = plan.attack_of(cnn)
    own = {"rub": part.rub, "coap": part.coap, "pgd": part.pgd}
    template = own.get(defense) or part.recipe
    return [
        Network(
            plan.dataset,
            normalization,
            title,
            dataclasses.replace(
                template,
                defense=defense,
                norm=norm,
                rho=round(paper_radius(number, norm, SHAPES[plan.dataset]), 6),
            ),
        )
        for normalization in plan.inputs_of(cnn)
        for number in ((0.0,) if title == "Nominal" else part.numbers)
    ]


def train(context: Context, wanted: list[Network]) -> list[Network]:
    """Trains networks, one a job; returns those that are ready.

    Ready is a network whose job is done, here or on a machine whose results
    are archived: only a job that wants its weights then trains it again. The
    first of every defence comes first, then the second...: an early end
    leaves no defence out.
    """
    turns: collections.Counter[str] = collections.Counter()
    order = {}
    for network in wanted:
        order[network] = turns[network.title]
        turns[network.title] += 1

    def job(network):
        def work():
            network.train(context)
            return {"trained": True}

        return Job(f"train-{network.name}", network.settings, work)

    done = context.do(
        {n: job(n) for n in sorted(wanted, key=order.__getitem__)}
    )
    return [network for network in wanted if network in done]
