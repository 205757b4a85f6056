"""Several inputs as one: what the attacker moves, and what it leaves alone.

A classifier may take several tensors, of which an attacker moves one. All that
follows from the others alone is a constant of the sample, and is computed by
Keras as it is. The moved tensor and these constants, side by side in one
vector, are the input of a *single-input* network, on which bounds and attacks
work as on any other: the attacker's mask holds the constants fixed.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_rub import checks
from keras_rub.classifier import (
    Classifier,
    has_graph,
    input_structure,
    logits_of,
    nodes_in_order,
    outputs_of,
)
from keras_rub.perturbations import PerturbationSet, flat_size


@dataclasses.dataclass(frozen=True, eq=False)
class SingleInput:
    """A classifier and an attacker, for whom there is one input tensor.

    Attributes:
        network: `keras.Model` of one input: the classifier itself, or one
            that takes vectors [batch, M] as `pack` makes them and has no
            head.
        perturbations: the attacker on that input.
        split: how a vector is put together, or `None` where the classifier
            has one input and nothing is packed.
    """

    network: keras.Model
    perturbations: PerturbationSet
    split: _Split | None = None

    @classmethod
    def of(
        cls, base: keras.Model, perturbations: PerturbationSet
    ) -> SingleInput:
        """Reads a built classifier; made once for each input that moves."""
        if not has_graph(base) or len(base.inputs) == 1:
            _check_only_input(base, perturbations.perturb)
            return cls(base, perturbations)
        names = input_names(base)
        moved = names[_moved_input(base, names, perturbations.perturb)]
        # Kept with the model, past Keras's tracking, so that it lives as long.
        known = base.__dict__.setdefault("_keras_rub_splits", {})
        whole = Classifier.of(base).network
        if moved not in known or known[moved].whole is not whole:
            with tf.init_scope():
                known[moved] = _Split.of(whole, names, moved)
        split = known[moved]
        return cls(split.network, split.attacker(perturbations), split)

    def logits(self, x: tf.Tensor) -> tf.Tensor:
        """Logits [batch, K] of packed inputs, for gradients by what moves.

        Raises:
            ValueError: if there is none; that by the rest would hide it.
        """
        if self.split is not None and not self.split.differentiable:
            raise checks.no_gradient()
        return logits_of(self.network, x)

    def pack(self, x: Any) -> tf.Tensor:
        """The one tensor [batch, ...] that stands for inputs, as float32.

        Args:
            x: the inputs as the classifier takes them: a dict by name, or a
                list in the order of the model's inputs. A single tensor is
                what this function has returned already.
        """
        if self.split is None:
            leaves = keras.tree.flatten(x)
            if len(leaves) != 1:
                raise ValueError(
                    f"`x` must be one tensor, as model {self.network.name!r} "
                    "takes it; several inputs need a functional model. "
                    f"Received: {len(leaves)} inputs"
                )
            return tf.cast(tf.convert_to_tensor(leaves[0]), tf.float32)
        if not isinstance(x, (dict, list, tuple)):
            return tf.cast(tf.convert_to_tensor(x), tf.float32)
        return self.split.pack(x)

    def array(self, x: Any) -> np.ndarray:
        """The same as an array, in its own type where nothing is packed."""
        several = isinstance(x, dict) or self.split is not None
        return self.pack(x).numpy() if several else np.asarray(x)

    def moved(self, points: Any) -> Any:
        """The part [batch, *features] of packed points that may move."""
        if self.split is None:
            return points
        shape = [-1, *self.split.shape]
        part = points[:, : flat_size(self.split.shape)]
        array = isinstance(part, np.ndarray)
        return part.reshape(shape) if array else tf.reshape(part, shape)

    def with_moved(self, points: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        """Packed `x`, with `points` [batch, *features] in the part that moves.

        The rest keeps its gradient: fixed inputs have weights of their own.
        """
        if self.split is None:
            return points
        size = flat_size(self.split.shape)
        flat = tf.reshape(points, [-1, size])
        return tf.concat([flat, x[:, size:]], axis=1)

    def unpack(self, points: np.ndarray, x: Any) -> Any:
        """Packed points in the structure of the inputs `x` they come from."""
        if self.split is None or not isinstance(x, (dict, list, tuple)):
            return points
        leaves = self.split.leaves(x)
        leaves[self.split.moved] = self.moved(points)
        if isinstance(x, dict):
            return {**x, **leaves}
        return [leaves[name] for name in self.split.names]


def input_names(base: keras.Model) -> list[str]:
    """The names of a model's inputs, in their order."""
    structure = input_structure(base)
    if isinstance(structure, dict):
        keys = {id(tensor): key for key, tensor in structure.items()}
        return [str(keys[id(tensor)]) for tensor in base.inputs]
    return [tensor.name for tensor in base.inputs]


