"""Image networks: which are trained, and how they are attacked."""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib
import time
from typing import Any

import keras
import numpy as np

import keras_rub
from keras_rub import evaluation, training
from keras_rub.files import write_atomically
from keras_rub.training import Recipe
from reproduction import uci
from reproduction.context import Context
from reproduction.jobs import Job, NotNowError

DEFENCES = {
    **{name: uci.DEFENCES[name] for name in list(uci.DEFENCES)[:-1]},
    "FGSM-Linf": ("fgsm", "inf"),
    "COAP-Linf": ("coap", "inf"),
    "Nominal": ("nominal", "inf"),
}
CNN_DEFENCES = ("RUB", "aRUB-L1", "aRUB-Linf", "PGD-Linf", "Nominal")

# A training elsewhere is taken to be alive if it wrote something since.
_PATIENCE = 3600.0  # seconds


@dataclasses.dataclass(frozen=True)
class Plan:
    """Networks on images, and the samples they are judged by.

    Attributes:
        datasets: from the paper's name to the set that is used.
        normalizations: from the paper's name to those of the inputs.
        rub: `Recipe` of RUB networks, but for the radius.
        rub_small: the same for radii up to 1, where fewer vertices do.
        rub_radii: from the paper's name to the radii RUB trains for, with
            standardised inputs.
        unit_radii: the same with pixels in [0, 1].
        other: `Recipe` of the other multilayer perceptrons.
        coap: the same for COAP, whose steps take far longer.
        numbers: what they train for; for L1 times the square root of the
            number of features, as in the paper.
        cnn: `Recipe` of convolutional networks.
        cnn_rub: the same for RUB, whose steps take far longer.
        cnn_numbers: what they train for.
        cnn_normalizations: of their inputs.
        validation: samples that choose the network of a cell.
        attacked: test samples to attack.
        cnn_attacked: the same for convolutional networks.
        certified: test samples to certify.
        chunk: samples of one job that certifies with `"auto"`.
        most_open: where the paper's bound leaves more samples open, `"auto"`
            is not run; `None` for no limit.
        attacks: as of `keras_rub.evaluate`, for the test samples.
        cnn_attacks: the same for convolutional networks.
        defences: those of `DEFENCES` that are run.
        smoke_radii: from the norm to the radii, instead of the paper's.
    """

    datasets: dict[str, str]
    normalizations: dict[str, tuple[str, ...]]
    rub: Recipe
    rub_small: Recipe
    rub_radii: dict[str, tuple[float, ...]]
    unit_radii: dict[str, tuple[float, ...]]
    other: Recipe
    coap: Recipe
    numbers: tuple[float, ...]
    cnn: Recipe
    cnn_rub: Recipe
    cnn_numbers: tuple[float, ...]
    cnn_normalizations: tuple[str, ...]
    validation: int
    attacked: int
    cnn_attacked: int
    certified: int
    chunk: int
    most_open: int | None = None
    attacks: str | tuple[str, ...] = "strong"
    cnn_attacks: str | tuple[str, ...] = "strong"
    defences: tuple[str, ...] = tuple(DEFENCES)
    smoke_radii: dict[Any, list[float]] | None = None


