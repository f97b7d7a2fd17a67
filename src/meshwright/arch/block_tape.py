"""A block as a tape: every tensor of its forward and of its backward, in the order in which they come and go.

What a forward leaves is what `activations.kept_bytes` names, and a backward gives each of these back once: which moment
is the fullest need not be guessed. Read off the allocator's events of dry runs, and held against them
(tests/prove/test_memory_cover.py).

    part     the stream of the tokens that a rank holds of it: under sequence parallel its share
    whole    the stream of all tokens
    rows     the stream, a row for every expert that a token chose; here: those that the experts of this rank get
    wide     one factor of a feed-forward
    query    queries, heads' outputs or their gradients; key: keys or values
    raised   a copy in float32, with which lower precisions compute; nothing where they need none
"""

from __future__ import annotations

from meshwright.arch.activations import Crossing, Role, Setting, kept_bytes
from meshwright.arch.arch import Arch, Norm
from meshwright.arch.crossing import CoreTape
from meshwright.arch.tape import Tape
from meshwright.config.choices import Dtype

__all__ = ["BlockTape"]


class BlockTape:
    """What the two passes of a block have in common; `arch` is narrowed to a tensor rank."""

    def __init__(self, arch: Arch, unit: int, setting: Setting, compute: Dtype) -> None:
        width, raised = compute.num_bytes, Role.UPCAST.num_bytes(compute)
        self._arch, self._setting = arch, setting
        self._tape, self._kept = Tape(), kept_bytes(arch, unit, setting, compute)
        self._experts = arch.experts if arch.is_routed(unit - 1) else None
        self._selective = setting.selective and self._experts is None  # the feed-forward
        self._remakes_core = setting.selective and setting.crossing is None

        elements = setting.tokens * arch.hidden
        self._elements = share = elements // setting.ways if setting.gathers else elements
        self._whole, self._raised_whole = elements * width, elements * raised
        self._part, self._raised = share * width, share * raised if arch.norm is Norm.RMS else 0
        self._arriving = self._part * (setting.ways - 1) if setting.gathers and setting.direct else 0

        of_query, of_key = (setting.tokens * heads * arch.head_dim for heads in (arch.heads, arch.kv_heads))
        self._query, self._raised_query = of_query * width, of_query * raised
        self._key, self._raised_key = of_key * width, of_key * raised
        self._scores = setting.tokens * arch.heads * Role.PRECISE.num_bytes(compute)
        alike = setting.sequences if setting.masked else 1
        self._table = alike * setting.sequence * arch.head_dim * Role.PRECISE.num_bytes(compute)
        windowed = 0 < arch.window(unit - 1) < setting.whole
        self._mask = alike * setting.queries**2 * width if setting.masked or windowed else 0
        self._tiles = _tiles(setting, compute)
        self._core = self._crossing(setting.crossing) if setting.crossing else None

        active = self._experts.active if self._experts else 1
        self._ffn = self._experts.ffn if self._experts else arch.ffn
        here = setting.tokens if self._experts is None else setting.expert_rows(self._experts)
        self._rows, self._wide = elements * active * width, here * self._ffn * width
        self._here = here * arch.hidden * width
        self._travels = setting.arriving is not None
        self._chances = setting.tokens * self._experts.count * Role.PRECISE.num_bytes(compute) if self._experts else 0
        self._beside = setting.tokens * self._experts.shared * self._ffn * width if self._experts else 0

    def _crossing(self, crossing: Crossing) -> CoreTape:
        setting, met = self._setting, self._key * crossing.met_heads(self._arch.kv_heads) // self._arch.kv_heads
        return CoreTape(
            self._tape, crossing, self._query, self._key, met, self._raised_query, self._scores, self._mask,
            setting.sequences > 1, setting.direct, self._tiles,
        )  # fmt: skip

    @property
    def left(self) -> int:
        """Bytes that are there at the end beyond those of the start."""
        return self._tape.live

    def _turn(self) -> int:
        """Norms of heads, then rotation; bytes of what attention reads in place of the products."""
        tape, arch = self._tape, self._arch
        if arch.qk_norm:
            tape.come(self._sizes("attention.query_norm.scale", "attention.key_norm.scale"))
            for raised, size in ((self._raised_query, self._query), (self._raised_key, self._key)):
                tape.come(raised, size)
                tape.go(raised)
        if arch.rope is not None:
            self._rotate()
            if arch.qk_norm:
                tape.go(self._query, self._key)
        return self._query + self._key if arch.qk_norm or arch.rope is not None else 0

    def _rotate(self) -> None:
        """Queries and keys, or their gradients, beside what they were."""
        self._tape.come(self._table)
        for raised, size in ((self._raised_query, self._query), (self._raised_key, self._key)):
            self._tape.come(2 * raised, size)
            self._tape.go(2 * raised)
        self._tape.go(self._table)

    def _travel(self, leaving: int, arriving: int) -> None:
        """Rows to the ranks of their experts, or back: at one end they are put in order by a copy."""
        if self._travels:
            self._tape.come(arriving, self._here)
            self._tape.go(leaving, self._here)

    def _sizes(self, *names: str) -> int:
        return sum(
            size
            for kept, size in self._kept.items()
            if any(kept == name or (name[-1] == "." and kept.startswith(name)) for name in names)
        )


def _tiles(setting: Setting, compute: Dtype) -> int:
    """Scores and their gradients that torch's kernel for CPUs has at a time in every thread, 32 to 256 queries by 512
    keys, and in lower precisions a copy of both in the compute dtype (aten/native/cpu/FlashAttentionKernel.cpp)."""
    length = setting.queries
    queries = 256 if length >= 768 else 64 if length >= 192 else 32
    tile = min(queries, length) * min(512, length)
    copy = compute.num_bytes if compute.num_bytes < 4 else 0
    return setting.threads * 2 * tile * (Role.PRECISE.num_bytes(compute) + copy)
