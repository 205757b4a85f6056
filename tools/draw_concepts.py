"""Draws the picture of docs/concepts.md: a majorant and its vertices.

    python tools/draw_concepts.py

A tiny network with two inputs is built by hand. The left panel shows its
margin over the L1 ball as a map, the right panel the margin and its convex
majorant on the lines through the vertices.
"""

import keras
import numpy as np
from absl import app, flags
from matplotlib.figure import Figure

import keras_rub
from keras_rub.files import write_figure

_OUT = flags.DEFINE_string("out", "docs/images/majorant.png", "Where to draw.")

_RHO = 1.0


def network():
    """Two inputs, six hidden units, two classes."""
    base = keras_rub.models.mlp((2,), 2, hidden=(6,))
    rng = np.random.default_rng(5)
    base.set_weights(
        [
            rng.normal(size=(2, 6)).astype("float32"),
            rng.normal(scale=0.4, size=6).astype("float32"),
            rng.normal(scale=0.9, size=(6, 2)).astype("float32"),
            np.array([2.2, 0.0], "float32"),
        ]
    )
    return base


def majorant(base, points):
    """The bound of z_1 - z_0 at d = points [n, 2], slopes from d = 0."""
    first, bias, last, offset = base.get_weights()
    slope = (bias > 0).astype("float32")  # of the clean input, 0
    row, height = last[:, 1] - last[:, 0], offset[1] - offset[0]
    z = points @ first + bias
    upper, lower = np.maximum(z, 0), slope * z
    return upper @ np.maximum(row, 0) - lower @ np.maximum(-row, 0) + height


def margin(base, points):
    """The true z_1 - z_0 at x = points [n, 2]."""
    logits = base.predict(points.astype("float32"), verbose=0)
    return logits[:, 1] - logits[:, 0]


def main(argv):
    del argv
    keras.utils.set_random_seed(0)
    base = network()
    figure = Figure(figsize=(9.6, 4.0), layout="constrained")
    left, right = figure.subplots(1, 2)

    side = np.linspace(-1.25, 1.25, 121)
    grid = np.stack(np.meshgrid(side, side), axis=-1)
    values = margin(base, grid.reshape(-1, 2)).reshape(121, 121)
    shown = left.contourf(side, side, values, 20, cmap="RdBu_r")
    left.contour(side, side, values, [0.0], colors="black")
    figure.colorbar(shown, ax=left, label="margin z1 - z0")
    corners = _RHO * np.array([[1, 0], [0, 1], [-1, 0], [0, -1], [1, 0]])
    left.plot(*corners.T, color="black", lw=1.5)
    left.plot(*corners[:4].T, "o", color="black", label="the 4 vertices")
    left.plot(0, 0, "x", color="black", label="clean input")
    left.set_aspect("equal")
    left.set_xlabel("change of feature 1")
    left.set_ylabel("change of feature 2")
    left.set_title("the margin over the L1 ball, rho = 1")
    left.legend(loc="upper left", fontsize=8)

    steps = np.linspace(-_RHO, _RHO, 201)
    for feature, color in ((0, "#c0392b"), (1, "#1f6f8b")):
        line = np.zeros((201, 2))
        line[:, feature] = steps
        name = f"along feature {feature + 1}"
        right.plot(steps, margin(base, line), color=color, label=name)
        bound = majorant(base, line)
        right.plot(steps, bound, "--", color=color, label="its majorant")
        right.plot(steps[[0, -1]], bound[[0, -1]], "o", color=color)
    x = np.zeros((1, 2), "float32")
    worst = keras_rub.RUBModel(base, rho=_RHO).worst_case_margins(x, [0])[0, 1]
    right.axhline(worst, color="0.3", lw=1, ls=":")
    right.annotate(
        "worst-case margin: the largest dot",
        (-0.95, worst),
        xytext=(0, 4),
        textcoords="offset points",
        fontsize=8,
    )
    right.axhline(0, color="black", lw=0.8)
    right.set_xlabel("change of the feature")
    right.set_ylabel("margin z1 - z0")
    right.set_title("convex, so largest at a vertex")
    right.set_xticks([-1.0, -0.5, 0.0, 0.5, 1.0])
    right.legend(fontsize=8, loc="upper right", bbox_to_anchor=(1.0, 0.84))
    write_figure(figure, _OUT.value)
    print(f"written to {_OUT.value}")


if __name__ == "__main__":
    app.run(main)
