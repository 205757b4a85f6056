"""A data set, and the units its inputs are in."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_rub.categories import Category, Ordinal
from keras_rub.datasets.cells import import_pandas
from keras_rub.datasets.schema import Column, Schema, TableOptions
from keras_rub.perturbations import PerturbationSet

NORMALIZATIONS = ("default", "unit", "standard", "inside", "none")

Samples = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """Training, validation and test samples of one data set.

    Attributes:
        name: the name it was loaded by.
        train: pair of arrays, inputs [n, *features] float32 and class
            numbers [n] int64.
        validation: the same, for choosing hyper-parameters.
        test: the same, for the final figures.
        num_classes: K.
        feature_names: one name a column of a table; `None` for images.
        input_range: pair `(low, high)` of the valid inputs, or `None`.
        normalization: `"unit"`, `"standard"`, `"inside"` or `"none"`.
        raw_scale: how many raw units one unit of the inputs is: a float
            array [features] for a table, a float (the mean over the training
            images) for images; `None` where the file does not tell.
        source: where the data came from.
        class_names: one name a class, where the source has names.
        schema: the columns that the inputs stand for, of a data frame or a
            CSV file.
        options: what was said about the table.
        raw_shift: the raw value of an input of 0, of a table; as
            `raw_scale`.
    """

    name: str
    train: Samples
    validation: Samples
    test: Samples
    num_classes: int
    feature_names: tuple[str, ...] | None
    input_range: tuple[float, float] | None
    normalization: str
    raw_scale: np.ndarray | float | None
    source: str
    class_names: tuple[str, ...] | None = None
    schema: Schema | None = None
    options: TableOptions = TableOptions()
    raw_shift: np.ndarray | float | None = None

    @property
    def label(self) -> str | None:
        """Name of the column with the classes, of a table of your own."""
        return self.options.label

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return self.train[0].shape[1:]

    @property
    def is_image(self) -> bool:
        """Whether an input is [height, width, channels]."""
        return len(self.input_shape) == 3

    @property
    def units(self) -> str:
        """What a radius of 1 means, in words."""
        if self._has_groups:
            return f"{self._units}; {_prices(self.perturbations)}"
        return self._units

    @property
    def _units(self) -> str:
        if self.normalization == "none":
            return "raw units of the data"
        if self.normalization == "inside":
            return (
                "standard deviations of the training rows, which the weights "
                f"of the attacker count in (1 is {_short(self._deviation)} "
                "raw units, by feature); the inputs are raw"
            )
        if self.is_image:
            if self.normalization == "unit":
                return "pixels in [0, 1]"
            return (
                "images standardised one by one, each channel by itself; a "
                f"radius of 1 is {self.raw_scale:.3f} in pixels in [0, 1] on "
                "average"
            )
        if self.normalization == "unit":
            return f"features in [0, 1]; 1 is {_short(self.raw_scale)} raw"
        if self.raw_scale is None:
            return "standardised features; the file does not tell their scale"
        return (
            "features standardised with the training set; a radius of 1 is "
            f"{_short(self.raw_scale)} raw units, by feature"
        )

    @property
    def _has_groups(self) -> bool:
        return self.schema is not None and self.schema.has_categories

    @functools.cached_property
    def _statistics(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and deviation [M] of the numbers in the training rows.

        0 and 1 for an input that is no number, or that never varies.
        """
        x = self.train[0].astype("float64")
        mean, deviation = x.mean(axis=0), x.std(axis=0)
        # Rounding gives a constant column a deviation of its own.
        varies = deviation > 1e-7 * np.abs(mean)
        if self.schema is not None:
            varies &= self.schema.scaled
            mean = np.where(self.schema.scaled, mean, 0.0)
        return mean, np.where(varies, deviation, 1.0)

    @property
    def _deviation(self) -> np.ndarray:
        """Deviation of the inputs that are numbers."""
        scaled = slice(None) if self.schema is None else self.schema.scaled
        return self._statistics[1][scaled]

    @property
    def scales_inside(self) -> bool:
        """Whether a model should begin with `preprocessing`."""
        return self.schema is not None and self.normalization in (
            "inside",
            "none",
        )

    def preprocessing(self) -> keras.layers.Layer:
        """A layer that standardises the inputs, for the start of a model.

        With it inside the model, inputs and radii stay in the units of the
        data set. Mean and deviation are those of the training rows; inputs
        that stand for categories are left as they are.

        Returns:
            A `keras.layers.Normalization`.
        """
        if len(self.input_shape) != 1:
            raise ValueError(
                "Only a table can be standardised by its columns. "
                f"Received: inputs of shape {self.input_shape}"
            )
        mean, deviation = self._statistics
        return keras.layers.Normalization(
            mean=mean.tolist(),
            variance=np.square(deviation).tolist(),
            name="standardise",
        )

    @functools.cached_property
    def perturbations(self) -> PerturbationSet:
        """The attacker that follows from the data, measured by L1.

        His radius is in `units`. Of a table of your own he changes what is
        not `immutable`, at the cost of `weights`, within `ranges`; he switches
        categories at their price and ordinal columns by whole steps. That a
        value is missing he can't change.
        """
        if self.schema is None:
            return PerturbationSet(1, input_range=self.input_range)
        size = self.schema.size
        mask, weights = np.zeros(size, bool), np.ones(size)
        low, high = np.full(size, -np.inf), np.full(size, np.inf)
        unit = np.ones(size)
        if self.normalization == "inside":
            unit = 1.0 / self._statistics[1]
        groups: list[Category | Ordinal] = []
        for column in self.schema.columns:
            first = column.start
            if column.range is not None:
                low[first], high[first] = self._scaled_range(column)
            if column.immutable:
                continue
            cost = column.weight * unit[first]
            if column.kind == "number":
                mask[first], weights[first] = True, cost
            elif column.kind == "ordinal":
                mask[first] = True
                step = 1.0 / self._raw(self.raw_scale)[first]
                groups.append(Ordinal(first, step, cost * step))
            elif column.size > 1:
                mask[column.inputs] = True
                places = range(first, first + column.size)
                groups.append(Category(places, _price_table(column)))
        ranged = np.isfinite(low) | np.isfinite(high)
        return PerturbationSet(
            1,
            mask=None if mask.all() else mask,
            weights=None if np.all(weights == 1.0) else weights,
            input_range=(low, high) if ranged.any() else None,
            categories=groups or None,
        )

    def _scaled_range(self, column: Column) -> np.ndarray:
        """The valid values of a column in the units of the inputs: [2]."""
        shift = self._raw(self.raw_shift)[column.start]
        scale = self._raw(self.raw_scale)[column.start]
        ends = (np.array(column.range) - shift) / scale
        if (shift, scale) == (0.0, 1.0):
            return ends
        # Rounding must not put a valid row outside.
        far = np.array([-np.inf, np.inf], "float32")
        return np.nextafter(ends.astype("float32"), far)

    def encode(self, table: Any) -> np.ndarray:
        """New rows as the model takes them.

        Args:
            table: a pandas DataFrame, a dict of columns or the path of a CSV
                file, with the columns of the data set; others are left out.
                Missing values and categories that no training row has go by
                the rules that the data were loaded with.

        Returns:
            Float32 array [n, M].
        """
        x = self._table().encode(table) - self._raw(self.raw_shift)
        return (x / self._raw(self.raw_scale)).astype("float32")

    def decode(self, x: Any) -> list[dict[str, Any]]:
        """What inputs say, in raw units and the words of the table.

        Args:
            x: array [n, M].

        Returns:
            For each row a dict from the column to a number, a word, or `None`
            for a missing number.
        """
        return self._table().decode(self.raw(x))

    def raw(self, x: Any) -> np.ndarray:
        """Inputs of a table [..., M] in raw units."""
        if self.raw_scale is None or self.raw_shift is None:
            raise ValueError(f"The raw units of {self.name!r} are not known.")
        return np.asarray(x, "float64") * self.raw_scale + self.raw_shift

    def to_frame(self, part: str = "test") -> Any:
        """One part as a pandas DataFrame, in raw units, with the classes.

        Args:
            part: `"train"`, `"validation"` or `"test"`. Defaults to
                `"test"`.
        """
        pandas = import_pandas("`Dataset.to_frame`")
        x, y = self._part(part)
        frame = pandas.DataFrame(self.decode(x))
        frame[self.label] = self.name_classes(y)
        return frame

    @property
    def metadata(self) -> dict[str, Any]:
        """What a client of the model must know, as `export` takes it."""
        found: dict[str, Any] = {
            "dataset": self.name,
            "normalization": self.normalization,
            "units": self.units,
        }
        if self.class_names is not None:
            found["class_names"] = list(self.class_names)
        if self.schema is not None:
            found["columns"] = self.schema.to_dict()
        if self.schema is not None and not self.scales_inside:
            # Scaled outside: a client has to do it.
            scaled = zip(found["columns"], self.schema.columns, strict=True)
            for facts, column in scaled:
                if column.kind != "category":
                    facts["shift"] = float(
                        self._raw(self.raw_shift)[column.start]
                    )
                    facts["scale"] = float(
                        self._raw(self.raw_scale)[column.start]
                    )
        return found

    def name_classes(self, numbers: Any) -> np.ndarray:
        """The names of classes, given their numbers or outputs [n, K]."""
        numbers = np.asarray(numbers)
        if numbers.ndim > 1:
            numbers = (
                (numbers[:, 0] > 0).astype(int)
                if numbers.shape[1] == 1
                else numbers.argmax(axis=-1)
            )
        names = self.class_names or range(self.num_classes)
        return np.array([str(name) for name in names])[numbers]

    def _table(self) -> Schema:
        if self.schema is None:
            raise ValueError(
                "Only a data set from a data frame or a CSV file knows its "
                f"columns. Received: {self.name!r} from {self.source}"
            )
        return self.schema

    def _raw(self, number) -> np.ndarray:
        return np.broadcast_to(number, self.input_shape)

    def _part(self, part: str) -> Samples:
        if part not in ("train", "validation", "test"):
            raise ValueError(
                '`part` must be "train", "validation" or "test". '
                f"Received: `part={part!r}`"
            )
        return getattr(self, part)

    def batches(
        self,
        part: str = "train",
        batch_size: int = 128,
        *,
        shuffle: bool | None = None,
        repeat: bool = False,
        shift: int = 0,
        flip: bool = False,
        seed: int = 0,
    ) -> tf.data.Dataset:
        """One part as a `tf.data.Dataset` of batches `(x, y)`.

        Args:
            part: `"train"`, `"validation"` or `"test"`. Defaults to
                `"train"`.
            batch_size: int. Defaults to `128`.
            shuffle: bool, or `None`. Defaults to `None`: training samples
                only.
            repeat: bool. Whether to start over for ever. Defaults to
                `False`.
            shift: int. Each image is moved by up to so many pixels, up or
                down and left or right; what comes in repeats its edge.
                Defaults to `0`.
            flip: bool. Whether to mirror images left to right, each with a
                chance of one half. Defaults to `False`.
            seed: int. Of the shuffling, the shifts and the flips. Defaults
                to `0`.
        """
        samples = self._part(part)
        dataset = tf.data.Dataset.from_tensor_slices(samples)
        if part == "train" if shuffle is None else shuffle:
            dataset = dataset.shuffle(len(samples[0]), seed=seed)
        if repeat:
            dataset = dataset.repeat()
        dataset = dataset.batch(batch_size)
        if shift or flip:
            if not self.is_image:
                raise ValueError(
                    "Only images can be shifted or flipped. Received: inputs "
                    f"of shape {self.input_shape}"
                )
            dataset = dataset.enumerate().map(
                lambda step, batch: (
                    _move_images(batch[0], shift, flip, [seed, step]),
                    batch[1],
                )
            )
        return dataset.prefetch(2)


