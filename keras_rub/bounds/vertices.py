"""The RUB bound: the largest value of the majorant over the vertices."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import NamedTuple

import tensorflow as tf

from keras_rub.bounds import knapsack
from keras_rub.bounds.competitors import Competitors
from keras_rub.bounds.first_layer import first_layer
from keras_rub.bounds.lines import Lines
from keras_rub.bounds.majorant import Clean, Majorant, Relaxation
from keras_rub.bounds.patches import Patches, plan
from keras_rub.bounds.program import Program
from keras_rub.bounds.vertex_expansion import VertexExpansion
from keras_rub.categories import Switches

# With a valid range, a worst case mixes several vertices. This many of the
# best are sorted for each class; the mass that is left then goes to the last
# of them, which is an upper bound.
_MIXED_VERTICES = 128


class WorstCase(NamedTuple):
    """Where the bound is attained: a mixture of vertices for each competitor.

    `vertices` and `shares` are [batch, K - 1, S]. What the shares leave of 1
    belongs to the clean input. `margins` [batch, K - 1] is the bound itself.
    """

    vertices: tf.Tensor
    shares: tf.Tensor
    margins: tf.Tensor

    def take(self, competitors: tf.Tensor) -> WorstCase:
        """The same for some competitors [batch, C], also repeated ones."""
        return WorstCase(
            *(tf.gather(part, competitors, batch_dims=1) for part in self)
        )


def not_nan(values: tf.Tensor) -> tf.Tensor:
    """NaN as the largest number: a comparison would pass it over."""
    return tf.where(tf.math.is_nan(values), values.dtype.max, values)


class VertexBound:
    """The majorant of one batch at the vertices of its L1 balls.

    Vertices are numbered: first those of the features that move freely, as
    `expansion` lists them, then one for each switch of a category or step of
    an ordinal column, whose direction depends on the sample.

    Args:
        program: the network.
        expansion: built `VertexExpansion` layer. Lists the vertices.
        clean: clean pass of the inputs [batch, *features].
        competitors: the classes that compete with their labels.
        rho: tensor [] or [batch]. The radii.
        room: pair of tensors like `x`, or `None`. How far each feature can
            move up, and down.
        switches: the switches of the batch, or `None`. Defaults to `None`.
        memory_budget: int. Bytes that the values of one chunk of vertices
            may take.
        choices: other lines below the activations than those of the paper;
            see `Relaxation`.
        lines: what holds the other activations; see `Relaxation`.
    """

    def __init__(
        self,
        program: Program,
        expansion: VertexExpansion,
        clean: Clean,
        competitors: Competitors,
        rho: tf.Tensor,
        *,
        room: tuple[tf.Tensor, tf.Tensor] | None = None,
        switches: Switches | None = None,
        memory_budget: int = 2**26,
        choices: Mapping[int, tf.Tensor] | None = None,
        lines: Mapping[int, Lines] | None = None,
    ):
        self.relaxation = Relaxation(
            program, clean, competitors, choices, lines
        )
        self.expansion = expansion
        self.x = x = clean.values[0]
        # [1] or [batch]: a common radius is multiplied into the vertices,
        # not into each sample's.
        self.scale = tf.reshape(tf.cast(rho, x.dtype), [-1])
        self.room = room
        self.switches = switches
        if room is not None:
            self.scale = tf.minimum(self.scale, self._longest_valid_move(*room))
        self.rho = tf.broadcast_to(self.scale, tf.shape(x)[:1])
        self.memory_budget = memory_budget
        self.start = first_layer(self.relaxation)
        special = bool(lines) or switches is not None
        self.plan = None if special else plan(self.relaxation)

    @property
    def num_vertices(self) -> int:
        """How many vertices a sample has."""
        count = self.expansion.num_vertices
        return count if self.switches is None else count + self.num_switches

    @property
    def num_switches(self) -> int:
        """How many of the vertices are switches; they are the last ones."""
        return 0 if self.switches is None else len(self.switches.table)

    def _longest_valid_move(self, *room: tf.Tensor) -> tf.Tensor:
        """The radius [batch] beyond which the valid range ends the ball."""
        count = self.expansion.num_vertices // 2
        features, steps = self.expansion.moves(tf.range(count), self.x.dtype)
        up, down = (
            tf.reshape(part, [-1, self.expansion.input_size]) for part in room
        )
        largest = tf.gather(tf.maximum(up, down), features, axis=1)
        longest = tf.reduce_sum(largest / steps, axis=1)
        if self.switches is not None:
            longest += self.switches.longest((up, down))
        return longest

    def moves(
        self, vertices: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor | None]:
        """What a radius of one does at some vertices.

        Args:
            vertices: int tensor [V], or [batch, V].

        Returns:
            The features that move, how far, and the features that move as far
            the other way; `None` without switches. With them the last two are
            [batch, V].
        """
        if self.switches is None:
            return *self.expansion.moves(vertices, self.x.dtype), None
        plain = tf.range(self.expansion.num_vertices)
        features, steps = self.expansion.moves(plain, self.x.dtype)
        shape = [tf.shape(self.x)[0], self.expansion.num_vertices]
        columns = tf.concat([features, self.switches.columns], axis=0)
        steps = [tf.broadcast_to(steps, shape), self.switches.steps]
        origins = [
            tf.fill(shape, self.expansion.input_size),
            self.switches.origins,
        ]
        return tf.gather(columns, vertices), *(
            self._by_sample(tf.concat(parts, axis=1), vertices)
            for parts in (steps, origins)
        )

    def _by_sample(self, table: tf.Tensor, vertices: tf.Tensor) -> tf.Tensor:
        """Entries [batch, V] of a table with one row a sample."""
        if vertices.shape.rank == 1:
            return tf.gather(table, vertices, axis=1)
        return tf.gather(table, vertices, batch_dims=1)

    def shifts(self, vertices: tf.Tensor) -> tf.Tensor:
        """What a radius of one does to the first layer: [..., V, H].

        With switches always [batch, V, H].

        Args:
            vertices: int tensor [..., V].
        """
        if self.start is None:
            raise ValueError("The network has no dense first layer to shift.")
        return self.start.shifts(*self.moves(vertices))

    def at(self, vertices: tf.Tensor) -> tf.Tensor:
        """Bounds of the margins at some vertices.

        Args:
            vertices: int tensor [V], or [batch, V].

        Returns:
            Tensor [batch, V, K - 1].
        """
        copies = tf.shape(vertices)[-1]
        own = vertices.shape.rank == 2  # a few, other ones for each sample
        if self.start is not None and not (own and self.start.convolves):
            shifts = self.scale[:, None, None] * self.shifts(vertices)
            return self.relaxation.margins(
                self.start.at(shifts), copies, self.start.rest
            )
        points = self._points(vertices)
        points = tf.reshape(
            points, tf.concat([[-1], tf.shape(self.x)[1:]], axis=0)
        )
        points = tf.ensure_shape(points, [None, *self.x.shape[1:]])
        return self.relaxation.margins({0: Majorant(points)}, copies)

    def _points(self, vertices: tf.Tensor) -> tf.Tensor:
        """The vertices themselves: [batch, V, ...]."""
        if self.switches is None:
            return self.expansion.call(self.x, vertices, self.rho)
        features, steps, origins = self.moves(vertices)
        size, dtype = self.expansion.input_size, self.x.dtype
        # One-hot rows of a number beyond the last feature are 0.
        moves = tf.one_hot(features, size, dtype=dtype)
        moves -= tf.one_hot(origins, size, dtype=dtype)
        moves *= (self.rho[:, None] * steps)[..., None]
        return tf.reshape(self.x, [-1, 1, size]) + moves

    def at_worst_case(self, worst: WorstCase) -> tf.Tensor:
        """The worst-case margins [batch, K - 1] of a known worst case.

        This is what a gradient is taken of: the gradient of a maximum is the
        gradient at the place where it is attained.
        """
        if self.num_vertices == 0:
            return self.relaxation.clean_margins
        competitors, count = (
            worst.vertices.shape[1],
            tf.shape(worst.vertices)[2],
        )
        points = tf.reshape(worst.vertices, [-1, competitors * count])
        values = tf.reshape(
            self.at(points), [-1, competitors, count, competitors]
        )
        # Each competitor reads its own vertices only.
        own = tf.linalg.diag_part(tf.transpose(values, [0, 2, 1, 3]))
        own = tf.transpose(own, [0, 2, 1])
        clean = self.relaxation.clean_margins
        left = 1.0 - tf.reduce_sum(worst.shares, axis=-1)
        return left * clean + tf.reduce_sum(worst.shares * own, axis=-1)

    def worst_case(self, vertices: tf.Tensor | None = None) -> WorstCase:
        """Finds the worst case over all vertices or some of them.

        Args:
            vertices: int tensor [batch, V], or `None`. Defaults to `None`,
                all of them: only then is the result a bound.
        """
        if self.num_vertices == 0:
            clean = self.relaxation.clean_margins
            return WorstCase(
                tf.zeros_like(clean[..., None], tf.int32),
                tf.zeros_like(clean[..., None]),
                clean,
            )
        if vertices is not None:
            return self.worst_of(vertices, self.at(vertices))
        if self.room is None and self.plan is None:
            return self._plain_maximum(*self._scan())
        return self.worst_of(tf.range(self.num_vertices), self.at_all())

    def worst_of(self, vertices: tf.Tensor, values: tf.Tensor) -> WorstCase:
        """The worst case over vertices where the margins are known.

        Args:
            vertices: int tensor [V], all of them, or [batch, V].
            values: tensor [batch, V, K - 1].
        """
        values = not_nan(values)
        if self.room is not None:
            return self._mixture(vertices, values)
        best = tf.argmax(values, axis=1, output_type=tf.int32)
        return self._plain_maximum(
            tf.reduce_max(values, axis=1),
            tf.gather(vertices, best, batch_dims=len(vertices.shape) - 1),
        )

    def at_all(self) -> tf.Tensor:
        """Bounds [batch, V, K - 1] of the margins at every vertex."""
        if self.plan is None:
            return self.over_chunks(self.at)
        return Patches(
            self.plan,
            self.relaxation,
            self.expansion,
            self.rho,
            self.memory_budget,
        ).margins()

    def take(self, samples: tf.Tensor) -> VertexBound:
        """The same for some samples; only `at` works on the result."""
        taken = copy.copy(self)
        taken.relaxation = self.relaxation.take(samples)
        taken.x = tf.gather(self.x, samples)
        taken.rho = taken.scale = tf.gather(self.rho, samples)
        if self.start is not None:
            taken.start = self.start.take(samples)
        return taken

    def _plain_maximum(self, values, vertices) -> WorstCase:
        # The clean input is a candidate too: it wins ties, so a radius of 0
        # gives the clean margins to the last bit.
        clean = self.relaxation.clean_margins
        moved = (values > clean) & (self.rho[:, None] > 0)
        shares = tf.cast(moved, values.dtype)
        return WorstCase(
            vertices[..., None],
            shares[..., None],
            tf.where(moved, values, clean),
        )

    def caps(self, vertices: tf.Tensor) -> tf.Tensor:
        """The largest share of each vertex that stays in the valid range.

        Args:
            vertices: int tensor [V], or [batch, V].

        Returns:
            Tensor [batch, V] of numbers in [0, 1].
        """
        if self.room is None:
            raise ValueError("Without a valid range no share has a cap.")
        features, steps, _ = self.moves(vertices)
        flat = [
            tf.reshape(part, [-1, self.expansion.input_size])
            for part in self.room
        ]
        batch = tf.shape(self.x)[0]
        shape = [batch, tf.shape(vertices)[-1]]
        features = tf.broadcast_to(features, shape)
        steps = tf.broadcast_to(steps, shape)
        up, down = (tf.gather(part, features, batch_dims=1) for part in flat)
        length = self.rho[:, None] * tf.abs(steps)
        room = tf.where(steps > 0, up, down)
        # A move of length 0 stays in the range wherever it starts.
        caps = tf.where(length > room, tf.math.divide_no_nan(room, length), 1.0)
        if self.switches is None:
            return caps
        plain = tf.fill([batch, self.expansion.num_vertices], -1.0)
        plain = tf.cast(plain, caps.dtype)
        prices = tf.concat([plain, self.switches.caps(self.rho)], axis=1)
        prices = self._by_sample(prices, vertices)
        return tf.where(prices < 0, caps, prices)

    def _mixture(self, candidates, values) -> WorstCase:
        """The best mixture of vertices; see `knapsack`."""
        clean = self.relaxation.clean_margins
        gains = tf.transpose(tf.nn.relu(values - clean[:, None]), [0, 2, 1])
        caps = self.caps(candidates)
        gains = tf.where(caps[:, None] > 0, gains, 0.0)
        everything = candidates.shape.rank == 1
        if self.switches is not None:
            candidates, gains, caps = self._merged(candidates, gains)
        size = tf.shape(gains)[-1]
        count = tf.minimum(_MIXED_VERTICES, knapsack.most_items(caps))
        order, gains, shares = knapsack.fill(gains, caps, count)
        if everything:
            left = 1.0 - tf.reduce_sum(shares, axis=-1, keepdims=True)
            last = tf.cast(size > count, shares.dtype) * tf.where(
                gains[..., -1:] > 0, left, 0.0
            )
            shares += tf.pad(last, [[0, 0], [0, 0], [count - 1, 0]])
        vertices = tf.gather(
            candidates, order, batch_dims=candidates.shape.rank - 1
        )
        used = tf.reduce_max(
            tf.reduce_sum(tf.cast(shares > 0, tf.int32), axis=-1)
        )
        used = tf.maximum(used, 1)
        shares *= tf.cast(self.rho[:, None, None] > 0, shares.dtype)
        return WorstCase(
            vertices[..., :used],
            shares[..., :used],
            clean + tf.reduce_sum(shares * gains, axis=-1),
        )

    def _merged(self, candidates, gains):
        """Vertices, gains and caps [batch, K - 1, I], one item a group.

        Vertices that are no candidates gain nothing.
        """
        assert self.switches is not None
        if candidates.shape.rank == 2:
            shape = tf.shape(candidates)
            rows = tf.broadcast_to(tf.range(shape[0])[:, None], shape)
            blank = tf.zeros(
                [shape[0], self.num_vertices, tf.shape(gains)[1]], gains.dtype
            )
            gains = tf.transpose(
                tf.tensor_scatter_nd_max(
                    blank,
                    tf.stack([rows, candidates], axis=-1),
                    tf.transpose(gains, [0, 2, 1]),
                ),
                [0, 2, 1],
            )
        free = self.expansion.num_vertices
        caps = self.caps(tf.range(self.num_vertices))
        most, limits, switches = knapsack.merge_groups(
            gains[..., free:], caps[:, free:], self.switches.table
        )
        shape = tf.shape(gains[..., :free])
        items = (
            [tf.broadcast_to(tf.range(free), shape), switches + free],
            [gains[..., :free], most],
            [tf.broadcast_to(caps[:, None, :free], shape), limits],
        )
        width = self.relaxation.clean_margins.shape[-1]
        return tuple(
            tf.ensure_shape(tf.concat(parts, axis=-1), [None, width, None])
            for parts in items
        )

    def row_bytes(self) -> int:
        """About what the evaluation of one vertex of one sample takes."""
        widths = [
            tf.TensorShape(value.shape[1:]).num_elements()
            for value in self.relaxation.values.values()
        ]
        # Around an operation its inputs and outputs are alive, each as a
        # centre, a radius and the temporaries between them.
        return 4 * self.x.dtype.size * sum(sorted(widths)[-2:])

    def chunk(self) -> tf.Tensor:
        """How many vertices fit into the memory budget at once."""
        rows = max(self.memory_budget // self.row_bytes(), 1)
        chunk = tf.maximum(rows // tf.shape(self.x, tf.int64)[0], 1)
        return tf.cast(tf.minimum(chunk, self.num_vertices), tf.int32)

    def _scan(self):
        """Largest value and its vertex, for each sample and competitor."""
        chunk = self.chunk()
        shape = tf.shape(self.relaxation.clean_margins)

        def step(first, best, best_vertex):
            last = tf.minimum(first + chunk, self.num_vertices)
            values = not_nan(self.at(tf.range(first, last)))
            largest = tf.reduce_max(values, axis=1)
            where = tf.argmax(values, axis=1, output_type=tf.int32) + first
            better = largest > best
            return (
                last,
                tf.where(better, largest, best),
                tf.where(better, where, best_vertex),
            )

        width = self.relaxation.clean_margins.shape[-1]
        _, best, vertex = tf.while_loop(
            lambda first, *_: first < self.num_vertices,
            step,
            (
                tf.constant(0),
                tf.fill(shape, tf.constant(self.x.dtype.min, self.x.dtype)),
                tf.zeros(shape, tf.int32),
            ),
            shape_invariants=(
                tf.TensorShape([]),
                tf.TensorShape([None, width]),
                tf.TensorShape([None, width]),
            ),
            parallel_iterations=1,
        )
        return best, vertex

    def over_chunks(
        self, function: Callable[[tf.Tensor], tf.Tensor]
    ) -> tf.Tensor:
        """`function` of chunks of vertex numbers [V'], put side by side.

        Args:
            function: takes an int tensor [V'], returns [batch, V', K - 1].

        Returns:
            Tensor [batch, V, K - 1].
        """
        chunk = self.chunk()
        parts = tf.TensorArray(
            self.x.dtype, size=0, dynamic_size=True, infer_shape=False
        )

        def step(first, parts):
            last = tf.minimum(first + chunk, self.num_vertices)
            values = function(tf.range(first, last))
            return last, parts.write(
                parts.size(), tf.transpose(values, [1, 0, 2])
            )

        _, parts = tf.while_loop(
            lambda first, *_: first < self.num_vertices,
            step,
            (tf.constant(0), parts),
            parallel_iterations=1,
        )
        values = tf.transpose(parts.concat(), [1, 0, 2])
        width = self.relaxation.clean_margins.shape[-1]
        return tf.ensure_shape(values, [None, self.num_vertices, width])
