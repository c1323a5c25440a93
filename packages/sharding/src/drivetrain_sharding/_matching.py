"""Which tensor of one layout is which of another, and everything that makes them no match."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from drivetrain_sharding.layout import Layout, TensorSpec


class Match(NamedTuple):
    """One whole tensor, as both layouts have it."""

    source: TensorSpec
    target: TensorSpec


def match(source: Layout, target: Layout) -> tuple[list[Match], list[str]]:
    """The tensors that both have in one shape, in the target's order, and what is wrong with the others."""
    (given, given_ties), (wanted, wanted_ties) = _named(source), _named(target)
    problems: list[str] = []
    for side, names, ties, others in (("source", given, given_ties, wanted), ("target", wanted, wanted_ties, given)):
        for name in names:
            if name not in others:
                tied = f" (tied to {_others(name, ties)})" if len(ties[name]) > 1 else ""
                problems.append(f"only the {side} has {name}{tied}")
    matched: list[Match] = []
    for name in wanted:
        if name not in given:
            continue
        if given_ties[name] != wanted_ties[name]:
            mine, theirs = _others(name, given_ties), _others(name, wanted_ties)
            problems.append(f"{name} is tied to {mine} in the source, to {theirs} in the target")
        if name != wanted[name].name:
            continue
        pair = Match(given[name], wanted[name])
        problems += _differences(pair)
        if pair.source.shape == pair.target.shape:
            matched.append(pair)
    return matched, problems


def count_ranks(layout: Layout, places: tuple[str, ...] | None, side: str) -> Iterator[str]:
    """What is wrong with the number of places."""
    if places is not None and len(places) != layout.mesh.size:
        yield f"the {side}'s mesh has {layout.mesh.size} ranks, places names {len(places)}"


def _named(layout: Layout) -> tuple[dict[str, TensorSpec], dict[str, frozenset[str]]]:
    """All names a layout has, ties included: by name the tensor, and by name all names of the tensor."""
    specs = {spec.name: spec for spec in layout.tensors}
    groups = {name: {name} for name in specs}
    for other, name in layout.ties.items():
        groups[name].add(other)
    named = specs | {other: specs[name] for other, name in layout.ties.items()}
    return named, {name: frozenset(groups[spec.name]) for name, spec in named.items()}


def _others(name: str, ties: dict[str, frozenset[str]]) -> str:
    return " and ".join(sorted(ties[name] - {name})) or "none"


def _differences(pair: Match) -> Iterator[str]:
    name = pair.target.name
    if pair.source.shape != pair.target.shape:
        yield f"{name} has shape {pair.source.shape} in the source, {pair.target.shape} in the target"
    floating = pair.source.dtype.is_floating_point and pair.target.dtype.is_floating_point
    if pair.source.dtype != pair.target.dtype and not floating:
        yield f"{name} is {pair.source.dtype} in the source, {pair.target.dtype} in the target: no float cast"