def _move_images(x, shift, flip, seed):
    """Shifts and mirrors images [batch, height, width, channels].

    Every sample gets its own rows and columns; those beyond the edge are the
    edge. What is drawn follows from the seed alone, so that a training which
    is resumed sees the same images.
    """
    seed = tf.cast(tf.stack(seed), tf.int64)
    count, height, width = (tf.shape(x)[axis] for axis in range(3))
    moves = tf.random.stateless_uniform(
        [2, count, 1], seed, -shift, shift + 1, tf.int32
    )
    rows = tf.clip_by_value(tf.range(height) + moves[0], 0, height - 1)
    columns = tf.clip_by_value(tf.range(width) + moves[1], 0, width - 1)
    if flip:
        mirrored = tf.random.stateless_uniform([count, 1], seed + 1) < 0.5
        columns = tf.where(mirrored, width - 1 - columns, columns)
    x = tf.gather(x, rows, axis=1, batch_dims=1)
    return tf.gather(x, columns, axis=2, batch_dims=1)


@dataclasses.dataclass(frozen=True, eq=False)
class RawData:
    """What a source delivers: both splits, not normalised.

    Attributes:
        train: inputs and class numbers; the validation part is still in it.
        test: the same.
        source: where it came from.
        feature_names: names of the columns, or `None`.
        standardized: whether the features are standardised already.
        value_range: the range that every feature has by its nature, or
            `None`. Such features are scaled to [0, 1] by default.
        class_names: the names of the classes, or `None`.
        schema: the columns of a table of the user's own, or `None`.
        options: what was said about it.
    """

    train: Samples
    test: Samples
    source: str
    feature_names: tuple[str, ...] | None = None
    standardized: bool = False
    value_range: tuple[float, float] | None = None
    class_names: tuple[str, ...] | None = None
    schema: Schema | None = None
    options: TableOptions = TableOptions()

    @property
    def is_image(self) -> bool:
        """Whether the inputs are images."""
        return self.train[0].ndim > 2


