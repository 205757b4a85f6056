"""What a budget decides: networks, training and samples of each experiment.

Jobs keep their plan among their settings. A new field needs a default that
means what was done without it; `records.same` says why.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from keras_rub.training import Recipe

# The paper's name, the defence and the norm it trains against.
TABLE_DEFENCES: dict[str, tuple[str, int | str]] = {
    "RUB": ("rub", 1),
    "aRUB-L1": ("arub", 1),
    "aRUB-Linf": ("arub", "inf"),
    "Baseline-Linf": ("baseline", "inf"),
    "PGD-Linf": ("pgd", "inf"),
    "Nominal": ("nominal", "inf"),
}
IMAGE_DEFENCES: dict[str, tuple[str, int | str]] = {
    **{k: v for k, v in TABLE_DEFENCES.items() if k != "Nominal"},
    "FGSM-Linf": ("fgsm", "inf"),
    "COAP-Linf": ("coap", "inf"),
    "Nominal": ("nominal", "inf"),
}
# A network without defence whose attackers find no gradient.
MASKED = "Nominal, masked"
MASKED_FACTOR = 10_000  # of its logits
CNN_DEFENCES = ("RUB", "aRUB-L1", "aRUB-Linf", "PGD-Linf", "Nominal")


def recipe_of(title: str, **options: Any) -> Recipe:
    """The recipe of a defence.

    Args:
        title: the paper's name of the defence.
        **options: other fields of `Recipe`.
    """
    defense, norm = IMAGE_DEFENCES[title]
    return Recipe(defense=defense, norm=norm, **options)


@dataclasses.dataclass(frozen=True)
class TablePlan:
    """How the networks of one UCI set are trained and attacked.

    Attributes:
        sets: names for `keras_rub.datasets.load`.
        leak_sets: those that are run with the label as a feature, too.
        numbers: sizes of the attacks; for L1 times the square root of the
            number of features, as in the paper.
        training_numbers: the same, of the radii to train for.
        rates: learning rates.
        steps: training steps.
        batch_size: samples a step.
        architecture: of `keras_rub.training.ARCHITECTURES`.
        vertices: with RUB, vertices a sample to evaluate.
        samples: validation and test samples each, at most.
        defences: those of `TABLE_DEFENCES` that are run.
        attacks: what attacks the networks.
        attack_steps: of PGD.
    """

    sets: tuple[str, ...]
    leak_sets: tuple[str, ...]
    numbers: tuple[float, ...]
    training_numbers: tuple[float, ...]
    rates: tuple[float, ...]
    steps: int
    batch_size: int
    architecture: str = "mlp"
    vertices: int = 16
    samples: int = 500
    defences: tuple[str, ...] = tuple(TABLE_DEFENCES)

    attacks: ClassVar[tuple[str, ...]] = ("fgm", "pgd")
    attack_steps: ClassVar[int] = 40

    def recipe(self, title: str, rate: float, rows: int) -> Recipe:
        """How one defence is trained, but for the radius.

        Args:
            title: the paper's name of the defence.
            rate: the learning rate.
            rows: training samples of the set.
        """
        return recipe_of(
            title,
            vertices=self.vertices,
            architecture=self.architecture,
            learning_rate=rate,
            batch_size=min(self.batch_size, rows),
            steps=self.steps,
        )

    def settings(self, name: str, rate: float, leak: bool) -> dict[str, Any]:
        """All that decides the result of one job."""
        decides = dataclasses.replace(self, sets=(), leak_sets=(), rates=())
        return {"set": name, "rate": rate, "leak": leak, "plan": decides}


@dataclasses.dataclass(frozen=True)
class ImagePlan:
    """Networks on one image set, and the samples they are judged by.

    Attributes:
        dataset: name of the set that is used.
        normalizations: of the inputs of attacked perceptrons.
        rub: `Recipe` of RUB networks, but for the radius.
        rub_small: the same for radii up to `small`.
        rub_radii: the radii RUB trains for, with standardised inputs.
        unit_radii: the same with pixels in [0, 1].
        other: `Recipe` of the other multilayer perceptrons.
        coap: the same for COAP, whose steps take far longer.
        numbers: what they train for; for L1 times the square root of the
            number of features, as in the paper.
        cnn: `Recipe` of convolutional networks.
        cnn_rub: the same for RUB, whose steps take far longer.
        cnn_pgd: the same for PGD; `None` for `cnn`.
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
        defences: those of `IMAGE_DEFENCES` that are run.
        smoke_radii: from the norm to the radii, instead of the paper's.
        small: the largest radius that `rub_small` trains for.
        tried: what the page of certified accuracies says where ours are
            below the paper's.
        seeds: of the networks of the certified table with standardised
            inputs; all other networks take the first.
        attacked_seeds: further seeds, by which the perceptron that is best
            under attack at some norm and radius is trained again.
        certified_only: from the normalisation to further radii of RUB networks
            that the certified table alone has.
        conv: `Recipe` of convolutional RUB networks of the certified table,
            or `None` for none.
        conv_radii: the radii they train for, with standardised inputs.
        conv_certified: test samples of theirs to certify.
    """

    dataset: str
    normalizations: tuple[str, ...]
    rub: Recipe
    rub_small: Recipe
    rub_radii: tuple[float, ...]
    unit_radii: tuple[float, ...]
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
    defences: tuple[str, ...] = tuple(IMAGE_DEFENCES)
    smoke_radii: dict[Any, list[float]] | None = None
    small: float = 1.0
    tried: str = ""
    seeds: tuple[int, ...] = (0,)
    certified_only: dict[str, tuple[float, ...]] = dataclasses.field(
        default_factory=dict
    )
    conv: Recipe | None = None
    conv_radii: tuple[float, ...] = ()
    conv_certified: int = 1000
    cnn_pgd: Recipe | None = None
    attacked_seeds: tuple[int, ...] = ()

    def rub_recipe(self, rho: float) -> Recipe:
        """How the RUB perceptron of a radius is trained."""
        recipe = self.rub_small if rho <= self.small else self.rub
        return dataclasses.replace(recipe, rho=rho, seed=self.seeds[0])

    def to_certify(self, recipe: Recipe) -> int:
        """How many test samples of a network are certified."""
        conv = self.conv and self.conv.architecture == recipe.architecture
        return self.conv_certified if conv else self.certified

    def inputs_of(self, cnn: bool) -> tuple[str, ...]:
        """Normalisations of the inputs of attacked networks."""
        return self.cnn_normalizations if cnn else self.normalizations

    def attack_of(self, cnn: bool) -> AttackPlan:
        """The part of the plan that a table of attacked accuracies needs."""
        if cnn:
            return AttackPlan(
                recipe=self.cnn,
                rub=self.cnn_rub,
                coap=None,
                pgd=self.cnn_pgd,
                numbers=self.cnn_numbers,
                attacks=self.cnn_attacks,
                samples=self.cnn_attacked,
                validation=self.validation,
                attack="foolbox-pgd",
            )
        return AttackPlan(
            recipe=self.other,
            rub=self.rub,
            coap=self.coap,
            pgd=None,
            numbers=self.numbers,
            attacks=self.attacks,
            samples=self.attacked,
            validation=self.validation,
            attack="paper",
            seeds=self.attacked_seeds,
        )


@dataclasses.dataclass(frozen=True)
class AttackPlan:
    """What `ImagePlan` says of perceptrons, or of convolutional networks.

    Attributes:
        recipe: `Recipe` of the networks, but for defence and radius.
        rub: the same for RUB.
        coap: the same for COAP, or `None` if there is none.
        pgd: the same for PGD; `None` for `recipe`.
        numbers: what they train for, as of `ImagePlan`.
        attacks: as of `keras_rub.evaluate`, for the test samples.
        samples: test samples to attack.
        validation: samples that choose the network of a cell.
        attack: which accuracy of `keras_rub.Evaluation.rows` stands for the
            paper's attack.
        seeds: further ones, as `attacked_seeds` of `ImagePlan`.
    """

    recipe: Recipe
    rub: Recipe
    coap: Recipe | None
    pgd: Recipe | None
    numbers: tuple[float, ...]
    attacks: str | tuple[str, ...]
    samples: int
    validation: int
    attack: str
    seeds: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class CurvePlan:
    """Training curves on images.

    Attributes:
        dataset: name of the data set, pixels in [0, 1].
        radii: Linf radii to train for.
        steps: training steps.
        every: steps between two measurements.
        samples: held-out samples to measure on.
        batch_size: samples a step.
        defences: those that are trained.
    """

    dataset: str
    radii: tuple[float, ...]
    steps: int
    every: int
    samples: int
    batch_size: int = 32

    defences: ClassVar[tuple[str, ...]] = ("aRUB-Linf", "Baseline-Linf")

    def recipe(self, title: str, rho: float) -> Recipe:
        """How one network is trained."""
        return recipe_of(
            title,
            rho=rho,
            rho_ramp=0.0,
            batch_size=self.batch_size,
            steps=self.steps,
        )


@dataclasses.dataclass(frozen=True)
class BoundPlan:
    """How often the first-order loss is above the attacked one.

    Attributes:
        sets: names of data sets.
        radii: the radii; for L1 times the square root of the number of
            features, as in the paper.
        training_numbers: what the networks are trained for. The radius is
            not ramped.
        rates: learning rates, constant over the training.
        steps: training steps.
        every: steps between two measurements.
        samples: test samples, and as many training samples, to measure on.
        batch_size: samples a step.
        defences: those that are trained.
    """

    sets: tuple[str, ...]
    radii: tuple[float, ...]
    training_numbers: tuple[float, ...]
    rates: tuple[float, ...]
    steps: int
    every: int
    samples: int
    batch_size: int = 256

    defences: ClassVar[tuple[str, ...]] = ("aRUB-Linf", "aRUB-L1")

    def recipe(self, title: str, rows: int) -> Recipe:
        """How one defence is trained, but for radius and rate."""
        return recipe_of(
            title,
            rho_ramp=0.0,
            batch_size=min(self.batch_size, rows),
            steps=self.steps,
        )


@dataclasses.dataclass(frozen=True)
class Grid:
    """Networks of the paper's search: all combinations.

    Attributes:
        datasets: names of image sets.
        normalizations: of the inputs.
        defences: those of `IMAGE_DEFENCES` that are trained.
        rates: learning rates, constant over the training.
        numbers: what they train for; for L1 times the square root of the
            number of features. The radius is not ramped.
        steps: training steps.
        batch_sizes: samples a step.
        seeds: of weights and batches.
    """

    datasets: tuple[str, ...]
    normalizations: tuple[str, ...]
    defences: tuple[str, ...]
    rates: tuple[float, ...]
    numbers: tuple[float, ...]
    steps: int
    batch_sizes: tuple[int, ...]
    seeds: tuple[int, ...] = (0,)


@dataclasses.dataclass(frozen=True)
class RadiusPlan:
    """Networks of one image set that are trained for the radii of some cells.

    Attributes:
        recipes: how they are trained, inputs standardised; they differ in norm
            and radius alone.
        radii: from the norm to the radii of the cells.
        about: what the page says of how both were chosen.
        seeds: each trains all of these networks, and fills every cell.
    """

    recipes: tuple[Recipe, ...]
    radii: dict[Any, tuple[float, ...]]
    about: str = ""
    seeds: tuple[int, ...] = (0,)


@dataclasses.dataclass(frozen=True)
class ProtocolPlan:
    """The paper's search for networks at large radii, as it is written.

    Attributes:
        bounded: names of image sets whose ceilings are looked for.
        datasets: names of image sets for `scaled`.
        normalizations: of the inputs.
        grids: the networks of the search.
        rounded: networks whose loss is computed in another way, too.
        radii: from the norm to the radii of the attacks.
        steps: training steps of `scaled`.
        batch_size: samples a step of `scaled`.
        architecture: of `keras_rub.training.ARCHITECTURES`.
        attack_steps: of PGD, in training.
        vertices: with RUB, vertices a sample to evaluate.
        scaled: what is trained to have its logits multiplied: pairs of a
            defence and a number.
        factors: by which they are multiplied.
        trained: from the name of an image set to what is trained for large
            radii.
        attacks: as of `keras_rub.evaluate`, for the test samples.
        validation_attacks: the same, to choose among those of `trained`.
        validation: samples that choose the network of a cell.
        samples: test samples to attack.
        grouped: test samples that the ceiling speaks of.
    """

    bounded: tuple[str, ...]
    datasets: tuple[str, ...]
    normalizations: tuple[str, ...]
    grids: tuple[Grid, ...]
    radii: dict[Any, tuple[float, ...]]
    steps: int
    batch_size: int
    architecture: str = "mlp"
    attack_steps: int = 10
    vertices: int = 32
    scaled: tuple[tuple[str, float], ...] = ()
    factors: tuple[float, ...] = (1.0, 100.0, 1e4)
    trained: dict[str, RadiusPlan] = dataclasses.field(default_factory=dict)
    rounded: tuple[Grid, ...] = ()
    attacks: str | tuple[str, ...] = "strong"
    validation_attacks: tuple[str, ...] = (
        "foolbox-fgm", "foolbox-pgd", "apgd-ce",
    )  # fmt: skip
    validation: int = 256
    samples: int = 500
    grouped: int = 2000

    def recipe(self, title: str, **options: Any) -> Recipe:
        """How one defence is trained, but for radius and rate.

        Args:
            title: the paper's name of the defence.
            **options: steps, samples a step and seed.
        """
        return recipe_of(
            title,
            rho_ramp=0.0,
            architecture=self.architecture,
            attack_steps=self.attack_steps,
            vertices=self.vertices,
            **options,
        )


@dataclasses.dataclass(frozen=True)
class SpeedPlan:
    """Whose training steps are timed.

    Attributes:
        tables: names of UCI sets, or what stands in for them.
        images: names of image sets.
        batch_size: samples a step.
        attack_steps: of PGD; foolbox's default, which the paper uses, is 40.
        rounds: turns of each defence; the median counts.
        seconds: of one turn, about.
        defences: those that are measured.
    """

    tables: tuple[str, ...]
    images: tuple[str, ...]
    batch_size: int
    attack_steps: int
    rounds: int
    seconds: float
    defences: tuple[str, ...] = tuple(IMAGE_DEFENCES)

    def recipe(self, title: str) -> Recipe:
        """The step of one defence."""
        return recipe_of(
            title,
            rho=0.01,
            rho_ramp=0.0,
            attack_steps=self.attack_steps,
            batch_size=self.batch_size,
        )


@dataclasses.dataclass(frozen=True)
class Trial:
    """A recipe beside the one it is compared with.

    Attributes:
        dataset: name of the data set.
        base: `Recipe` of the comparison.
        changes: pairs of a field of the recipe and its other value.
        normalization: of the inputs.
    """

    dataset: str
    base: Recipe
    changes: tuple[tuple[str, Any], ...] = ()
    normalization: str = "standard"

    @property
    def recipe(self) -> Recipe:
        """How the network is trained."""
        return dataclasses.replace(self.base, **dict(self.changes))

    @property
    def label(self) -> str:
        """What differs, in words."""
        return ", ".join(f"{k} {v}" for k, v in self.changes) or "base"

    @property
    def name(self) -> str:
        """A name for files."""
        parts = [
            "trial", self.dataset, self.normalization,
            self.base.architecture, self.base.defense,
        ]  # fmt: skip
        if self.base.defense != "nominal":
            parts.append(f"{self.base.rho:g}")
        return "-".join([*parts, *(f"{k}-{v}" for k, v in self.changes)])


@dataclasses.dataclass(frozen=True)
class TrialPlan:
    """Recipes to compare.

    Attributes:
        trials: those of one comparison one after another.
        samples: held-out samples that judge them.
    """

    trials: tuple[Trial, ...]
    samples: int = 1000
