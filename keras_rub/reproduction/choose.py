"""Which network a cell of a table takes.

Nothing here sees test samples. Under attack a cell takes the network that is
best on validation samples; a certified cell takes a network by its training
radius alone.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

from keras_rub.reproduction.plans import ProtocolPlan
from keras_rub.reproduction.run.images import Case, accuracy
from keras_rub.reproduction.run.networks import Network
from keras_rub.reproduction.run.protocol import Candidate

Cells = dict[tuple[Any, str, float], Network]
SearchedCells = dict[tuple[Any, float], Candidate]
Chosen = TypeVar("Chosen", bound=Hashable)


def table_network(
    networks: list[dict[str, Any]], key: str, place: int | None
) -> dict[str, Any]:
    """The best of some networks on the validation samples of a UCI set.

    Args:
        networks: of one defence, as of `run.tables.run`.
        key: `"clean"`, or an attack and its norm such as `"pgd-inf"`.
        place: which size of the attack; `None` with `"clean"`.
    """

    def worth(network):
        found = network["validation"]
        value = found[key] if place is None else found[key][place]
        return value, found["clean"]  # which decides a tie

    return max(networks, key=worth)


def by_defence(networks: list[Network]) -> dict[str, list[Network]]:
    """The networks of each defence."""
    return _groups(networks, "title")


def certified_cases(networks: list[Network], radii: list[float]) -> list[Case]:
    """The network of each radius, for each kind of networks.

    Args:
        networks: those that may be taken.
        radii: of the table.

    Returns:
        Pairs of a network and a radius.
    """
    return [
        (network_for(group, rho), rho)
        for group in _groups(networks, "kind").values()
        for rho in radii
    ]


def _groups(networks, attribute) -> dict[Any, list[Network]]:
    groups: dict[Any, list[Network]] = {}
    for network in networks:
        groups.setdefault(getattr(network, attribute), []).append(network)
    return groups


def rivals(networks: list[Network]) -> list[Network]:
    """Those that are not the only one of their defence."""
    groups = by_defence(networks).values()
    return [network for group in groups if len(group) > 1 for network in group]


def attacked_cells(
    networks: list[Network],
    radii: dict[Any, list[float]],
    validation: dict[Network, dict[str, Any]],
    attack: str,
) -> Cells:
    """The network of each norm, defence and radius.

    Args:
        networks: those that are trained.
        radii: from the norm to the radii; 0 is added.
        validation: results of `run.images.attack` on validation samples, of
            `rivals` at least as far as they are there.
        attack: which accuracy of the results counts.

    Returns:
        From (norm, defence, rho) to the best network; without a result of any
        rival there is no cell.
    """

    def best(able, norm, rho):
        if len(able) == 1:
            return able[0]
        return max(
            able, key=lambda n: accuracy(validation[n], norm, rho, attack)
        )

    groups = {
        defence: [n for n in group if n in validation or len(group) == 1]
        for defence, group in by_defence(networks).items()
    }
    return {
        (norm, defence, rho): best(able, norm, rho)
        for norm in radii
        for defence, able in groups.items()
        if able
        for rho in (0.0, *radii[norm])
    }


def again(cells: Cells, seed: int) -> Cells:
    """The same cells by networks of another seed, those of most cells first.

    So an early end loses as few cells as it can.
    """
    counts = collections.Counter(cells.values())
    order = sorted(cells, key=lambda cell: -counts[cells[cell]])
    return {
        cell: dataclasses.replace(
            cells[cell],
            recipe=dataclasses.replace(cells[cell].recipe, seed=seed),
        )
        for cell in order
    }


def places(cells: Cells) -> dict[Network, dict[Any, list[float]]]:
    """The radii at which each network is to be attacked on test samples."""
    found: dict[Network, dict[Any, list[float]]] = {}
    for (norm, _, rho), network in cells.items():
        radii = found.setdefault(network, {})
        if rho:
            radii.setdefault(norm, []).append(rho)
    for network, radii in found.items():
        if not radii:  # chosen without an attack only: any one will do
            norm, _, rho = next(key for key in cells if key[2])
            found[network] = {norm: [rho]}
    return found


def network_for(networks: list[Network], rho: float) -> Network:
    """The one trained for the smallest radius that is not below rho."""
    networks = sorted(networks, key=lambda network: network.recipe.rho)
    able = [network for network in networks if network.recipe.rho >= rho]
    return able[0] if able else networks[-1]


def searched_cells(
    plan: ProtocolPlan, validation: dict[Candidate, dict[str, Any]]
) -> SearchedCells:
    """The network that the paper's search takes for each cell.

    Args:
        plan: `ProtocolPlan`.
        validation: of `run.protocol.search`.

    Returns:
        From (norm, rho) to the network of any defence with the best attacked
        accuracy; the clean accuracy decides a tie.
    """

    def best(norm, place):
        def worth(candidate):
            found = validation[candidate]
            return found[str(norm)][place], found["clean"]

        return max(validation, key=worth)

    return {
        (norm, rho): best(norm, place)
        for norm, radii in plan.radii.items()
        for place, rho in enumerate(radii)
        if validation
    }


def strongest_cells(
    radii: dict[Any, tuple[float, ...]],
    validation: dict[Network, list[dict[str, Any]]],
) -> dict[tuple[Any, float, int], Network]:
    """The network of each norm, radius and seed that any attack breaks least.

    Args:
        radii: from the norm to the radii.
        validation: of `run.protocol.validate`.
    """

    def best(norm, rho, seed):
        return max(
            (network for network in validation if network.recipe.seed == seed),
            key=lambda network: accuracy(
                {"rows": validation[network]}, norm, rho, "worst"
            ),
        )

    return {
        (norm, rho, seed): best(norm, rho, seed)
        for norm, values in radii.items()
        for rho in values
        for seed in sorted({network.recipe.seed for network in validation})
    }


def radii_of(
    cells: Mapping[tuple[Any, ...], Chosen],
) -> dict[Chosen, dict[Any, list[float]]]:
    """The radii that each network was chosen for.

    Args:
        cells: from the norm, the radius, and what else there is, to a network.
    """
    found: dict[Chosen, dict[Any, list[float]]] = {}
    for (norm, rho, *_), network in cells.items():
        found.setdefault(network, {}).setdefault(norm, []).append(rho)
    return found
