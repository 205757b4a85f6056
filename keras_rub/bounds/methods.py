"""The methods of certification: one record each, and nothing elsewhere.

A method is known to `certify`, the metric, the served signatures and the
command line once its record is in `METHODS`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import tensorflow as tf

from keras_rub.bounds.alpha import LineOptimiser
from keras_rub.bounds.descent import MarginSearch
from keras_rub.bounds.exact import ExactSolver
from keras_rub.bounds.problem import Problem
from keras_rub.bounds.slopes import SlopeOptimiser
from keras_rub.perturbations import NORMS

Margins = Callable[[Problem, tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor]
Search = Callable[[Problem], MarginSearch]


@dataclasses.dataclass(frozen=True)
class Method:
    """One way to certify.

    Attributes:
        name: what users call it.
        norms: the norms that it can do.
        margins: function `(problem, x, labels, rho)` to upper bounds
            [batch, K - 1] of the margins, in TensorFlow operations. `None`
            for a method that searches or only puts others together.
        search: function of a problem to what lowers single margins, which
            the first of the `stages` leaves open. `None` for a method that
            does not search.
        solver: function of a problem to what decides single samples for
            good, after the other `stages`. `None` for a method that bounds.
        uses_vertices: whether it evaluates the vertices of an L1 ball, which
            `memory_budget` limits.
        ranges: `"linear"` or `"interval"`, where its ranges come from.
        stages: dict from the norm to the names of the methods that are run
            one after the other. Defaults to the method itself.
    """

    name: str
    norms: tuple[int | str, ...] = NORMS
    margins: Margins | None = None
    search: Search | None = None
    solver: Callable[[Problem], ExactSolver] | None = None
    uses_vertices: bool = False
    ranges: str = "linear"
    stages: dict[int | str, tuple[str, ...]] = dataclasses.field(
        default_factory=dict
    )

    @property
    def function(self) -> Margins:
        """`margins`, where it is certain that there is one."""
        if self.margins is None:
            raise ValueError(f"Method {self.name!r} is no single function.")
        return self.margins

    @property
    def in_graph(self) -> bool:
        """Whether it can be part of a traced step or a served graph."""
        return self.margins is not None

    def stages_for(self, norm: int | str) -> tuple[Method, ...]:
        """The methods that are run one after the other."""
        names = self.stages.get(norm, (self.name,))
        return tuple(METHODS[name] for name in names)


def _rub(problem, x, labels, rho):
    return problem.vertex_bound(x, labels, rho).worst_case().margins


def _ibp(problem, x, labels, rho):
    return problem.interval_margins(x, labels, rho)


def _linear(problem, x, labels, rho, kind, ranges="linear"):
    return problem.linear_margins(x, labels, rho, kind, ranges=ranges)


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "auto",
            stages={
                1: ("rub", "crown", "alpha-rub"),
                2: ("ibp", "crown-ibp", "crown", "alpha-crown"),
                "inf": ("ibp", "crown-ibp", "crown", "alpha-crown"),
            },
        ),
        Method(
            "fast",
            stages={
                1: ("rub",),
                2: ("ibp", "crown-ibp", "crown"),
                "inf": ("ibp", "crown-ibp", "crown"),
            },
        ),
        Method("rub", norms=(1,), margins=_rub, uses_vertices=True),
        Method(
            "alpha-rub",
            norms=(1,),
            search=lambda problem: LineOptimiser(problem.vertex_bound),
            uses_vertices=True,
            stages={1: ("rub", "alpha-rub")},
        ),
        Method("crown", margins=functools.partial(_linear, kind="crown")),
        Method("coap", margins=functools.partial(_linear, kind="coap")),
        Method("ibp", margins=_ibp, ranges="interval"),
        Method(
            "crown-ibp",
            margins=functools.partial(_linear, kind="crown", ranges="interval"),
            ranges="interval",
        ),
        Method(
            "alpha-crown",
            search=SlopeOptimiser,
            stages=dict.fromkeys(NORMS, ("crown", "alpha-crown")),
        ),
        Method(
            "exact",
            norms=(1, "inf"),
            solver=ExactSolver,
            stages={
                1: ("rub", "crown", "alpha-rub", "exact"),
                "inf": ("ibp", "crown-ibp", "crown", "alpha-crown", "exact"),
            },
        ),
    )
}


def names(norm: int | str | None = None, in_graph: bool = False) -> list[str]:
    """The methods that can do what is asked for.

    Args:
        norm: 1, 2, `"inf"`, or `None` for any. Defaults to `None`.
        in_graph: bool. Only those that can be traced. Defaults to `False`.
    """
    return [
        method.name
        for method in METHODS.values()
        if (norm is None or norm in method.norms)
        and (method.in_graph or not in_graph)
    ]


def find(
    name: str | None,
    norm: int | str | None = None,
    *,
    in_graph: bool = False,
    argument: str = "method",
) -> Method:
    """The method of this name, or an error that lists what there is.

    Args:
        name: one of `METHODS`, or `None`, the first that can do it.
        norm: 1, 2, `"inf"`, or `None` for any. Defaults to `None`.
        in_graph: bool. Whether it must be traceable. Defaults to `False`.
        argument: what the user calls it, for the error. Defaults to
            `"method"`.
    """
    possible = names(norm, in_graph)
    if name is None:
        return METHODS[possible[0]]
    if name in possible:
        return METHODS[name]
    if name not in METHODS:
        reason = ""
    elif norm is not None and norm not in METHODS[name].norms:
        reason = f": `{name}` can't do norm {norm!r}"
    else:
        reason = f": `{name}` searches, which a graph can't"
    raise ValueError(
        f"`{argument}` must be one of {', '.join(possible)}{reason}. "
        f"Received: `{argument}={name!r}`"
    )
