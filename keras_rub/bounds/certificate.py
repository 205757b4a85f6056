"""What certification returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from keras_rub.perturbations import PerturbationSet


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Certificate:
    """Which predictions no attacker within the set can change.

    Attributes:
        margins: float array [n, K]. Upper bounds of the largest `z_k - z_y`
            over the perturbation set, 0 at the label.
        certified: boolean array [n]. True where every other margin is proved
            negative: the label is predicted at each point of the set.
        predicted: int array [n]. The class predicted for the clean input.
        labels: int array [n]. The class that was certified.
        rho: float, or array [n] of one radius a sample.
        perturbations: the attacker.
        method: the method that was asked for.
        decided_by: string array [n]. The part of the method that proved the
            sample, `""` where none did.
        interval_layers: names of the layers whose inputs got their ranges
            from interval arithmetic, in the tightest part of the method;
            linear bounds would be tighter there. Empty where there are none.
        broken: boolean array [n]. True where a point of the set is known that
            gets another class: the input itself where it is misclassified, a
            counterexample of `"exact"`, or one that switches categories.
        counterexamples: array [n, *features], or `None`. These points, and
            the inputs where there is none. Only where the method looks for
            them: `"exact"`, and all methods where there are categories.
    """

    margins: np.ndarray
    certified: np.ndarray
    predicted: np.ndarray
    labels: np.ndarray
    rho: float | np.ndarray
    perturbations: PerturbationSet
    method: str
    decided_by: np.ndarray
    interval_layers: tuple[str, ...] = ()
    broken: np.ndarray = dataclasses.field(kw_only=True)
    counterexamples: np.ndarray | None = None

    @property
    def undecided(self) -> np.ndarray:
        """Samples [n] that are neither certified nor known to be broken."""
        return ~self.certified & ~self.broken

    @property
    def norm(self) -> int | str:
        """The attacker's norm: 1, 2 or `"inf"`."""
        return self.perturbations.norm

    @property
    def clean_accuracy(self) -> float:
        """Share of samples whose clean prediction is the label."""
        return float(np.mean(self.predicted == self.labels))

    @property
    def certified_accuracy(self) -> float:
        """Share of samples whose label is certified."""
        return float(np.mean(self.certified))

    def __len__(self) -> int:
        return len(self.certified)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers and lists, ready for JSON."""
        return {
            "method": self.method,
            "norm": self.norm,
            "perturbations": self.perturbations.get_config(),
            "interval_layers": list(self.interval_layers),
            "rho": np.asarray(self.rho, "float64").tolist(),
            "samples": len(self),
            "clean_accuracy": self.clean_accuracy,
            "certified_accuracy": self.certified_accuracy,
            "labels": self.labels.tolist(),
            "predicted": self.predicted.tolist(),
            "certified": self.certified.tolist(),
            "broken": self.broken.tolist(),
            "decided_by": self.decided_by.tolist(),
            "margins": self.margins.tolist(),
        }

    def __repr__(self) -> str:
        rho = np.asarray(self.rho)
        radius = f"{rho:g}" if rho.ndim == 0 else "one a sample"
        intervals = ""
        if self.interval_layers:
            intervals = (
                f", interval ranges in {', '.join(self.interval_layers)}"
            )
        undecided = ""
        if self.method == "exact":
            undecided = f", not decided={np.mean(self.undecided):.2%}"
        return (
            f"Certificate(method={self.method!r}, "
            f"perturbations={self.perturbations!r}, "
            f"rho={radius}, samples={len(self)}, "
            f"clean accuracy={self.clean_accuracy:.2%}, "
            f"certified accuracy={self.certified_accuracy:.2%}"
            f"{undecided}{intervals})"
        )


class CertificateTable(Sequence):
    """Certificates of the same samples at several radii.

    A sequence of `Certificate` in the order of the radii asked for; printed,
    it is a table.
    """

    def __init__(self, certificates: Sequence[Certificate]):
        self._certificates = tuple(certificates)

    def __getitem__(self, index: Any) -> Any:
        return self._certificates[index]

    def __iter__(self) -> Iterator[Certificate]:
        return iter(self._certificates)

    def __len__(self) -> int:
        return len(self._certificates)

    @property
    def radii(self) -> list[float]:
        """The radii asked for."""
        return [float(certificate.rho) for certificate in self]

    @property
    def certified_accuracy(self) -> np.ndarray:
        """Certified accuracy at each radius."""
        return np.array([c.certified_accuracy for c in self])

    def to_dict(self) -> dict[str, Any]:
        """The certificates as plain numbers and lists, ready for JSON."""
        return {"certificates": [c.to_dict() for c in self]}

    def __repr__(self) -> str:
        first = self[0]
        lines = [
            f"method={first.method!r}, attacker {first.perturbations}",
            f"{len(first)} samples, clean accuracy {first.clean_accuracy:.2%}",
            f"{'rho':>10s}  certified",
        ]
        lines += [
            f"{certificate.rho:10g}  {certificate.certified_accuracy:9.2%}"
            for certificate in self
        ]
        return "\n".join(lines)
