"""Families: what each architecture fixes, as an `Arch` without sizes, and an `Arch` from the fields of a model.

A family is a template: `replace(template, sizes)` is a model. Catalogue, run file and foreign configurations all go
through `arch_from_fields`, so a model means the same wherever it is written down.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from meshwright.arch.arch import Activation, Arch, Experts, Latent, Norm, Rope, RopeScaling
from meshwright.arch.checks import check_arch
from meshwright.config.choices import Family
from meshwright.config.errors import RequestError


def _template(family: Family, **rules: Any) -> Arch:
    return Arch(family.value, layers=0, hidden=0, heads=0, kv_heads=0, head_dim=0, ffn=0, vocab=0, **rules)


_GPT: dict[str, Any] = {
    "norm": Norm.LAYER,
    "activation": Activation.GELU_TANH,
    "gated": False,
    "rope": None,
    "qkv_bias": True,
    "output_bias": True,
    "mlp_bias": True,
    "tie_embeddings": True,
}
_LONG = Rope(theta=1_000_000.0)
_ROUTED = Experts(count=0, active=0, ffn=0)

FAMILIES: Mapping[Family, Arch] = {
    Family(template.family): template
    for template in (
        _template(Family.LLAMA),  # arXiv:2302.13971, section 2.2
        _template(Family.MISTRAL, sliding_window=4096),  # arXiv:2310.06825, section 2
        _template(Family.QWEN2, rope=_LONG, qkv_bias=True, norm_eps=1e-6),  # arXiv:2407.10671, section 2.2
        _template(Family.QWEN3, rope=_LONG, qk_norm=True, norm_eps=1e-6),  # arXiv:2505.09388, section 2
        _template(Family.GPT2, **_GPT),  # Radford et al. 2019
        _template(Family.BLOOM, **_GPT, alibi=True, embedding_norm=True),  # arXiv:2211.05100, section 3.2
        _template(Family.MIXTRAL, rope=_LONG, experts=_ROUTED),  # arXiv:2401.04088, section 2
        _template(Family.QWEN3_MOE, rope=_LONG, qk_norm=True, norm_eps=1e-6, experts=_ROUTED),
        _template(Family.DEEPSEEK_V3, norm_eps=1e-6, experts=_ROUTED),  # arXiv:2412.19437, section 2.1
    )
}

SHAPES: Mapping[Family, str] = {
    Family.BLOOM: "linear position biases (ALiBi) are not built",
    Family.DEEPSEEK_V3: "latent attention and group-limited routing are not built",
}
"""Families that can be priced but not run, and why."""

_SIZES = ("layers", "hidden", "heads", "ffn", "vocab")
_PLAIN = (
    *_SIZES,
    "kv_heads",
    "head_dim",
    "norm_eps",
    "max_positions",
    "sliding_window",
    "qkv_bias",
    "qk_norm",
    "tie_embeddings",
    "dropout",
)
_EXPERT_FIELDS = {
    "experts": "count",
    "experts_per_token": "active",
    "expert_ffn": "ffn",
    "shared_experts": "shared",
    "dense_layers": "dense_layers",
}
MODEL_FIELDS = (*_PLAIN, *_EXPERT_FIELDS, "rope_theta", "rope_scaling")
"""The fields that `arch_from_fields` reads, as the run file's [model] table names them (and `latent`, in shapes)."""

_ROPE_FIELDS = {
    "kind": "scaling",
    "factor": "factor",
    "original_max_positions": "original_positions",
    "low_frequency_factor": "low",
    "high_frequency_factor": "high",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}


def family_template(name: str) -> Arch:
    """The template of the family called `name`.

    Raises RequestError for an unknown one, naming the nearest.
    """
    if name not in FAMILIES:
        near = difflib.get_close_matches(name, FAMILIES, n=3) or list(FAMILIES)
        raise RequestError(f'model.family = "{name}"', "is not a family known here", near)
    return FAMILIES[Family(name)]


def check_runs(arch: Arch) -> None:
    """Raise RequestError if `arch` can be priced but not run."""
    if arch.family in SHAPES:
        runnable = [family for family in FAMILIES if family not in SHAPES]
        raise RequestError(
            f'model.family = "{arch.family}"', f"can be priced, not run: {SHAPES[Family(arch.family)]}", runnable
        )


