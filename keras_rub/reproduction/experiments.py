"""Every page's way: what is run, which network is chosen, what is written."""

from __future__ import annotations

import math
from collections.abc import Callable

from keras_rub.reproduction import (
    budgets,
    choose,
    pages,
    paper,
    rows,
    run,
)
from keras_rub.reproduction.context import Context
from keras_rub.reproduction.pages.page import Page
from keras_rub.reproduction.run.networks import (
    SHAPES,
    attacked_networks,
    certified_networks,
    masked,
    train,
)

Experiment = Callable[[Context], Page | None]


def make(name: str, context: Context) -> None:
    """Runs what is missing and writes the page, of what is finished.

    Args:
        name: one of `EXPERIMENTS`.
        context: `Context`.
    """
    print(f"{name}:", flush=True)
    page = EXPERIMENTS[name](context)
    if page is None:
        print(f"{name}: nothing is finished yet", flush=True)
    else:
        page.write(context)
        context.archive()


def _fig_loss(context: Context) -> Page | None:
    plan = budgets.CURVES[context.budget]
    found = rows.losses.curves(run.losses.curves(context, plan))
    return pages.losses.fig_loss(plan, found) if found else None


def _tab_upper_bound(context: Context) -> Page | None:
    plan = budgets.BOUNDS[context.budget]
    found = run.losses.bounds(context, plan)
    if not found:
        return None
    return pages.losses.tab_upper_bound(
        plan, rows.losses.above(found, plan), len(found)
    )


def _fig_ranks(context: Context) -> Page | None:
    plan = budgets.TABLES[context.budget]
    found = run.tables.run(context, plan)
    leaked = run.tables.run(context, plan, leak=True)
    if not found:
        return None
    return pages.ranks.fig_ranks(
        plan,
        rows.tables.ranks(found, plan),
        rows.tables.leaks(found, leaked, plan),
        list(found),
    )


def _fig_improvement(context: Context) -> Page | None:
    plan = budgets.TABLES[context.budget]
    found = run.tables.run(context, plan)
    if not found:
        return None
    return pages.ranks.fig_improvement(
        rows.tables.gains(found, plan), len(found)
    )


def _tab_speed(context: Context) -> Page | None:
    plan = budgets.SPEED[context.budget]
    found = rows.losses.speed(run.speed.run(context, plan), plan)
    return pages.speed.tab_speed(plan, found) if found else None


def _attacked(name: str, dataset: str, cnn: bool = False) -> Experiment:
    """The table of attacked accuracies of one image set."""

    def experiment(context: Context) -> Page | None:
        plan = budgets.IMAGES[context.budget][dataset]
        radii = rows.images.attacked_radii(plan, dataset, cnn)
        part = plan.attack_of(cnn)
        attack = part.attack
        wanted = attacked_networks(plan, cnn)
        inputs = run.images.inputs(context, wanted)
        ready = train(context, wanted)
        seen = run.images.attack(
            context,
            plan,
            dict.fromkeys(choose.rivals(ready), radii),
            "validation",
        )
        cells = choose.attacked_cells(
            [*ready, *masked(ready)], radii, seen, attack
        )
        results = run.images.attack(context, plan, choose.places(cells), "test")
        theirs = rows.images.paper_tables(dataset, cnn)
        found = rows.images.attacked(cells, results, theirs, attack)
        leaders = rows.images.leaders(cells, found)
        for seed in part.seeds:
            again = choose.again(leaders, seed)
            results = run.images.attack(
                context, plan, choose.places(again), "test"
            )
            found += rows.images.attacked(again, results, theirs, attack)
        if not found or not inputs:
            return None
        return pages.attacked.tab_attacked(
            name,
            dataset,
            cnn,
            plan,
            found,
            ready=f"{len(ready)} of {len(wanted)}",
            units=rows.images.units(inputs, wanted),
            erasure=rows.images.erasure(inputs.values(), radii),
        )

    return experiment


