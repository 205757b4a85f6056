"""What all defences share: an ordinary Keras model around the user's own."""

from __future__ import annotations

import inspect
import math
import random
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_rub import cautions, checks, classifier
from keras_rub.defenses.losses import (
    grows_away_from_label,
    grows_with_margins,
    on_logits,
)
from keras_rub.inputs import SingleInput
from keras_rub.keras_internals import compile_settings
from keras_rub.metrics import CertifiedAccuracy
from keras_rub.perturbations import PerturbationSet, attacker_of, check_rho

Schedule = Callable[[Any], Any]

# Metrics that compare one output with 0.5, which is 0 for a logit.
_THRESHOLD_METRICS = ("accuracy", "acc", "binary_accuracy")


class Step(NamedTuple):
    """What the first part of a training or test step found out."""

    features: tf.Tensor
    labels: tf.Tensor
    rho: tf.Tensor
    mix: tf.Tensor
    found: Any


class _StuckAtChance(keras.callbacks.Callback):
    """Warns once, when an epoch has learned nothing at a radius above 0."""

    # Too few steps say nothing, and a clean loss further off is not stuck.
    _STEPS = 30
    _NEAR = 0.02

    def on_epoch_end(self, epoch, logs=None):
        logs = logs or {}
        chance = math.log(max(self.model.num_classes, 2))
        steps = self.params.get("steps") or 0
        loss, rho = logs.get("clean_loss"), logs.get("rho", 0.0)
        if (
            loss is None
            or steps < self._STEPS
            or not rho > 0.0
            or abs(loss / chance - 1.0) > self._NEAR
            or self.model.warned_of_chance
        ):
            return
        self.model.warned_of_chance = True
        warnings.warn(
            f"Training is stuck at chance: the clean loss of epoch {epoch + 1} "
            f"is {loss:.3f}, and that of guessing {chance:.3f}. Let the radius "
            "grow (keras_rub.callbacks.RhoSchedule), give `input_range` if the "
            "inputs have one, or take a smaller radius. "
            f"Received: `rho={rho:g}`",
            stacklevel=2,
        )


