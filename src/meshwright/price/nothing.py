"""What to say where a search finds nothing: the rules that stand in the way, and changed requests that were tried.

nothing legal     one given key changed, the batch, the number of devices: each only where it has a legal layout;
                  where none has, the same without the degrees that were given
nothing fits      twice the devices and so on, up to where the most frugal layout does
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from meshwright.config.choices import Context, Offload, Schedule
from meshwright.config.counted import counted
from meshwright.config.errors import RequestError
from meshwright.price import legal
from meshwright.price.candidates import Group, first_legal, groups_of, has_legal, least_bytes
from meshwright.price.legal import Refusal, Space
from meshwright.price.text import bytes_text

__all__ = ["nothing_fits", "nothing_legal"]

_TRIES = 40  # changed requests that are looked at for one proposal
_MOST_DEVICES = 65_536
_DOUBLINGS = 12


def nothing_legal(space: Space, refused: Sequence[Refusal], suggest: bool = True) -> RequestError:
    """The error of a search without a legal layout. Without `suggest` nothing is proposed."""
    rules: dict[str, int] = {}
    for each in refused:
        rules[each.rule] = rules.get(each.rule, 0) + 1
    most = sorted(rules.items(), key=lambda item: -item[1])[:3]
    told = "; ".join(f"{rule} ({counted(count, 'mesh')})" for rule, count in most)
    if not rules:
        given = [f"{key} = {value}" for key, value in space.fixed.items() if key.startswith("mesh.")]
        told = f"no mesh of so many devices has {' and '.join(given) or 'the keys given'}"
        if space.target.arch.experts is None and space.fixed.get("mesh.ep", 1) > 1:
            told = f"mesh.ep = {space.fixed['mesh.ep']}, but the model has no experts"
    proposals = (list(_changed_requests(space)) or list(_other_meshes(space))) if suggest else []
    return RequestError(f"--gpus {space.gpus}", f"has no legal layout: {told}", proposals[:4])


def _changed_requests(space: Space) -> Iterator[str]:
    """Requests with one thing changed that have a legal layout, as words."""
    for key in space.fixed:
        for words, fixed in _other_values(space, key):
            if has_legal(replace(space, fixed=fixed)):
                yield words
                break
    for batch in _other_batches(space):
        if has_legal(replace(space, sequences=batch)):
            yield f"batch.global={batch}"
            break
    for gpus in _other_devices(space):
        if has_legal(replace(space, gpus=gpus)):
            yield f"--gpus {gpus}"
            break


def _other_meshes(space: Space) -> Iterator[str]:
    """Meshes in place of all degrees that were given, as words: as things are, else with another batch, and on other
    devices."""
    degrees = {f"mesh.{name}" for name in legal.AXES}
    if degrees.isdisjoint(space.fixed):
        return
    free = replace(space, fixed={key: value for key, value in space.fixed.items() if key not in degrees})

    def mesh_words(there: Space) -> str:
        sizes = zip(legal.AXES, first_legal(there) or (), strict=False)
        return " ".join(f"mesh.{name}={size}" for name, size in sizes if size > 1 or f"mesh.{name}" in space.fixed)

    if words := mesh_words(free):
        yield words
        return
    others = (
        [(f"batch.global={batch}", replace(free, sequences=batch)) for batch in _other_batches(free)],
        [(f"--gpus {gpus}", replace(free, gpus=gpus)) for gpus in _other_devices(free)],
    )
    for some in others:
        found = ((before, mesh_words(there)) for before, there in some)
        yield from islice((f"{before} {words}" for before, words in found if words), 1)


def _other_batches(space: Space) -> list[int]:
    """Global batches above the one asked for that ranks of a mesh may share, the least first."""
    batches = sorted({-(-space.sequences // size) * size for size in legal.divisors(space.gpus)})
    return [batch for batch in batches[:_TRIES] if batch != space.sequences]


def _other_values(space: Space, key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Values that a given key might have instead, the nearest first: as words, and with the keys that stay."""
    given = space.fixed[key]
    values: Sequence[Any] = ()
    if key.startswith("mesh.") and key != "mesh.order":
        values = sorted(legal.divisors(space.gpus), key=lambda size: abs(math.log(size / given)))
    elif key == "batch.micro":
        values = sorted(legal.divisors(space.sequences), key=lambda size: abs(math.log(size / given)))
    elif key == "parallel.context":
        values = [each.value for each in Context]
    elif key in ("parallel.zero", "parallel.zero_shard_within"):
        values = (3, 0) if key == "parallel.zero" else (0,)
    elif key == "parallel.sequence":
        values = (not given,)
    elif key == "parallel.schedule":
        chunks = {"parallel.chunks": 1} if "parallel.chunks" in space.fixed else {}
        other = {key: Schedule.ONE_F_ONE_B.value, **chunks}
        yield " ".join(f"{name}={value}" for name, value in other.items()), {**space.fixed, **other}
    elif key in ("parallel.stages", "parallel.offload"):
        rest = {name: value for name, value in space.fixed.items() if name != key}
        yield f'{key}="{"balanced" if key == "parallel.stages" else "none"}"', rest
    for value in values[:_TRIES]:
        if value != given:
            yield f"{key}={str(value).lower()}", {**space.fixed, key: value}


def _other_devices(space: Space) -> list[int]:
    """Numbers of devices near the one asked for that may have a legal layout, the nearest first."""
    given = math.prod(space.fixed.get(f"mesh.{name}", 1) for name in legal.AXES)
    near = {space.gpus // given * given + step * given for step in range(-_TRIES // 2, _TRIES // 2)}
    near |= {size for size in legal.divisors(space.gpus) if space.sequences % size == 0}
    return sorted((size for size in near if size > 0 and size != space.gpus), key=lambda size: abs(size - space.gpus))


def nothing_fits(
    space: Space, groups: Sequence[Group], fits: Callable[[int, Mapping[str, Any]], bool] | None = None
) -> RequestError:
    """The error of a search none of whose layouts fits. `fits`: whether a search for so many devices, with keys that
    stay, finds one; without it nothing is proposed."""
    least = min(least_bytes(space, group, tuple(Offload)) for group in groups)
    device = space.target.cluster.device
    rule = f"no legal layout fits in {bytes_text(device.memory_bytes)}: the least needs {bytes_text(least)}"
    if fits is None:
        return RequestError(f"{space.gpus} x {device.name}", rule)
    nearby = [f"--gpus {gpus}" for gpus in _more_devices(space, fits)]
    micro = "batch.micro, " if space.fixed.get("batch.micro", 1) > 1 else ""  # else the search tried 1
    smaller = f"a smaller {micro}data.sequence_length or model"
    return RequestError(f"{space.gpus} x {device.name}", rule, (*nearby, smaller))


def _more_devices(space: Space, fits: Callable[[int, Mapping[str, Any]], bool]) -> Iterator[int]:
    """The first doubling of the devices with a layout that fits, if there is one: of the most frugal layouts."""
    frugal = {"parallel.zero": 3, "parallel.recompute": "full", "batch.micro": 1} | dict(space.fixed)
    for doubling in range(1, _DOUBLINGS):
        gpus = space.gpus << doubling
        if gpus > _MOST_DEVICES:
            return
        there = replace(space, gpus=gpus, fixed=frugal)
        groups, _, _ = groups_of(there)
        least = min((least_bytes(there, group, tuple(Offload)) for group in groups), default=math.inf)
        if least <= space.target.cluster.device.memory_bytes and fits(gpus, frugal):
            yield gpus
            return