@dataclasses.dataclass(frozen=True)
class Network:
    """One network to train.

    Attributes:
        dataset: name of the data set.
        normalization: of its inputs.
        title: the paper's name of the defence.
        recipe: how it is trained.
    """

    dataset: str
    normalization: str
    title: str
    recipe: Recipe

    @property
    def name(self) -> str:
        """Name of its folder."""
        recipe = self.recipe
        parts = [self.dataset, self.normalization, recipe.architecture]
        if recipe.defense == "nominal":
            return "-".join([*parts, "nominal"])
        return "-".join(
            [*parts, recipe.defense, f"L{recipe.norm}", f"{recipe.rho:g}"]
        )

    @property
    def settings(self) -> dict[str, Any]:
        """All that decides what it becomes."""
        return {
            "dataset": self.dataset,
            "normalization": self.normalization,
            **self.recipe.to_dict(),
        }

    def folder(self, context: Context) -> pathlib.Path:
        """Where it is kept."""
        return context.out / "models" / self.name

    def path(self, context: Context) -> pathlib.Path:
        """The file it is in when it is trained."""
        return self.folder(context) / "model.keras"

    def is_trained(self, context: Context) -> bool:
        """Whether there is such a file."""
        return self.path(context).exists()

    def load(self, context: Context) -> keras.Model:
        """The trained network, without its defence; trains it if missing.

        The last one is kept, with all that was compiled for it.
        """
        self.train(context)
        path = self.path(context)
        if path not in context.models:
            context.models.clear()
            keras.backend.clear_session()
            model = keras.models.load_model(path, compile=False)
            context.models[path] = getattr(model, "base", model)
        return context.models[path]

    def train(self, context: Context) -> None:
        """Trains it, unless it is trained or somebody is at it."""
        folder = self.folder(context)
        if self.is_trained(context):
            training.claim(folder, self.settings)
            return
        if not context.train:
            raise NotNowError(f"{self.name} is not trained")
        _require_free(folder, self.name)
        write_atomically(_marker(folder), f"{os.getpid()}\n")
        print(f"training {self.name}", flush=True)
        data = context.load(self.dataset, self.normalization)
        training.train_in_folder(self.recipe, data, folder, verbose=0)
        _marker(folder).unlink()
        keras.backend.clear_session()


def rub_networks(plan: Plan, paper_name: str) -> list[Network]:
    """The RUB networks of one image set, the small radii first."""
    return [
        Network(
            plan.datasets[paper_name],
            normalization,
            "RUB",
            dataclasses.replace(
                plan.rub_small if rho <= 1.0 else plan.rub, rho=rho
            ),
        )
        for normalization, radii in (
            ("standard", plan.rub_radii),
            ("unit", plan.unit_radii),
        )
        for rho in radii[paper_name]
    ]


def network_for(networks: list[Network], rho: float) -> Network:
    """The one trained for the smallest radius that is not below rho."""
    networks = sorted(networks, key=lambda network: network.recipe.rho)
    able = [network for network in networks if network.recipe.rho >= rho]
    return able[0] if able else networks[-1]


def networks(plan: Plan, paper_name: str, cnn: bool = False) -> list[Network]:
    """All networks of one image set, in the order of the paper's rows."""
    name = plan.datasets[paper_name]
    shape = (32, 32, 3) if name == "cifar10" else (28, 28, 1)
    if name == "digits":
        shape = (8, 8, 1)
    numbers = plan.cnn_numbers if cnn else plan.numbers
    found = []
    for title in CNN_DEFENCES if cnn else DEFENCES:
        if title not in plan.defences:
            continue
        defense, norm = DEFENCES[title]
        if title == "RUB" and not cnn:
            found += rub_networks(plan, paper_name)
            continue
        if cnn:
            template = plan.cnn_rub if title == "RUB" else plan.cnn
        else:
            template = plan.coap if defense == "coap" else plan.other
        for normalization in (
            plan.cnn_normalizations if cnn else plan.normalizations[paper_name]
        ):
            for number in (0.0,) if title == "Nominal" else numbers:
                recipe = dataclasses.replace(
                    template,
                    defense=defense,
                    norm=norm,
                    rho=round(evaluation.paper_radius(number, norm, shape), 6),
                )
                found.append(Network(name, normalization, title, recipe))
    return found


