"""What every `Arch` must satisfy. Each broken rule is told by the run file's key, with values that work."""

from __future__ import annotations

from meshwright.arch.arch import Arch, Experts, Rope, RopeScaling
from meshwright.config.divisors import nearest_divisors
from meshwright.config.errors import RequestError

_POSITIVE = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")
_MOST_LAYERS = 1 << 16  # each is an object of its own


def check_arch(arch: Arch) -> None:
    """Raise RequestError for the first rule that `arch` breaks."""
    for name in _POSITIVE:
        value: object = getattr(arch, name)
        if not isinstance(value, int) or value < 1:  # a foreign config.json may hold anything
            raise RequestError(f"model.{name} = {value}", "must be at least 1")
    check_layers(arch.layers)
    if arch.heads % arch.kv_heads:
        raise RequestError(
            f"model.kv_heads = {arch.kv_heads} with model.heads = {arch.heads}",
            "kv_heads must divide heads",
            nearest_divisors(arch.heads, arch.kv_heads),
        )
    if arch.norm_eps < 0:
        raise RequestError(f"model.norm_eps = {arch.norm_eps}", "must not be negative")
    if not 0 <= arch.dropout < 1:
        raise RequestError(f"model.dropout = {arch.dropout}", "must be at least 0 and below 1")
    _check_positions(arch)
    if arch.experts is not None:
        _check_experts(arch, arch.experts)


def check_layers(layers: int) -> None:
    """Raise RequestError where nobody would build an object for each of so many."""
    if layers > _MOST_LAYERS:
        raise RequestError(f"model.layers = {layers}", f"must be at most {_MOST_LAYERS}", (_MOST_LAYERS,))


def _check_positions(arch: Arch) -> None:
    if arch.rope is None and not arch.alibi and arch.max_positions < 1:
        raise RequestError(f'model.family = "{arch.family}"', "learned positions need model.max_positions as well")
    if arch.rope is not None:
        _check_rope(arch, arch.rope)
    if arch.sliding_window < 0:
        raise RequestError(f"model.sliding_window = {arch.sliding_window}", "must be 0 (none) or positive")
    if any(not 0 <= layer < arch.layers for layer in arch.windowed_layers):
        raise RequestError(f"windowed layers {arch.windowed_layers}", f"must be layers 0 to {arch.layers - 1}")


def _check_rope(arch: Arch, rope: Rope) -> None:
    rotated = arch.latent.rope_dim if arch.latent else arch.head_dim
    if rotated % 2:
        raise RequestError(
            f"model.head_dim = {rotated}", "rotary positions turn pairs: it must be even", (rotated + 1, rotated - 1)
        )
    if rope.theta <= 0:
        raise RequestError(f"model.rope_theta = {rope.theta}", "must be positive")
    if rope.scaling is RopeScaling.NONE:
        return
    if rope.factor < 1:
        raise RequestError(f"model.rope_scaling.factor = {rope.factor}", "stretches positions: it must be at least 1")
    if rope.scaling is not RopeScaling.LINEAR and rope.original_positions < 1:
        raise RequestError(
            f'model.rope_scaling.kind = "{rope.scaling}"', "needs model.rope_scaling.original_max_positions as well"
        )
    if rope.scaling is RopeScaling.LLAMA3 and rope.high <= rope.low:
        raise RequestError(
            f"model.rope_scaling.high_frequency_factor = {rope.high}",
            f"must be above low_frequency_factor = {rope.low}",
        )
    if rope.scaling is RopeScaling.YARN and rope.beta_fast <= rope.beta_slow:
        raise RequestError(f"model.rope_scaling.beta_fast = {rope.beta_fast}", f"must be above {rope.beta_slow}")


def _check_experts(arch: Arch, experts: Experts) -> None:
    if not 1 <= experts.active <= experts.count:
        raise RequestError(
            f"model.experts_per_token = {experts.active}",
            f"must be between 1 and model.experts = {experts.count}",
        )
    if experts.ffn < 1:
        raise RequestError(f"model.expert_ffn = {experts.ffn}", "must be at least 1")
    if experts.shared < 0:
        raise RequestError(f"model.shared_experts = {experts.shared}", "must not be negative")
    if not 0 <= experts.dense_layers <= arch.layers:
        raise RequestError(f"model.dense_layers = {experts.dense_layers}", f"must be between 0 and {arch.layers}")
