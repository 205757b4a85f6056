"""The fractional knapsack: how a radius is best shared among moves.

A perturbation of the set is `sum_v shares_v * rho * direction_v` over the
moves v that it makes: a feature up or down, a switch. Its share is the part of
the radius that the move takes, so that all are at most 1 in sum, and each at
most its cap: what the valid range allows, or the price of the switch. A convex
function g is then at most `g(0) + sum_v shares_v * gain_v`, where gain_v is
what g gains from 0 to `rho * direction_v`. The largest such sum is the bound.
That `rho * direction_v` of a switch lies beyond the one-hot rows does no harm:
g is convex there too.

Of the switches of one group at most one is made. Let c_b be the cap of switch b
and y_b = share_b / c_b, so that `sum_b y_b <= 1`. Then what the group gains is
at most the largest gain times the group's share, and also
`sum_b y_b * c_b * gain_b <= max_b c_b * gain_b`. A single item with the largest
gain, and a cap at which it gains this maximum, is never below the group. With
one price for all switches of the group nothing is lost.
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from keras_rub.categories import SwitchTable


class Filled(NamedTuple):
    """The best items, and how much of each is taken: all [..., S]."""

    items: tf.Tensor
    gains: tf.Tensor
    shares: tf.Tensor


def fill(gains: tf.Tensor, caps: tf.Tensor, count: int | tf.Tensor) -> Filled:
    """Shares of the `count` best items, at most 1 in sum.

    Args:
        gains: tensor [batch, ..., I] of numbers of at least 0.
        caps: tensor [batch, I], or like `gains`. The largest shares.
        count: how many items to take, at most.
    """
    gains, order = tf.math.top_k(gains, count)
    caps = tf.gather(caps, order, batch_dims=caps.shape.rank - 1)
    before = tf.cumsum(caps, axis=-1, exclusive=True)
    shares = tf.clip_by_value(1.0 - before, 0.0, caps)
    return Filled(order, gains, tf.where(gains > 0, shares, 0.0))


def most_items(caps: tf.Tensor) -> tf.Tensor:
    """How many items use up the radius, whichever of those with a cap go in.

    Args:
        caps: tensor [..., I].

    Returns:
        Int tensor [], at most I.
    """
    rising = tf.sort(tf.where(caps > 0, caps, 1.0), axis=-1)
    used = tf.cumsum(rising, axis=-1)
    left = tf.reduce_sum(tf.cast(used < 1, tf.int32), axis=-1)
    return tf.minimum(tf.reduce_max(left) + 1, tf.shape(caps)[-1])


def price(filled: Filled) -> tf.Tensor:
    """The gain [...] of the last item that went in; 0 where more would fit."""
    largest = filled.gains.dtype.max
    least = tf.reduce_min(
        tf.where(filled.shares > 0, filled.gains, largest), axis=-1
    )
    # Rounding may leave a little of the radius.
    full = tf.reduce_sum(filled.shares, axis=-1) > 1.0 - 1e-6
    return tf.where(full, least, 0.0)


def merge_groups(
    gains: tf.Tensor, caps: tf.Tensor, table: SwitchTable
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """One item for each group of switches.

    Args:
        gains: tensor [batch, R, S] of numbers of at least 0.
        caps: tensor [batch, S].
        table: the switches.

    Returns:
        Tensors [batch, R, G]: gains, caps, and the switch of that gain.
    """
    grouped = table.by_group(gains, 0.0)
    limits = table.by_group(caps, 0.0)[:, None]
    grouped = tf.where(limits > 0, grouped, 0.0)
    best = tf.argmax(grouped, axis=-1, output_type=tf.int32)
    most = tf.reduce_max(grouped, axis=-1)
    total = tf.reduce_max(grouped * limits, axis=-1)
    members = tf.constant(table.members)
    rows = tf.broadcast_to(tf.range(members.shape[0]), tf.shape(best))
    switches = tf.gather_nd(members, tf.stack([rows, best], axis=-1))
    return most, tf.math.divide_no_nan(total, most), switches
