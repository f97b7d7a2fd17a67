"""The tape of a block's backward (`block_tape.py`): it gives back once each tensor that the forward kept.

Weight gradients that are added to another dtype are products of their own first. A split backward keeps the factors of
its products for weight work: what is `spent` in others stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from meshwright.arch.activations import Setting
from meshwright.arch.arch import Arch
from meshwright.arch.block_tape import BlockTape
from meshwright.config.choices import Dtype

__all__ = ["BlockBackward", "Moments"]

_READ = ("query", "key", "value", "unrotated", "mask", "log_sum_exp", "core")  # of what the core of attention keeps


@dataclass(frozen=True, slots=True)
class Moments:
    """Bytes beyond graph and cotangent, at their most: before the flat gradient is written first, and after.

    Experts on an axis of their own have another flat gradient than the rest of their block: `between` the first writes
    of the two, of which theirs is the first but where some experts are shared.
    `of_autograd`: what is there after are gradients that autograd made, and each goes when its bucket has taken it.
    """

    before: int
    after: int
    between: int = 0
    of_autograd: bool = False


class BlockBackward(BlockTape):
    """`widened`: weight gradients become another dtype. `split`: they are left to weight work."""

    def __init__(
        self, arch: Arch, unit: int, setting: Setting, compute: Dtype, *, widened: bool = False, split: bool = False
    ) -> None:
        super().__init__(arch, unit, setting, compute)
        self._split = split
        self._of_product = compute.num_bytes if widened and not split else 0

    @property
    def never_given_back(self) -> tuple[str, ...]:
        """Names of what was kept and is not used up."""
        return tuple(self._kept)

    def moments(self) -> Moments:
        """The fullest moments of a backward."""
        arrived = self._arrive("mlp_dropout")
        before, between = (self._feed_back(arrived), 0) if self._experts is None else self._route_back(arrived)
        self._attend_back(self._arrive("attention_dropout"))
        return Moments(before, self._tape.peak, between)

    def _arrive(self, dropout: str) -> int:
        """The cotangent of a branch, and of all tokens; bytes of it beside the stream's own gradient."""
        arrived = 0
        if self._arch.dropout:
            self._tape.come(self._part)
            self._give_back(dropout)
            self._tape.come(self._part)
            self._tape.go(self._part)
            arrived = self._part
        if self._setting.gathers:
            self._tape.come(self._whole)
            arrived = self._whole
        return arrived

    def _used(self, arrived: int, *, is_factor: bool = True) -> None:
        """A branch's cotangent was read: by its last product, of whose weights' gradient it is a factor, or not."""
        if is_factor:
            self._spend(arrived)
        else:
            self._tape.go(arrived)
        if self._arch.dropout and self._setting.gathers:
            self._tape.go(self._part)

    def _feed_back(self, arrived: int) -> int:
        """Of a feed-forward, its norm and the sum with the stream; the most before the flat gradient is written."""
        tape, arch, wide = self._tape, self._arch, self._wide
        factors, rings = 2 if arch.gated else 1, self._setting.rings
        if self._selective:
            tape.come(factors * wide)  # the activation and the product with it, again
        if rings:
            tape.come(wide)  # the gradient of the last product's input, made as its cotangent arrives
        before = tape.begin_anew()
        self._product(arch.hidden * self._ffn)
        if not rings:
            tape.come(wide)
        if self._selective:
            tape.come(factors * wide)
            tape.go(wide)
            if arch.gated:
                tape.come(wide)
                tape.go(2 * wide)  # the activation, and its gradient
            self._give_back("mlp.")
            self._spend(wide)
            self._used(arrived)
        else:
            self._used(arrived)
            self._factors_back("mlp.", wide)
        self._columns_back("mlp_norm.", factors * wide, factors * [arch.hidden * self._ffn])
        self._norm_back("mlp_norm.", factors * wide)
        tape.flash(self._part)
        return before

    def _factors_back(self, path: str, wide: int) -> None:
        """From the gradient of the last product's input to those of the first ones' outputs."""
        tape, gated = self._tape, self._arch.gated
        self._spend_kept(path + ("product" if gated else "activation"))
        tape.come((2 if gated else 1) * wide)
        tape.go(wide)
        if gated:
            self._give_back(path + "activation")
            if self._setting.ways == 1 or self._experts is not None:
                self._give_back(path + "up")  # on a tensor axis a view of one product with the gate, which goes last
            tape.come(wide)
            tape.go(wide)
            self._give_back(path + "gate")
        self._give_back(path + "up")

    def _route_back(self, arrived: int) -> tuple[int, int]:
        """The same of experts, the shared ones first; and the most between the writes of two flat gradients."""
        tape, factors, matrix = self._tape, 2 if self._arch.gated else 1, self._arch.hidden * self._ffn
        before = self._shared_back(matrix, factors)
        tape.come(self._rows)
        self._used(arrived, is_factor=self._beside > 0)
        tape.flash(2 * self._rows)  # weighed and not
        self._give_back("mlp.experts.output", "mlp.router.")
        if self._travels:
            tape.come(self._here)
            tape.go(self._rows)
            tape.flash(self._here)  # in order of the experts
        between = 0
        if not self._beside:
            before = tape.begin_anew()
        elif self._travels:
            between = tape.begin_anew()
        self._product(matrix)
        tape.come(self._wide)
        self._spend(self._here)
        self._factors_back("mlp.experts.", self._wide)
        self._product(matrix)
        tape.come(self._here)
        self._spend(factors * self._wide)
        self._spend_kept("mlp.experts.input")
        if self._travels:
            tape.flash(self._here)
            tape.come(self._rows)
            tape.go(self._here)
        tape.come(self._rows, self._whole)
        tape.go(2 * self._rows)
        if self._beside:
            tape.flash(self._whole)
            tape.go(self._whole)
        between = max(between, self._router_back())
        self._norm_back("mlp_norm.")
        tape.flash(self._part)
        return before, between

    def _shared_back(self, matrix: int, factors: int) -> int:
        """Of shared experts, if there are any; the most before the flat gradient is written."""
        experts, tape = self._experts, self._tape
        if experts is None or not self._beside:
            return 0
        before = tape.begin_anew()
        self._product(matrix * experts.shared)
        tape.come(self._beside)
        self._factors_back("mlp.shared.", self._beside)
        self._product(matrix * experts.shared)
        tape.come(self._whole)
        self._spend(factors * self._beside)
        return before

    def _router_back(self) -> int:
        """The gradient of what was routed, from the router too, to the ranks that hold its tokens; the most before the
        router's is written, if experts have another flat gradient and nothing else of this one was written before."""
        tape, raised, between = self._tape, self._raised_whole, 0
        tape.come(raised, self._chances)
        if self._travels and not self._beside:
            between = tape.begin_anew()
        self._spend(raised, self._chances)
        tape.come(raised, self._whole)
        tape.go(raised)
        if self._beside or not raised:
            self._spend_kept("mlp_norm.output")  # a factor of the shared experts' gradients, or of the router's
        else:
            self._give_back("mlp_norm.output")
        tape.flash(self._whole)
        tape.go(self._whole)
        if self._setting.gathers:
            tape.come(self._part, self._arriving)
            tape.go(self._arriving, self._whole)
        elif self._setting.ways > 1:
            tape.flash(self._whole)
        return between

    def _attend_back(self, arrived: int) -> None:
        """Of attention, its norm and the sum with the stream."""
        tape, arch, rings = self._tape, self._arch, self._setting.rings
        turned = 0
        if self._remakes_core:  # the core again: what it reads, and what it leaves
            turned = self._turn()
            tape.come(self._mask, self._query, self._scores)
        of_query, of_key = (arch.hidden * heads * arch.head_dim for heads in (arch.heads, arch.kv_heads))
        if rings:
            tape.come(self._query)  # the gradient of the heads' outputs
        self._product(of_query)
        if not rings:
            tape.come(self._query)
        if not self._remakes_core:
            self._used(arrived)
        if self._core is None:
            tape.come(self._query, 2 * self._key, self._tiles)
            tape.go(self._tiles)
        else:
            if self._core.crossing.ulysses > 1:
                self._spend_kept("attention.output")  # else attention itself reads what it made
            self._core.backward(partial(self._give_back, *(f"attention.{name}" for name in _READ)))
            self._spend_kept("attention.output")
        if self._remakes_core:
            tape.go(self._mask, self._scores, turned)
        elif self._core is None:
            tape.go(self._query)
            self._give_back(*(f"attention.{name}" for name in _READ))
            self._spend_kept("attention.output")
        views = self._turn_back()
        if self._remakes_core:
            tape.go(self._query)
            self._spend(self._query)
            self._used(arrived)
            self._give_back("attention.")
        self._give_back("attention.unpacked")
        factors = self._query + 2 * self._key + views
        self._columns_back("attention_norm.", factors, [of_query, of_key, of_key])
        self._norm_back("attention_norm.", factors)
        tape.flash(self._part)
        if arrived:
            tape.go(self._part)
        else:
            self._spend(self._part)  # the stream's gradient was the cotangent of the heads' product

    def _turn_back(self) -> int:
        """Bytes of the keys' gradient that stay with the values', of which it is the other half: nobody exchanged
        heads, and it became another."""
        tape, arch = self._tape, self._arch
        halves = self._core is not None and self._core.crossing.ulysses == 1
        views = self._key if halves and (arch.rope is not None or arch.qk_norm) else 0
        if arch.rope is not None:
            self._rotate()
            tape.go(self._query, self._key - views)
        if arch.qk_norm:
            for name, raised, size, stays in (
                ("attention.key_norm.", self._raised_key, self._key, 0 if arch.rope else views),
                ("attention.query_norm.", self._raised_query, self._query, 0),
            ):
                tape.come(3 * raised, size)
                tape.go(3 * raised, size - stays)
                self._give_back(name)
        return views

    def _columns_back(self, norm: str, factors: int, products: list[int]) -> None:
        """The products that read one norm's output: its gradient comes to be, and theirs, `factors`, are used up."""
        tape, setting = self._tape, self._setting
        if self._again(norm):
            tape.come(self._raised, self._part)
            tape.go(self._raised)
        if setting.rings:
            tape.come(3 * self._part)
        elif setting.ways > 1:
            tape.come(self._whole, *([self._part, self._arriving] if setting.gathers else []))
        for elements in products:
            self._product(elements)
        if setting.rings:
            tape.go(2 * self._part)
        elif setting.gathers:
            tape.go(self._arriving, self._whole)
        elif setting.ways == 1:
            tape.come(self._whole)
        if not self._again(norm):
            self._spend(factors)
            self._spend_kept(norm + "output")

    def _norm_back(self, norm: str, factors: int = 0) -> None:
        """The gradient before a norm in place of that after it."""
        self._tape.come(3 * self._raised, self._part)
        self._tape.go(3 * self._raised, self._part)
        self._give_back(norm)
        if self._again(norm):
            self._spend(factors, self._part)

    def _again(self, norm: str) -> bool:
        """Whether a norm's output is made again for its products."""
        selective = self._selective if norm == "mlp_norm." else self._setting.selective
        return selective and not self._setting.gathers

    def _product(self, elements: int) -> None:
        self._tape.flash(elements * self._of_product)

    def _spend(self, *sizes: int) -> None:
        if not self._split:
            self._tape.go(*sizes)

    def _spend_kept(self, name: str) -> None:
        self._spend(self._kept.pop(name, 0))

    def _give_back(self, *names: str) -> None:
        """All that is kept under these names, or, with a dot at their end, below them."""
        for name in names:
            for each in [kept for kept in self._kept if kept == name or (name[-1] == "." and kept.startswith(name))]:
                self._tape.go(self._kept.pop(each))
