"""Models people plan for, by name: the shapes in catalogue.toml, each with its source."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from meshwright.arch.arch import Arch, Latent
from meshwright.arch.families import arch_from_fields, family_template
from meshwright.config.errors import RequestError


@dataclass(frozen=True, slots=True)
class Published:
    """A published model: its shape, where the sizes come from, and the parameter counts its authors state."""

    name: str
    arch: Arch
    source: str
    parameters: str = ""  # "7.24B": as stated, digits and all; "" where nothing is stated
    active_parameters: str = ""  # of one token, for models with experts


@cache
def catalogue() -> Mapping[str, Published]:
    """Every model known by name, in the order of the file."""
    text = files("meshwright.arch").joinpath("catalogue.toml").read_text(encoding="utf-8")
    return MappingProxyType({name: _published(name, entry) for name, entry in tomllib.loads(text).items()})


def preset(name: str) -> Arch:
    """The shape called `name`.

    Raises RequestError for an unknown name, with the nearest ones.
    """
    known = catalogue()
    if name not in known:
        near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5) or list(known)
        raise RequestError(f'model.preset = "{name}"', "is not in the catalogue", near)
    return known[name].arch


def _published(name: str, entry: Mapping[str, Any]) -> Published:
    fields = dict(entry)
    source = fields.pop("source")
    parameters, active = fields.pop("published", ""), fields.pop("active", "")
    template = family_template(fields.pop("family"))
    if "latent" in fields:
        fields["latent"] = Latent(**fields["latent"])
    return Published(name, arch_from_fields(template, fields), source, parameters, active)