def train_jobs(wanted: list[Network], context: Context) -> list[Job]:
    """One job a network; the first of every defence, then the second...

    An early end then leaves no defence out.
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

    return [job(network) for network in sorted(wanted, key=order.get)]


def attack_job(
    network: Network,
    radii: dict[Any, list[float]],
    part: str,
    plan: Plan,
    context: Context,
) -> Job:
    """Attacks one network at some radii of each norm.

    Validation samples see the paper's attacks, test samples those of the plan.
    """
    if part == "validation":
        attacks, count = "paper", plan.validation
    elif network.recipe.architecture == "cnn":
        attacks, count = plan.cnn_attacks, plan.cnn_attacked
    else:
        attacks, count = plan.attacks, plan.attacked

    def work():
        model = network.load(context)
        data = context.load(network.dataset, network.normalization)
        keras.utils.set_random_seed(0)
        result = evaluation.evaluate(
            model,
            *(array[:count] for array in getattr(data, part)),
            radii=radii,
            norms=list(radii),
            attacks=attacks,
            certificates=False,
            examples=0,
            verbose=0,
        )
        return {"samples": len(result), "rows": result.rows}

    settings = {
        "network": network.recipe.to_dict(),
        "radii": {str(norm): list(values) for norm, values in radii.items()},
        "samples": count,
        "attacks": attacks,
    }
    return Job(f"attack-{part}-{network.name}", settings, work)


def certify_job(
    network: Network, rho: float, plan: Plan, context: Context
) -> Job:
    """Certifies test samples with the paper's bound, at one radius."""

    def work():
        model = network.load(context)
        data = context.load(network.dataset, network.normalization)
        x, y = (array[: plan.certified] for array in data.test)
        result = keras_rub.certify(
            model, x, y, rho=rho, method="rub", decide_only=True, verbose=0
        )
        return {
            "samples": len(x),
            "right": _places(result.predicted == y),
            "certified": _places(result.certified),
        }

    settings = {
        "network": network.recipe.to_dict(),
        "rho": rho,
        "samples": plan.certified,
    }
    return Job(f"certify-rub-{network.name}-at-{rho:g}", settings, work)


def auto_jobs(
    network: Network,
    rho: float,
    known: dict[str, Any],
    plan: Plan,
    context: Context,
    in_range: bool,
) -> list[Job]:
    """Certifies with `"auto"` what the paper's bound left open.

    Args:
        network: the network.
        rho: the radius.
        known: places of the samples that are `right`, and `certified` at
            this radius by the paper's bound.
        plan: `Plan`.
        context: `Context`.
        in_range: whether to hold the attacker to the valid range.
    """
    open_ = sorted(set(known["right"]) - set(known["certified"]))

    def job(number, some):
        def work():
            model = network.load(context)
            data = context.load(network.dataset, network.normalization)
            x, y = (part[some] for part in data.test)
            result = keras_rub.certify(
                model,
                x,
                y,
                rho=rho,
                method="auto",
                input_range=data.input_range if in_range else None,
                decide_only=True,
                verbose=0,
            )
            places = np.asarray(some)[result.certified]
            return {"certified": places.tolist()}

        kind = "range" if in_range else "auto"
        settings = {
            "network": network.recipe.to_dict(),
            "rho": rho,
            "open": some,
            "in_range": in_range,
        }
        return Job(
            f"certify-{kind}-{network.name}-at-{rho:g}-{number}", settings, work
        )

    parts = [
        open_[first : first + plan.chunk]
        for first in range(0, len(open_), plan.chunk)
    ]
    return [job(number, part) for number, part in enumerate(parts)]


def _places(flags) -> list[int]:
    return np.flatnonzero(flags).tolist()


def _marker(folder: pathlib.Path) -> pathlib.Path:
    return folder.with_name(f"{folder.name}.pid")


def _require_free(folder: pathlib.Path, name: str) -> None:
    """Raises if another process is training this network."""
    marker = _marker(folder)
    if marker.exists():
        if _alive(int(marker.read_text())):
            raise NotNowError(f"{name} is being trained by another process")
        return
    if not folder.exists():
        return
    newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    if time.time() - newest < _PATIENCE:
        raise NotNowError(f"{name} seems to be trained by another process")


def _alive(pid: int) -> bool:
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