class RobustModel(keras.Model):
    """A classifier that `fit` trains against perturbed inputs.

    It has the weights, the outputs and the metrics of `base`; only the loss
    that `fit` minimises is another one:
    `mix * robust loss + (1 - mix) * clean loss`. A subclass says what the
    robust loss is, in `robust_loss`.

    If `base` is compiled, the new model is compiled with the same settings
    (and a fresh optimizer); otherwise call `compile` as usual.

    A final softmax, log_softmax or sigmoid of `base` is read as what it is:
    predictions and metrics have it, while bounds, attacks and losses work on
    the logits before it. A cross entropy on probabilities then means the same
    one on logits. Where `base` returns logits, the names of cross entropies
    (`"sparse_categorical_crossentropy"`, `"binary_crossentropy"`) mean those
    on logits.

    One output z is two classes with the logits [0, z]: labels are 0 and 1,
    the loss is a binary one, and margins [batch, 2] are those of both. The
    name `"accuracy"` then compares with the output that stands for 50 %.

    `fit` and `evaluate` report `loss` (the one that is minimised),
    `clean_loss`, the compiled metrics on the clean inputs, and `rho`.

    BatchNormalization and Dropout: the clean pass of a training step runs in
    training mode and updates the moving statistics once. The robust loss is
    taken at inference mode: with the moving statistics as they stood before
    the step, and without dropout.

    Args:
        base: `keras.Model` with logits or probabilities [batch, K] as its
            output.
        rho: float, or a function of the training step such as a
            `keras.optimizers.schedules.LearningRateSchedule`. The radius, in
            the units of the base model's input. Defaults to `0.1`.
        mix: float in [0, 1], or a function of the step. The weight of the
            robust loss. Defaults to `1.0`.
        perturbations: `PerturbationSet`. Everything about the attacker but
            the radius.
        **kwargs: other `keras.Model` arguments, such as `name`.
    """

    # Whether the robust loss counts switches of categories.
    honours_categories = False

    def __init__(
        self,
        base: keras.Model,
        rho: float | Schedule = 0.1,
        *,
        mix: float | Schedule = 1.0,
        perturbations: PerturbationSet,
        **kwargs: Any,
    ):
        _check_base(base)
        if perturbations.categories and not self.honours_categories:
            raise ValueError(
                f"{type(self).__name__} can't switch `categories`; use "
                "RUBModel, IBPModel or COAPModel, or mask their columns. "
                f"Received: `perturbations={perturbations!r}`"
            )
        kwargs.setdefault("dtype", base.dtype_policy)
        super().__init__(**kwargs)
        # XLA drops the checks of the inputs, and can't compile the loop over
        # chunks of vertices.
        self.supports_jit = False
        self.base = base
        self.perturbations = perturbations
        self.num_classes = 0  # not known yet
        self.width = classifier.width_of(base)
        self._schedules: dict[str, Schedule] = {}
        self._numbers: dict[str, tf.Variable] = {}
        self._set("rho", rho)
        self._set("mix", mix)
        # Whether the clean loss ever had a weight.
        self._mixes = "mix" in self._schedules or self.mix != 1.0
        self.warned_of_chance = False
        self._clean_loss_tracker = keras.metrics.Mean(name="clean_loss")
        self._output_shapes: tuple[tuple[int | None, ...], ...] | None = None
        self._seed = _next_seed()

    def setup(self) -> None:
        """Builds, checks and compiles; the last line of each `__init__`."""
        base = self.base
        if base.built and getattr(base, "inputs", None):
            # Known shapes: build now, so that weights can be loaded and a
            # bad base is found at once.
            self(
                keras.tree.map_structure(
                    lambda t: keras.KerasTensor(t.shape, t.dtype),
                    classifier.input_structure(base),
                )
            )
            self.prepare()
        if getattr(base, "compiled", False):
            self._compile_like(base)

    # The radius and the mix weight ------------------------------------------

    @property
    def norm(self) -> int | str:
        """The norm of the perturbation: 1, 2 or `"inf"`."""
        return self.perturbations.norm

    @property
    def rho(self) -> float:
        """The radius in force. Assigning a number ends a schedule."""
        return float(self._in_force("rho"))

    @rho.setter
    def rho(self, value: float | Schedule):
        self._set("rho", value)

    @property
    def mix(self) -> float:
        """The weight of the robust loss in force."""
        return float(self._in_force("mix"))

    @mix.setter
    def mix(self, value: float | Schedule):
        self._set("mix", value)
        if not self._mixes and (callable(value) or value != 1.0):
            self._mixes = True
            self._trace_again()

    def _set(self, name: str, value: float | Schedule):
        schedule = value if callable(value) else None
        number = check_rho(value if schedule is None else schedule(0), name)
        if name == "mix" and number > 1.0:
            raise ValueError(
                f"`mix` must be between 0 and 1. Received: `mix={number}`"
            )
        replaced = self._schedules.pop(name, None)
        if schedule is not None:
            self._schedules[name] = schedule
        if name not in self._numbers:
            # Not a Keras weight: `get_weights` stays that of the base.
            with tf.init_scope():
                self._numbers[name] = tf.Variable(
                    number, trainable=False, dtype="float32", name=name
                )
            return
        self._numbers[name].assign(number)
        if schedule is not None or replaced is not None:
            # A traced step has the schedule, or its absence, built in.
            self._trace_again()

    def _trace_again(self) -> None:
        if self.train_function is not None:
            self.make_train_function(force=True)
        if self.test_function is not None:
            self.make_test_function(force=True)

    def _in_force(self, name: str) -> tf.Tensor:
        if name not in self._schedules:
            return tf.convert_to_tensor(self._numbers[name])
        step = self.optimizer.iterations if self.compiled else 0
        return tf.cast(self._schedules[name](step), tf.float32)

    def step_seed(self) -> tf.Tensor | None:
        """The seed [2] of what a training step draws.

        It follows from the number of the step, so that a training that is
        resumed draws what it would have drawn. `None` before `compile`.
        """
        if not self.compiled:
            return None
        seed = fold_in([self._seed, 0], self.optimizer.iterations)
        context = tf.distribute.get_replica_context()
        replica = context.replica_id_in_sync_group if context else 0
        return fold_in(seed, replica)

    @property
    def input_shape(self) -> tuple[int | None, ...]:
        """The base model's input shape."""
        return self.base.input_shape

    @property
    def output_shape(self) -> tuple[int | None, ...]:
        """The base model's output shape."""
        return self.base.output_shape

    # Keras ------------------------------------------------------------------

    def call(self, inputs, training=None):
        outputs = self.base(_as_float(inputs), training=training)
        self._output_shapes = tuple(
            tuple(tensor.shape) for tensor in keras.tree.flatten(outputs)
        )
        return outputs

    def compile(
        self,
        optimizer="rmsprop",
        loss=None,
        loss_weights=None,
        metrics=None,
        *args,
        **kwargs,
    ):
        """As `keras.Model.compile`; a loss is checked for what it must do."""
        for weight in keras.tree.flatten(loss_weights):
            if isinstance(weight, (str, keras.metrics.Metric)):
                raise ValueError(
                    "`loss_weights`, the third argument of `compile`, must "
                    f"hold numbers. Received: {loss_weights!r}; write "
                    "`metrics=` in front of metrics."
                )
        # Past Keras's bookkeeping: what the user said, for saving.
        self.__dict__["_own_loss"] = loss
        loss = self._loss_on_logits(loss)
        metrics = self._metrics_of_outputs(metrics)
        if "weighted_metrics" in kwargs:
            kwargs["weighted_metrics"] = self._metrics_of_outputs(
                kwargs["weighted_metrics"]
            )
        super().compile(optimizer, loss, loss_weights, metrics, *args, **kwargs)
        # Compiled metrics are Keras's to track: past its own bookkeeping.
        self.__dict__["_input_metrics"] = [
            metric
            for metric in keras.tree.flatten(metrics)
            if isinstance(metric, CertifiedAccuracy)
        ]
        for metric in self._input_metrics:
            metric.attach(self)
        if self.built:
            # Else Keras does so inside the first step, which TensorFlow then
            # traces twice.
            self.optimizer.build(self.trainable_variables)

    def _loss_on_logits(self, loss):
        """The compiled loss as a loss of logits, checked."""
        if loss is None:
            return None
        base = self.base
        head, width = classifier.head_of(base), self.width
        seen = classifier.has_graph(base) or isinstance(base, keras.Sequential)
        loss = keras.tree.map_structure(
            lambda one: on_logits(one, head, width, seen), loss
        )
        self.check_loss(loss)
        return loss

    def _metrics_of_outputs(self, metrics):
        if self.width != 1 or classifier.head_of(self.base) is not None:
            return metrics

        def at_zero(metric):
            if metric not in _THRESHOLD_METRICS:
                return metric
            return keras.metrics.BinaryAccuracy(name=metric, threshold=0.0)

        return keras.tree.map_structure(
            lambda one: at_zero(one) if isinstance(one, str) else one, metrics
        )

    def get_compile_config(self) -> dict[str, Any]:
        config = super().get_compile_config()
        if config:
            config["loss"] = keras.saving.serialize_keras_object(self._own_loss)
        return config

    def compile_from_config(self, config):
        # Keras skips this for a class with its own `compile`.
        self.compile(**keras.saving.deserialize_keras_object(config))

    def check_loss(self, loss: Any) -> None:
        """Raises if the defence can't work with this Keras loss."""

    def _compile_like(self, base: keras.Model) -> None:
        # The settings as the user gave them: functions can't be rebuilt from
        # the public config, which has only their names.
        self.compile(
            **{
                name: keras.tree.map_structure(_fresh_copy, value)
                for name, value in compile_settings(base).items()
            }
        )

    @checks.with_clear_errors
    def fit(self, *args, **kwargs):
        _refuse_words(*args, **kwargs)
        single = self.single_input
        cautions.about_scale(single.network, single.perturbations)
        call = inspect.signature(keras.Model.fit).bind(self, *args, **kwargs)
        callbacks = call.arguments.get("callbacks")
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            call.arguments["callbacks"] = [
                *keras.tree.flatten([] if callbacks is None else callbacks),
                _StuckAtChance(),
            ]
        return super().fit(*call.args[1:], **call.kwargs)

    @checks.with_clear_errors
    def evaluate(self, *args, **kwargs):
        _refuse_words(*args, **kwargs)
        # Before 3.14 Keras returns tensors in the place of numbers.
        return keras.tree.map_structure(
            float, super().evaluate(*args, **kwargs)
        )

    @checks.with_clear_errors
    def train_on_batch(self, *args, **kwargs):
        return super().train_on_batch(*args, **kwargs)

    @checks.with_clear_errors
    def test_on_batch(self, *args, **kwargs):
        return super().test_on_batch(*args, **kwargs)

    def train_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        y, step = self._find_worst_case(x, y, training=True)
        with tf.GradientTape() as tape:
            y_pred, losses = self._both_losses(
                x, y, sample_weight, step, training=True
            )
            scaled = self.optimizer.scale_loss(losses["loss"])
        weights = self.trainable_weights
        if weights:
            gradients = _gradients(tape, scaled, weights)
            self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return self._logs(x, y, y_pred, sample_weight, losses, step)

    def test_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        y, step = self._find_worst_case(x, y, training=False)
        y_pred, losses = self._both_losses(
            x, y, sample_weight, step, training=False
        )
        return self._logs(x, y, y_pred, sample_weight, losses, step)

    def _find_worst_case(self, x, y, training):
        """The part of a step that no gradient is taken of."""
        if self._output_shapes is None:
            self(x)
        self.prepare()
        features = self._features(x)
        rho, mix = self._in_force("rho"), self._in_force("mix")
        labels = checks.class_labels(y, self.num_classes)
        self._check_label_shape(y)
        # The user's loss reads y itself: let that wait for the checks too.
        with tf.control_dependencies([labels]):
            y = keras.tree.map_structure(tf.identity, y)
        found = self.search(features, labels, rho, training)
        return y, Step(features, labels, rho, mix, found)

    def _both_losses(self, x, y, sample_weight, step, training):
        def loss(outputs):
            return self.compute_loss(
                x=x,
                y=y,
                y_pred=classifier.from_classes(outputs, self.width),
                sample_weight=sample_weight,
                training=training,
            )

        # The robust pass first, so that it sees the moving statistics as the
        # search did; the losses last, so that both count the regularisation
        # of one and the same pass.
        if self.single_input.split is not None:
            # Again, on the tape: fixed inputs have weights of their own.
            step = step._replace(features=self.single_input.pack(x))
        robust_loss = self.robust_loss(loss, step)
        logits, y_pred = self._clean_pass(x, training)
        if self._mixes:
            clean, robust = loss(logits), robust_loss()
            mix = tf.cast(step.mix, robust.dtype)
            total = mix * robust + (1.0 - mix) * clean
        else:
            # Without a weight the clean loss needs no gradient.
            clean, total = loss(tf.stop_gradient(logits)), robust_loss()
        return y_pred, {"loss": total, "clean_loss": clean}

    def _clean_pass(self, x, training):
        """Logits [batch, K] and the user's own outputs, by one pass."""
        found = classifier.Classifier.of(self.base)
        if found.head is None:
            raw = self(x, training=training)
        else:
            raw = found.network(_as_float(x), training=training)
        return classifier.to_classes(raw), found.outputs(raw)

    def _logs(self, x, y, y_pred, sample_weight, losses, step):
        for metric in self._input_metrics:
            metric.observe(x, step.labels)
        count = tf.shape(keras.tree.flatten(x)[0])[0]
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        trackers = {metric.name: metric for metric in self.metrics}
        for name, loss in losses.items():
            # Keras scales a loss for the sum over replicas.
            trackers[name].update_state(loss * replicas, sample_weight=count)
        logs = self.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        logs["rho"] = step.rho
        if self._mixes:
            logs["mix"] = step.mix
        return logs

    # What a defence adds ----------------------------------------------------

    def search(
        self,
        x: tf.Tensor,
        labels: tf.Tensor,
        rho: tf.Tensor,
        training: bool = False,
    ) -> Any:
        """Looks for the worst case; no gradient is taken of this part.

        Args:
            x: float tensor [batch, *features].
            labels: int tensor [batch].
            rho: tensor [] or [batch].
            training: bool. Whether a gradient step follows, for which an
                estimate will do. Defaults to `False`.

        Returns:
            Anything that `robust_outputs` needs.
        """
        return None

    def robust_outputs(
        self, x: tf.Tensor, labels: tf.Tensor, rho: tf.Tensor, found: Any
    ) -> tf.Tensor:
        """What stands in for the logits [batch, K] in the robust loss."""
        raise NotImplementedError

    def robust_loss(
        self, loss: Callable[[tf.Tensor], tf.Tensor], step: Step
    ) -> Callable[[], tf.Tensor]:
        """Runs the robust pass; the result gives its loss when called.

        Args:
            loss: function from outputs [batch, K] to the compiled loss.
            step: what `search` found, and for which inputs.
        """
        outputs = self.robust_outputs(
            step.features, step.labels, step.rho, step.found
        )
        return lambda: loss(outputs)

    # Inputs and outputs -----------------------------------------------------

    def _features(self, x) -> tf.Tensor:
        """The one tensor that is perturbed, as floats, checked."""
        single = self.single_input
        features = single.pack(x)
        single.perturbations.check_shape(tuple(features.shape[1:]))
        checks.require_valid(features, single.perturbations)
        return features

    @property
    def single_input(self) -> SingleInput:
        """Base and attacker as those of one input tensor."""
        return SingleInput.of(self.base, self.perturbations)

    def logits_of(self, features: tf.Tensor) -> tf.Tensor:
        """Inference-mode logits [batch, K] for the perturbed tensor."""
        return self.single_input.logits(features)

    def prepare(self) -> None:
        """Checks what is only known of a built model; runs once."""
        if self.num_classes:
            return
        shapes = self._output_shapes or ()
        if len(shapes) != 1 or len(shapes[0]) != 2 or shapes[0][-1] is None:
            raise ValueError(
                "`base` must return one tensor of logits or probabilities "
                f"[batch, K]. Received: output shapes {list(shapes)}"
            )
        width = shapes[0][-1]
        _ = self.single_input  # what the attacker moves is known
        _check_head(self.base, width)
        known = self.width is not None
        self.width = width
        self.num_classes = max(width, 2)
        if self.compiled and not known:
            # What could not be checked before the shapes were known.
            with tf.init_scope():
                self._loss_on_logits(self._own_loss)

    def _check_label_shape(self, y) -> None:
        (y,) = keras.tree.flatten(y)
        if self.width == 1 and len(y.shape) == 2 and y.shape[-1] != 1:
            raise ValueError(
                "`y` must hold the classes 0 and 1, [batch] or [batch, 1], "
                "because `base` has one output. "
                f"Received: shape {tuple(y.shape)}"
            )

    # Saving -----------------------------------------------------------------

    def get_config(self):
        base = keras.saving.serialize_keras_object(self.base)
        # The wrapper's own compile settings are the ones that matter.
        base.pop("compile_config", None)
        config = {
            "name": self.name,
            "dtype": self.dtype_policy.name,
            "base": base,
        }
        for name in ("rho", "mix"):
            schedule = self._schedules.get(name)
            config[name] = (
                round(float(self._numbers[name].numpy()), 8)
                if schedule is None
                else keras.saving.serialize_keras_object(schedule)
            )
        return config

    @classmethod
    def from_config(cls, config, custom_objects=None):
        config = {
            name: keras.saving.deserialize_keras_object(
                value, custom_objects=custom_objects
            )
            if name in ("base", "rho", "mix")
            else value
            for name, value in config.items()
        }
        return cls(**config)


