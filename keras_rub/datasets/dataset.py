"""A data set, and the units its inputs are in."""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

NORMALIZATIONS = ("default", "unit", "standard", "none")

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
        normalization: `"unit"`, `"standard"` or `"none"`.
        raw_scale: how many raw units one unit of the inputs is: a float
            array [features] for a table, a float (the mean over the training
            images) for images; `None` where the file does not tell.
        source: where the data came from.
        label: name of the column with the classes, of a CSV file.
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
    label: str | None = None

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
        if self.normalization == "none":
            return "raw units of the data"
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

    def batches(
        self,
        part: str = "train",
        batch_size: int = 128,
        *,
        shuffle: bool | None = None,
        repeat: bool = False,
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
            seed: int. Of the shuffling. Defaults to `0`.
        """
        if part not in ("train", "validation", "test"):
            raise ValueError(
                '`part` must be "train", "validation" or "test". '
                f"Received: `part={part!r}`"
            )
        samples = getattr(self, part)
        dataset = tf.data.Dataset.from_tensor_slices(samples)
        if part == "train" if shuffle is None else shuffle:
            dataset = dataset.shuffle(len(samples[0]), seed=seed)
        if repeat:
            dataset = dataset.repeat()
        return dataset.batch(batch_size).prefetch(2)


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
        label: name of the column with the classes, or `None`.
    """

    train: Samples
    test: Samples
    source: str
    feature_names: tuple[str, ...] | None = None
    standardized: bool = False
    value_range: tuple[float, float] | None = None
    label: str | None = None

    @property
    def is_image(self) -> bool:
        """Whether the inputs are images."""
        return self.train[0].ndim > 2


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
        first = len(x) - len(x) // 4
        train, validation = np.arange(first), np.arange(first, len(x))
    scaler = _image_scaler if raw.is_image else _table_scaler
    if normalization == "default":
        unit = raw.is_image or raw.value_range is not None
        normalization = "unit" if unit else "standard"
    scale, input_range, raw_scale = scaler(raw, x[train], normalization)

    def samples(x, y):
        return scale(x).astype("float32"), y.astype("int64")

    return Dataset(
        name=name,
        train=samples(x[train], y[train]),
        validation=samples(x[validation], y[validation]),
        test=samples(*raw.test),
        num_classes=int(max(y.max(), raw.test[1].max())) + 1,
        feature_names=raw.feature_names,
        input_range=input_range,
        normalization=normalization,
        raw_scale=raw_scale,
        source=raw.source,
        label=raw.label,
    )


def _image_scaler(raw, x, normalization):
    def with_channel(x):
        x = x.astype("float32")
        return x[..., None] if x.ndim == 3 else x

    if normalization == "none":
        return with_channel, (0.0, 255.0), 1.0
    if normalization == "unit":
        return lambda x: with_channel(x) / 255.0, (0.0, 1.0), 1.0
    deviations = []

    def standardized(x):
        x = with_channel(x) / 255.0
        mean, deviation = _by_image(x)
        deviations.append(float(deviation.mean()))
        return (x - mean) / deviation

    standardized(x[:10_000])
    return standardized, None, deviations[0]


def _by_image(x):
    """Mean and deviation [n, 1, 1, channels] of each image's channels."""
    mean = x.mean(axis=(1, 2), keepdims=True)
    deviation = x.std(axis=(1, 2), keepdims=True)
    # A channel of one grey level must not be divided by 0.
    return mean, np.maximum(deviation, 1.0 / np.sqrt(x[0, ..., 0].size))


def _table_scaler(raw, x, normalization):
    x = x.astype("float64")
    if normalization == "none" or raw.standardized:
        if normalization == "unit":
            raise ValueError(
                '`normalization="unit"` needs raw features, but those of '
                f"{raw.source} are standardised already."
            )
        return lambda x: x, None, None if raw.standardized else 1.0
    if normalization == "unit":
        low, high = raw.value_range or (x.min(axis=0), x.max(axis=0))
        scale = np.where(np.equal(high, low), 1.0, np.subtract(high, low))
        # Only a range by nature binds: a test row may leave that of the
        # training rows.
        input_range = None if raw.value_range is None else (0.0, 1.0)
        scale = np.broadcast_to(scale, x.shape[1:])
        return _affine(low, scale), input_range, scale
    deviation = x.std(axis=0)
    scale = np.where(deviation > 0, deviation, 1.0)
    return _affine(x.mean(axis=0), scale), None, scale


def _affine(shift, scale):
    return lambda x: (x - shift) / scale


def _short(scale) -> str:
    low, high = np.min(scale), np.max(scale)
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