def training_rows(count: int) -> int:
    """How many of the first rows of a table are not held out."""
    return count - count // 4


def prepare(
    name: str, raw: RawData, normalization: str, held_out: int
) -> Dataset:
    """Splits the validation samples off and normalises.

    Args:
        name: the name of the data set.
        raw: what the source delivered.
        normalization: one of `NORMALIZATIONS`.
        held_out: images that are held out for validation; of a table it is
            always the last quarter of the training rows.
    """
    x, y = raw.train
    if raw.is_image:
        if not 0 < held_out < len(x):
            raise ValueError(
                f"`validation_images` must be between 1 and {len(x) - 1}. "
                f"Received: `validation_images={held_out}`"
            )
        rows = np.arange(len(x))
        train, validation = rows[held_out:], rows[:held_out]
    else:
        first = training_rows(len(x))
        train, validation = np.arange(first), np.arange(first, len(x))
    scaler = _image_scaler if raw.is_image else _table_scaler
    if normalization == "default":
        normalization = _default_normalization(raw)
    if normalization == "inside" and (raw.is_image or raw.standardized):
        raise ValueError(
            '`normalization="inside"` needs raw columns to be standardised, '
            f"which {raw.source} does not have."
        )
    scale, input_range, raw_shift, raw_scale = scaler(
        raw, x[train], normalization
    )

    def samples(x, y):
        return scale(x).astype("float32"), y.astype("int64")

    return Dataset(
        name=name,
        train=samples(x[train], y[train]),
        validation=samples(x[validation], y[validation]),
        test=samples(*raw.test),
        num_classes=int(max(y.max(), raw.test[1].max())) + 1
        if raw.class_names is None
        else len(raw.class_names),
        feature_names=raw.feature_names,
        input_range=input_range,
        normalization=normalization,
        raw_scale=raw_scale,
        source=raw.source,
        class_names=raw.class_names,
        schema=raw.schema,
        options=raw.options,
        raw_shift=raw_shift,
    )