def _certified(name: str, dataset: str) -> Experiment:
    """The table of certified accuracies of one image set."""

    def experiment(context: Context) -> Page | None:
        plan = budgets.IMAGES[context.budget][dataset]
        theirs = paper.table(dataset, paper.CERTIFIED, 1)
        radii = rows.images.certified_radii(plan, dataset)
        # Only those that a radius takes.
        chosen = choose.certified_cases(certified_networks(plan), radii)
        wanted = list(dict.fromkeys(network for network, _ in chosen))
        inputs = run.images.inputs(context, wanted)
        ready = train(context, wanted)
        cases = choose.certified_cases(ready, radii)
        found = [
            rows.images.certified(*case, proofs, theirs)
            for case, proofs in run.images.certify(context, plan, cases).items()
        ]
        if not found or not inputs:
            return None
        return pages.certified.tab_bounds(
            name,
            dataset,
            plan,
            found,
            theirs,
            ready=f"{len(ready)} of {len(wanted)}",
            units=rows.images.units(inputs, ready),
            laptop=context.budget == "laptop",
        )

    return experiment


def _large_radii(context: Context) -> Page | None:
    plan = budgets.PROTOCOLS[context.budget]
    found = []
    for name in plan.bounded:
        radii = rows.protocol.ceiling_radii(plan, name)
        found += rows.protocol.ceilings(
            name, radii, run.protocol.ceilings(context, plan, name, radii)
        )
        found += rows.protocol.starts(name, math.prod(SHAPES[name]))
    for name in plan.datasets:
        found += rows.protocol.scaled(
            name, plan, run.protocol.scale(context, plan, name)
        )
    for name, trained in plan.trained.items():
        ready = train(context, run.protocol.networks_of(plan, name))
        strongest = choose.strongest_cells(
            trained.radii, run.protocol.validate(context, plan, name, ready)
        )
        tested = run.protocol.test(context, plan, choose.radii_of(strongest))
        found += rows.protocol.trained(name, strongest, tested)
    for name in dict.fromkeys(n for grid in plan.grids for n in grid.datasets):
        seen = run.protocol.search(context, plan, name)
        cells = choose.searched_cells(plan, seen)
        judged = run.protocol.judge(context, plan, choose.radii_of(cells))
        found += rows.protocol.search(name, seen, cells, judged)
        found += rows.protocol.full_length(name, plan, seen)
        found += rows.protocol.rounded(
            name, plan, run.protocol.round_off(context, plan, name)
        )
    if not found:
        return None
    return pages.large_radii.large_radii(plan, found)


def _trials(context: Context) -> Page | None:
    plan = budgets.TRIALS[context.budget]
    found = rows.trials.trials(run.trials.run(context, plan))
    return pages.trials.trials(plan, found) if found else None


def _summary(context: Context) -> Page | None:
    found = rows.summary.summary(context.results)
    if not found:
        return None
    made = {path.stem for path in context.results.glob("*.md")}
    return pages.summary.summary(
        budgets.IMAGES[context.budget],
        found,
        made,
        rows.summary.work(context.results),
    )


# In this order pages share jobs; the summary is made of the others.
EXPERIMENTS: dict[str, Experiment] = {
    "fig_loss": _fig_loss,
    "tab_upper_bound": _tab_upper_bound,
    "fig_ranks": _fig_ranks,
    "fig_improvement": _fig_improvement,
    "tab_speed": _tab_speed,
    "tab_fashion": _attacked("tab_fashion", "fashion_mnist"),
    "tab_mnist": _attacked("tab_mnist", "mnist"),
    "tab_cifar": _attacked("tab_cifar", "cifar10"),
    "tab_bounds_fashion": _certified("tab_bounds_fashion", "fashion_mnist"),
    "tab_bounds_mnist": _certified("tab_bounds_mnist", "mnist"),
    "tab_bounds_cifar": _certified("tab_bounds_cifar", "cifar10"),
    "tab_cnn_fashion": _attacked("tab_cnn_fashion", "fashion_mnist", cnn=True),
    "tab_cnn_mnist": _attacked("tab_cnn_mnist", "mnist", cnn=True),
    "tab_cnn_cifar": _attacked("tab_cnn_cifar", "cifar10", cnn=True),
    "large_radii": _large_radii,
    "trials": _trials,
    "summary": _summary,
}