def _check_only_input(base, perturb) -> None:
    if perturb is None or not has_graph(base):
        return
    names = {*input_names(base), base.inputs[0].name}
    if perturb not in names:
        raise ValueError(
            f"`perturb` must name an input of model {base.name!r}, which has "
            f"only {sorted(names)[0]!r}. Received: `perturb={perturb!r}`"
        )


def _moved_input(base, names: list[str], perturb: str | None) -> int:
    floats = [
        index
        for index, tensor in enumerate(base.inputs)
        if "float" in keras.backend.standardize_dtype(tensor.dtype)
    ]
    if perturb is None and len(floats) == 1:
        return floats[0]
    possible = ", ".join(repr(names[index]) for index in floats) or "none"
    if perturb is None:
        raise ValueError(
            f"`perturb` must name the one input of model {base.name!r} that "
            "the attacker moves, because it has not exactly one of floating "
            f"point. Those are: {possible}. Received: `perturb=None`"
        )
    if perturb not in names or names.index(perturb) not in floats:
        raise ValueError(
            f"`perturb` must name a floating-point input of model "
            f"{base.name!r}: {possible}. Received: `perturb={perturb!r}`"
        )
    return names.index(perturb)


@dataclasses.dataclass(frozen=True, eq=False)
class _Split:
    """A graph, cut where values that are fixed meet those that move.

    Attributes:
        whole: the graph, without a head.
        names: its inputs.
        moved: the name of the one that moves.
        shape: the shape of that one.
        fixed: model from the other inputs to the values at the cut, or
            `None` where none of them counts.
        network: model from packed vectors to logits.
    """

    whole: keras.Model
    names: list[str]
    moved: str
    shape: tuple[int, ...]
    fixed: keras.Model | None
    network: keras.Model

    @classmethod
    def of(cls, whole: keras.Model, names: list[str], moved: str) -> _Split:
        inputs = dict(zip(names, whole.inputs, strict=True))
        start = inputs.pop(moved)
        moving, border = _divide(whole, start)
        _check_shapes(whole, start, border)
        shapes = [tuple(tensor.shape[1:]) for tensor in (start, *border)]
        sizes = [flat_size(shape) for shape in shapes]
        ends = np.cumsum(sizes).tolist()
        packed = keras.Input((ends[-1],), name="packed")
        parts = [
            keras.layers.Reshape(shape)(packed[:, end - size : end])
            for shape, size, end in zip(shapes, sizes, ends, strict=True)
        ]
        logits = _replay(
            moving,
            dict(zip(map(id, (start, *border)), parts, strict=True)),
            whole.outputs[0],
        )
        return cls(
            whole=whole,
            names=names,
            moved=moved,
            shape=shapes[0],
            fixed=keras.Model(inputs, border) if border else None,
            network=keras.Model(packed, logits, name=whole.name),
        )

    @functools.cached_property
    def differentiable(self) -> bool:
        """Whether the logits have a gradient by what moves."""
        # By the graph itself: packed, what is fixed has a gradient too.
        blank = [
            tf.zeros([1, *(size or 1 for size in t.shape[1:])], t.dtype)
            for t in self.whole.inputs
        ]
        start = blank[self.names.index(self.moved)]
        with tf.GradientTape() as tape:
            tape.watch(start)
            logits = outputs_of(self.whole, blank)
        return tape.gradient(logits, start) is not None

    def leaves(self, x: Any) -> dict[str, Any]:
        """The inputs by name."""
        if isinstance(x, dict):
            if not set(self.names) <= set(x):
                raise ValueError(
                    f"`x` must hold the inputs {self.names}. "
                    f"Received: a dict of {sorted(x)}"
                )
            return {name: x[name] for name in self.names}
        if len(x) != len(self.names):
            raise ValueError(
                f"`x` must hold the inputs {self.names}, in this order. "
                f"Received: {len(x)} tensors"
            )
        return dict(zip(self.names, x, strict=True))

    def pack(self, x: Any) -> tf.Tensor:
        leaves = {
            name: tf.convert_to_tensor(value)
            for name, value in self.leaves(x).items()
        }
        lengths = {value.shape[0] for value in leaves.values()}
        if len(lengths - {None}) > 1:
            raise ValueError(
                "All inputs in `x` must have the same length. Received: "
                + ", ".join(f"{n} of {v.shape[0]}" for n, v in leaves.items())
            )
        start = leaves.pop(self.moved)
        if tuple(start.shape[1:]) != self.shape:
            raise ValueError(
                f"Input {self.moved!r} in `x` must have the shape [n, "
                f"{', '.join(map(str, self.shape))}]. "
                f"Received: shape {tuple(start.shape)}"
            )
        parts = [start]
        if self.fixed is not None:
            # Of a list of one, Keras returns the one.
            parts += keras.tree.flatten(self.fixed(leaves, training=False))
        return tf.concat(
            [
                tf.reshape(
                    tf.cast(part, tf.float32), [-1, flat_size(part.shape[1:])]
                )
                for part in parts
            ],
            axis=1,
        )

    def attacker(self, perturbations: PerturbationSet) -> PerturbationSet:
        """The attacker on packed vectors, for one on the input that moves."""
        perturbations.check_shape(self.shape)
        size, total = flat_size(self.shape), self.network.inputs[0].shape[-1]

        def packed(array, default, fixed):
            value = default if array is None else array
            flat = np.broadcast_to(value, self.shape).reshape(-1)
            return np.concatenate([flat, np.full(total - size, fixed)])

        limits = perturbations.input_range
        return PerturbationSet(
            perturbations.norm,
            mask=packed(perturbations.mask, True, False),
            weights=None
            if perturbations.weights is None
            else packed(perturbations.weights, 1.0, 1.0),
            input_range=None
            if limits is None
            else (
                packed(limits[0], 0.0, -np.inf),
                packed(limits[1], 0.0, np.inf),
            ),
            # What moves comes first, so that its columns keep their numbers.
            categories=perturbations.categories,
        )