def _default_normalization(raw) -> str:
    if raw.is_image or raw.value_range is not None:
        return "unit"
    mixed = raw.schema is not None and raw.schema.has_categories
    return "inside" if mixed else "standard"


def _image_scaler(raw, x, normalization):
    def with_channel(x):
        x = x.astype("float32")
        return x[..., None] if x.ndim == 3 else x

    if normalization == "none":
        return with_channel, (0.0, 255.0), 0.0, 1.0
    if normalization == "unit":
        return lambda x: with_channel(x) / 255.0, (0.0, 1.0), 0.0, 1.0
    deviations = []

    def standardized(x):
        x = with_channel(x) / 255.0
        mean, deviation = _by_image(x)
        deviations.append(float(deviation.mean()))
        return (x - mean) / deviation

    standardized(x[:10_000])
    return standardized, None, None, deviations[0]


def _by_image(x):
    """Mean and deviation [n, 1, 1, channels] of each image's channels."""
    mean = x.mean(axis=(1, 2), keepdims=True)
    deviation = x.std(axis=(1, 2), keepdims=True)
    # A channel of one grey level must not be divided by 0.
    return mean, np.maximum(deviation, 1.0 / np.sqrt(x[0, ..., 0].size))


def _table_scaler(raw, x, normalization):
    x = x.astype("float64")
    if normalization in ("none", "inside") or raw.standardized:
        if normalization == "unit":
            raise ValueError(
                '`normalization="unit"` needs raw features, but those of '
                f"{raw.source} are standardised already."
            )
        known = (None, None) if raw.standardized else (0.0, 1.0)
        return lambda x: x, None, *known
    if normalization == "unit":
        low, high = raw.value_range or (x.min(axis=0), x.max(axis=0))
        shift, scale = low, np.subtract(high, low)
        # Only a range by nature binds: a test row may leave that of the
        # training rows.
        input_range = None if raw.value_range is None else (0.0, 1.0)
    else:
        shift, scale = x.mean(axis=0), x.std(axis=0)
        input_range = None
    shift, scale = (
        np.broadcast_to(part, x.shape[1:]) for part in (shift, scale)
    )
    scaled = scale > 0
    if raw.schema is not None:
        scaled = scaled & raw.schema.scaled
        shift = np.where(raw.schema.scaled, shift, 0.0)
    scale = np.where(scaled, scale, 1.0)
    return lambda x: (x - shift) / scale, input_range, shift, scale


def _price_table(column: Column) -> Any:
    """The prices of its switches as `keras_rub.Category` takes them."""
    if not isinstance(column.price, dict):
        return float(column.price)
    return [
        [column.price.get(a, {}).get(b, 1.0) for b in column.values]
        for a in column.values
    ]


def _prices(perturbations: PerturbationSet) -> str:
    """What switches cost, in words."""
    words = []
    switches = [
        price
        for group in perturbations.categories
        if isinstance(group, Category)
        for price in group.prices[np.isfinite(group.prices)]
    ]
    if switches:
        words.append(f"a switch of a category costs {_short(switches)}")
    steps = [
        group.price
        for group in perturbations.categories
        if isinstance(group, Ordinal)
    ]
    if steps:
        words.append(f"a step of an ordinal column costs {_short(steps)}")
    return ", ".join(words) or "no category can be switched"


def _short(scale) -> str:
    low, high = np.min(scale), np.max(scale)
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