def count_or_all(name: str, value: Any) -> int | str:
    """A whole number of at least 1, or `"all"`; else an error."""
    if value == "all":
        return "all"
    if isinstance(value, (bool, str)) or int(value) != value or value < 1:
        raise ValueError(
            f'`{name}` must be "all" or a whole number of at least 1. '
            f"Received: `{name}={value!r}`"
        )
    return int(value)


def attacker_without_range(
    perturbations: PerturbationSet | None, **shorthand: Any
) -> PerturbationSet:
    """The attacker of a defence that can't respect a valid range."""
    attacker = attacker_of(None, perturbations, default_norm="inf", **shorthand)
    if attacker.input_range is not None:
        raise ValueError(
            "A first-order defence can't respect a valid range: leave "
            "`input_range` out of the set, or use RUBModel, IBPModel or "
            f"PGDModel. Received: `perturbations={attacker!r}`"
        )
    return attacker


def fold_in(seed: Any, number: Any) -> tf.Tensor:
    """A seed [2] for each whole number, from one seed."""
    return tf.random.experimental.stateless_fold_in(
        seed, tf.cast(number, tf.int64)
    )


def _next_seed() -> int:
    """What Python would draw next, and will: weights stay those they were."""
    state = random.getstate()
    seed = random.randrange(2**31)
    random.setstate(state)
    return seed