def arch_from_fields(base: Arch, fields: Mapping[str, Any]) -> Arch:
    """`base` (a family's template or a whole model) with `fields`, named as in the run file's [model] table.

    Sizes that follow from others keep following: head_dim is hidden / heads and kv_heads is heads unless the base or
    the fields say otherwise. Raises RequestError for a missing or impossible field.
    """
    given = {key: value for key, value in fields.items() if value is not None}
    plain = {key: given[key] for key in _PLAIN if key in given}
    experts = _experts(base, given)
    if experts is not None and not base.ffn and "ffn" not in plain:
        plain["ffn"] = experts.ffn  # no dense block, or one as wide as an expert
    changed = dataclasses.replace(base, **plain, experts=experts, latent=given.get("latent", base.latent))
    missing = [f"model.{key}" for key in _SIZES if not getattr(changed, key)]
    if missing:
        raise RequestError(f'model.family = "{base.family}"', f"needs {', '.join(missing)} as well")
    changed = dataclasses.replace(changed, **_derived(base, changed, given))
    changed = dataclasses.replace(changed, rope=_rope(changed, given))
    if "sliding_window" in given:
        changed = dataclasses.replace(changed, windowed_layers=())
    check_arch(changed)
    return changed


def _derived(base: Arch, changed: Arch, given: Mapping[str, Any]) -> dict[str, Any]:
    """kv_heads and head_dim where they follow from other sizes."""
    derived: dict[str, Any] = {}
    if "kv_heads" not in given and base.kv_heads == base.heads:
        derived["kv_heads"] = changed.heads
    follows = base.head_dim * base.heads == base.hidden
    if isinstance(changed.latent, Latent):
        derived["head_dim"] = changed.latent.content_dim + changed.latent.rope_dim
    elif "head_dim" not in given and follows:
        if changed.hidden % changed.heads:
            raise RequestError(
                f"model.hidden = {changed.hidden} with model.heads = {changed.heads}",
                "heads must divide hidden where model.head_dim is not given",
                (f"model.head_dim = {max(2, changed.hidden // changed.heads // 2 * 2)}",),
            )
        derived["head_dim"] = changed.hidden // changed.heads
    return derived


def _experts(base: Arch, given: Mapping[str, Any]) -> Experts | None:
    values = {field: given[key] for key, field in _EXPERT_FIELDS.items() if key in given}
    if base.experts is None:
        if any(values.values()):
            routed = [family for family, template in FAMILIES.items() if template.experts is not None]
            key = next(key for key in _EXPERT_FIELDS if given.get(key))
            raise RequestError(f"model.{key} = {given[key]}", f'family "{base.family}" has no experts', routed)
        return None
    experts = dataclasses.replace(base.experts, **values)
    if not experts.ffn:
        experts = dataclasses.replace(experts, ffn=given.get("ffn", 0))
    names = {field: key for key, field in _EXPERT_FIELDS.items()}
    missing = [f"model.{names[field]}" for field in ("count", "active", "ffn") if not getattr(experts, field)]
    if missing:
        raise RequestError(f'model.family = "{base.family}"', f"needs {', '.join(missing)} as well")
    return experts


def _rope(arch: Arch, given: Mapping[str, Any]) -> Rope | None:
    wanted = [key for key in ("rope_theta", "rope_scaling") if key in given]
    if arch.rope is None:
        if wanted:
            raise RequestError(f"model.{wanted[0]}", f'family "{arch.family}" has no rotary positions')
        return None
    rope = arch.rope
    if "rope_theta" in given:
        rope = dataclasses.replace(rope, theta=float(given["rope_theta"]))
    if "rope_scaling" in given:
        rope = _stretched(rope, given["rope_scaling"], arch.max_positions)
    return rope


def _stretched(rope: Rope, scaling: Any, max_positions: int) -> Rope:
    """`rope` with the [model.rope_scaling] table: a mapping, or an object with its keys as attributes."""
    read = scaling.get if isinstance(scaling, Mapping) else lambda key: getattr(scaling, key)
    values: dict[str, Any] = {field: read(key) for key, field in _ROPE_FIELDS.items() if read(key) is not None}
    values["scaling"] = RopeScaling(str(values["scaling"]))
    if values["scaling"] is not RopeScaling.LINEAR:
        values.setdefault("original_positions", max_positions)
    return Rope(theta=rope.theta, **values)
