"""Points that an attacker may reach, for trying to break a bound."""

import numpy as np
import tensorflow as tf


def directions(rng, norm, count, size):
    """Perturbations [count, size] in the unit ball: corners to interior."""
    kind = rng.integers(0, 4, count)
    dense = rng.normal(size=(count, size))
    sparse = dense * (rng.random((count, size)) < 0.3)
    corner = np.eye(size)[rng.integers(0, size, count)] * rng.choice(
        [-1.0, 1.0], (count, 1)
    )
    signs = rng.choice([-1.0, 1.0], (count, size))
    d = np.select(
        [kind[:, None] == i for i in range(4)], [dense, sparse, corner, signs]
    )
    order = {1: 1, 2: 2, "inf": np.inf}[norm]
    length = np.linalg.norm(d, ord=order, axis=1, keepdims=True)
    d = d / np.maximum(length, 1e-12)
    return d * np.where(
        rng.random((count, 1)) < 0.7, 1.0, rng.random((count, 1))
    )


def reachable(
    rng, x, rho, norm=1, count=200, mask=None, weights=None, input_range=None
):
    """Points [count, *features] of the perturbation set around one x."""
    flat = x.reshape(-1).astype("float64")
    d = rho * directions(rng, norm, count, flat.size)
    if weights is not None:
        d /= np.broadcast_to(weights, x.shape).reshape(-1)
    if mask is not None:
        d *= np.broadcast_to(mask, x.shape).reshape(-1)
    points = flat + d
    if input_range is not None:
        # Moving back toward x only makes a perturbation smaller.
        points = np.clip(points, *input_range)
    return points.reshape(-1, *x.shape).astype("float32")


def margins(model, points, label):
    """z_k - z_y [n, K] of a Keras model, in inference mode."""
    z = np.asarray(model(points, training=False), "float64")
    return z - z[:, label : label + 1]


def ascend(model, x, label, rho, norm=1, steps=10):
    """Points [steps, ...] on a way of steepest ascent of the worst margin."""
    found, point = [], tf.constant(x[None])
    for step in range(steps):
        with tf.GradientTape() as tape:
            tape.watch(point)
            z = model(point, training=False)
            rivals = z - 1e9 * tf.one_hot([label], z.shape[-1])
            margin = tf.reduce_max(rivals) - z[0, label]
        g = tape.gradient(margin, point).numpy().reshape(-1)
        if norm == 1:
            corner = np.zeros_like(g)
            best = np.abs(g).argmax()
            corner[best] = np.sign(g[best]) or 1.0
        elif norm == 2:
            corner = g / max(np.linalg.norm(g), 1e-12)
        else:
            corner = np.sign(g)
        target = x + rho * corner.reshape(x.shape)
        # Frank-Wolfe: convex combinations never leave the ball.
        point = point + 2.0 / (step + 2.0) * (target[None] - point)
        point = tf.cast(point, tf.float32)
        found.append(point.numpy()[0])
    return np.stack(found)