def _gradients(tape, loss, weights):
    try:
        return tape.gradient(loss, weights)
    except LookupError as error:
        # TensorFlow can't differentiate the gradients of a few operations.
        raise ValueError(
            "A defence that trains on input gradients needs second "
            "derivatives, and TensorFlow lacks that of an operation in the "
            "model: write it with other operations (softsign as "
            "z / (1 + keras.ops.abs(z))), or use RUBModel, COAPModel or "
            f"PGDModel. Received: {error}"
        ) from error


def _refuse_words(x=None, y=None, *args, **kwargs):
    """Labels are words: said before Keras fails to make a tensor of them."""
    if y is not None:
        checks.refuse_words(y)


def _fresh_copy(setting):
    """A copy of what has state, so that two models don't share it."""
    if isinstance(setting, (keras.optimizers.Optimizer, keras.metrics.Metric)):
        return type(setting).from_config(setting.get_config())
    return setting


def _as_float(inputs):
    if len(keras.tree.flatten(inputs)) > 1:
        return inputs  # of several, some are meant to be whole numbers

    def cast(tensor):
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        if "int" in dtype or dtype == "bool":
            return keras.ops.cast(tensor, keras.config.floatx())
        return tensor

    return keras.tree.map_structure(cast, inputs)


def _check_base(base: Any) -> None:
    if not isinstance(base, keras.Model):
        raise TypeError(
            "`base` must be a keras.Model (Sequential, Functional or a "
            f"subclass). Received: {type(base).__module__}."
            f"{type(base).__name__}"
        )
    if isinstance(base, RobustModel):
        raise ValueError(
            f"`base` is a robust model already. Received: {base.name!r}; pass "
            "its own `.base`."
        )
    if isinstance(base, keras.Sequential) and not base.layers:
        raise ValueError(
            f"`base` has no layers. Received: the empty model {base.name!r}"
        )
    _check_head(base, classifier.width_of(base))