def _divide(network: keras.Model, start) -> tuple[list[Any], list[Any]]:
    """The calls of layers that depend on `start`, and what else they read."""
    depends = {id(start)}
    moving, border = [], {}
    for node in nodes_in_order(network):
        reads = node.input_tensors
        if any(id(tensor) in depends for tensor in reads):
            depends.update(id(tensor) for tensor in node.outputs)
            border.update({id(t): t for t in reads if id(t) not in depends})
            moving.append(node)
    if id(network.outputs[0]) not in depends:
        raise ValueError(
            f"The output of model {network.name!r} does not depend on the "
            f"input that `perturb` names. Received: {start.name!r}"
        )
    return moving, list(border.values())


def _replay(nodes, values: dict[int, Any], output):
    """Calls the same layers again, on other symbolic tensors."""
    for node in nodes:
        args, kwargs = keras.tree.map_structure(
            lambda leaf: values.get(id(leaf), leaf),
            (list(node.arguments.args), dict(node.arguments.kwargs)),
        )
        made = keras.tree.flatten(node.operation(*args, **kwargs))
        values.update(zip(map(id, node.outputs), made, strict=True))
    return values[id(output)]


def _check_shapes(base, start, border) -> None:
    for tensor in border:
        if getattr(tensor, "_keras_mask", None) is not None:
            raise ValueError(
                "What meets the input that moves must carry no mask of Keras: "
                "use `mask_zero=False`, or let a layer that reads the mask "
                f"come first. Received: a tensor of {tensor.name!r} with one"
            )
    for tensor in (start, *border):
        if None in tensor.shape[1:]:
            raise ValueError(
                f"All inputs of model {base.name!r} that count must have a "
                f"fixed shape. Received: {tensor.name!r} of shape "
                f"{tuple(tensor.shape)}"
            )
