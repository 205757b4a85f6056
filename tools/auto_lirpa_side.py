"""The other side of tools/compare_auto_lirpa.py; see there.

Needs torch, NumPy and auto_LiRPA, and nothing of keras_rub.
"""

import json
import pathlib
import sys
import time

import numpy as np
import torch
from auto_LiRPA import BoundedModule, BoundedTensor
from auto_LiRPA.perturbations import PerturbationLpNorm
from torch import nn

ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid}


def network_of(layers, weights):
    """The network that Keras wrote down, in PyTorch."""
    stack, arrays = [], iter(weights)
    for layer in layers:
        if layer["kind"] == "flatten":
            # In the order of Keras, which has the channels last.
            stack += [Permute(), nn.Flatten()]
            continue
        kernel, bias = (torch.tensor(next(arrays)) for _ in range(2))
        if layer["kind"] == "conv":
            size, _, inputs, filters = kernel.shape
            stack.append(
                nn.Conv2d(
                    inputs, filters, size, layer["strides"], layer["padding"]
                )
            )
            kernel = kernel.permute(3, 2, 0, 1)
        else:
            stack.append(nn.Linear(*kernel.shape))
            kernel = kernel.T
        stack[-1].weight.data, stack[-1].bias.data = kernel, bias
        if layer["activation"] != "linear":
            stack.append(ACTIVATIONS[layer["activation"]]())
    return nn.Sequential(*stack)


class Permute(nn.Module):
    """Channels to the end."""

    def forward(self, x):
        return x.permute(0, 2, 3, 1)


def crown(model, x, y, rho, classes):
    """Upper bounds [n, K] of the margins z_k - z_y by CROWN."""
    ball = PerturbationLpNorm(norm=float("inf"), eps=rho)
    eye = torch.eye(classes)
    rows = eye[y][:, None] - eye[None]
    with torch.no_grad():
        low, _ = model.compute_bounds(
            x=(BoundedTensor(x, ball),),
            C=rows,
            method="CROWN",
            bound_upper=False,
        )
    return -low.numpy()


def main(folder):
    """Bounds every network of the folder, batch by batch."""
    folder = pathlib.Path(folder)
    cases = json.loads((folder / "cases.json").read_text())
    answers = {}
    for name, case in cases.items():
        data = np.load(folder / f"{name}.npz")
        count = len(case["layers"])
        weights = [data[f"w{i}"] for i in range(2 * count) if f"w{i}" in data]
        x, y = torch.tensor(data["x"]), torch.tensor(data["y"]).long()
        if x.ndim == 4:
            x = x.permute(0, 3, 1, 2).contiguous()
        size = case["batch"]
        model = BoundedModule(
            network_of(case["layers"], weights).eval(), x[:size]
        )
        answers[f"{name}/logits"] = model(x[:size]).detach().numpy()
        times, margins = [], []
        for turn in range(case["rounds"] + 1):
            start = time.perf_counter()
            margins = [
                crown(
                    model,
                    x[i : i + size],
                    y[i : i + size],
                    case["rho"],
                    case["classes"],
                )
                for i in range(0, len(x), size)
            ]
            if turn:  # the first one warms up
                times.append((time.perf_counter() - start) / len(x) * 1e3)
        answers[f"{name}/margins"] = np.concatenate(margins)
        answers[f"{name}/ms"] = np.median(times)
    np.savez(folder / "answers.npz", torch=torch.__version__, **answers)


if __name__ == "__main__":
    main(sys.argv[1])