def _check_head(base: keras.Model, width: int | None) -> None:
    head = classifier.head_of(base)
    if width == 1 and head in ("softmax", "log_softmax"):
        raise ValueError(
            f"`base` has one output with a {head}, which is the same for every "
            'input: use Dense(1, activation="sigmoid"), or as many outputs as '
            f"classes. Received: model {base.name!r}"
        )
    last = classifier.layers_of(base)[-1:]
    if head and any(layer.activity_regularizer is not None for layer in last):
        raise ValueError(
            f"The `activity_regularizer` of the last layer reads the {head}, "
            "which the loss leaves out: use one on another layer, or a "
            f"`kernel_regularizer`. Received: layer {last[0].name!r}"
        )


class MarginModel(RobustModel):
    """A defence whose robust loss is the user's loss on worst-case margins.

    That is an upper bound of the worst loss when the loss depends on
    differences of logits only and grows with each of them, which
    `check_loss` makes sure of.
    """

    def worst_case_margins(self, x: Any, y: Any, rho: Any = None) -> tf.Tensor:
        """Bounds of the largest `z_k - z_y` within the perturbation set.

        Args:
            x: array or tensor [batch, *features].
            y: class numbers [batch] or one-hot rows [batch, K].
            rho: float, or one radius a sample [batch]. Defaults to `None`,
                the model's own radius.

        Returns:
            Tensor [batch, K], 0 at the label.
        """
        if rho is None:
            rho = self._in_force("rho")
        else:
            array = np.asarray(rho, "float32")
            if array.ndim > 1 or not np.all(np.isfinite(array) & (array >= 0)):
                raise ValueError(
                    "`rho` must be a finite number of at least 0, or one a "
                    f"sample. Received: `rho={rho!r}`"
                )
            rho = tf.constant(array)
        with checks.clear_errors():
            x = self._features(x)
            if self._output_shapes is None:
                self(x)
            self.prepare()
            labels = checks.class_labels(y, self.num_classes)
            found = self.search(x, labels, rho)
            return self.robust_outputs(x, labels, rho, found)

    # How many competing classes a training step looks at.
    competitors: int | str = "all"

    @property
    def drawn_competitors(self) -> int | str:
        """The same, `"all"` where there are no more than that."""
        if isinstance(self.competitors, str):
            return self.competitors
        few = self.num_classes - 1 <= self.competitors
        return "all" if few else self.competitors

    def check_loss(self, loss: Any) -> None:
        losses = keras.tree.flatten(loss)
        if len(losses) != 1:
            raise ValueError(
                "A robust model has one output and needs one loss. "
                f"Received: `loss={loss!r}`"
            )
        function = keras.losses.get(losses[0])
        bounded = self.width != 1 and grows_with_margins(
            function, self.num_classes or self.width or 4
        )
        if not bounded and self.width in (1, None):
            bounded = grows_away_from_label(function)
        if not bounded:
            name = getattr(
                function, "name", getattr(function, "__name__", function)
            )
            wanted = (
                "BinaryCrossentropy"
                if self.width == 1
                else "SparseCategoricalCrossentropy or CategoricalCrossentropy"
            )
            raise ValueError(
                f"Loss {name!r} can't be bounded by worst-case margins: it "
                "must depend on differences of logits only and grow with "
                f"each z_k - z_y. Use keras.losses.{wanted}, without label "
                f"smoothing. Received: `loss={loss!r}`"
            )
