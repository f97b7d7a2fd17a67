"""The [model] table of a run file as an `Arch`."""

from __future__ import annotations

import dataclasses
from typing import Any

from meshwright.arch.arch import Arch
from meshwright.arch.catalogue import preset
from meshwright.arch.families import MODEL_FIELDS, arch_from_fields, family_template
from meshwright.arch.huggingface import arch_from_hf, read_hf_config
from meshwright.arch.parameters import tensors
from meshwright.config.errors import RequestError


def arch_from_model(model: Any) -> Arch:
    """The decoder that `model` asks for: an object with the attributes of the [model] table, None where unset.

    A preset or a Hugging Face configuration is the base; other fields given replace its own. With weights = "load"
    the shape is the weights', so no field may change a tensor. Raises RequestError.
    """
    base, origin = _base(model)
    fields = {name: getattr(model, name, None) for name in MODEL_FIELDS}
    if model.family is not None and model.family != base.family:
        raise RequestError(f'model.family = "{model.family}"', f'contradicts {origin}, a "{base.family}"')
    arch = arch_from_fields(base, fields)
    if str(model.weights) == "load":
        _check_loadable(base, arch, fields)
    return arch


def _base(model: Any) -> tuple[Arch, str]:
    if model.hf is not None:
        return arch_from_hf(read_hf_config(model.hf)), f'model.hf = "{model.hf}"'
    if model.preset is not None:
        return preset(model.preset), f'model.preset = "{model.preset}"'
    if model.family is not None:
        return family_template(model.family), f'model.family = "{model.family}"'
    raise RequestError("model", "needs one of preset, hf and family", ('model.preset = "demo"',))


def _check_loadable(base: Arch, arch: Arch, fields: dict[str, Any]) -> None:
    """Fields that say how tensors are used may differ from the weights' configuration; the tensors may not."""
    before = [(tensor.name, tensor.shape) for tensor in tensors(base)]
    if before != [(tensor.name, tensor.shape) for tensor in tensors(arch)]:
        changed = [
            f"model.{name}" for name, value in fields.items() if value is not None and _differs(base, name, value)
        ]
        raise RequestError('model.weights = "load"', f"has no room for {', '.join(changed)}: the shape is the weights'")


def _differs(base: Arch, name: str, value: Any) -> bool:
    known = {field.name for field in dataclasses.fields(Arch)}
    return name not in known or getattr(base, name) != value
