"""The price of one plan: traffic, memory, FLOPs and time, as `estimate` shows and writes them.

Time comes from the closed forms, and from the simulated program where they do not hold (`applies.py`); memory of the
literal program from its fold where one exists, else from the closed forms; traffic always from the program's ledger.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from meshwright.arch.arithmetic import Convention, flops_per_sequence, repeated_flops
from meshwright.config.choices import Documents, Recompute
from meshwright.plan.folds.ledger import Row
from meshwright.plan.hash import plain
from meshwright.plan.plan import Plan
from meshwright.plan.unbuilt import missing
from meshwright.price.applies import beyond_closed_form
from meshwright.price.catalogue import cluster_of
from meshwright.price.cluster import Cluster
from meshwright.price.estimate import Estimates, estimate
from meshwright.price.folded import StageBytes, folded, fullest_moment, may_be_fullest, transport_of
from meshwright.price.layouts import of_plan
from meshwright.price.memory import CATEGORIES, memories, reserved_bytes, routed_share
from meshwright.price.simulate import simulated_seconds
from meshwright.price.target import Target, target_of
from meshwright.price.times import PARTS
from meshwright.price.traffic import traffic
from meshwright.price.weights import weights

DENSE_RANGE, EXPERTS_RANGE = 0.15, 0.30
"""How far a priced step time may be off: what nine of ten published runs stay within (docs/pricing.md)."""

GUESS_FACTOR = 4.0
"""The same, as a factor, where the rates of the device are guesses: machines of a few cores differ so much."""

MEMORY_RANGE = 0.135
"""The same of memory that is not the fold of the program."""

SPARED = 1.25
"""Times its closed form that memory of the program does not exceed: at most 1.16 in 1,000 random layouts."""

_FOLDED = 20_000  # (unit, micro-batch) pairs over all stages


@dataclass(frozen=True)
class Price:
    """What `plan` costs on `cluster`. Traffic is of `rank`."""

    plan: Plan
    cluster: Cluster
    rank: int = 0

    @cached_property
    def target(self) -> Target:
        return target_of(self.plan, self.cluster)

    @cached_property
    def estimates(self) -> Estimates:
        """The closed forms, one element."""
        return estimate(self.target, of_plan(self.plan))

    @cached_property
    def traffic(self) -> tuple[Row, ...]:
        """Rows of the ledger of one step."""
        return traffic(self.plan, self.rank, transport_of(self.cluster))

    @cached_property
    def simulated_because(self) -> str | None:
        """Why the step's time is that of the simulated program; None where the closed form holds, or is all there is.

        Programs of usual trainers are not known, and very long ones are not simulated.
        """
        if not self.target.is_literal or self._is_long:
            return None
        return beyond_closed_form(self.plan, self.target)

    @cached_property
    def step_seconds(self) -> float:
        if self.simulated_because is not None:
            return simulated_seconds(self.plan, self.cluster)
        return float(self.estimates.times.step[0])

    @cached_property
    def parts(self) -> Mapping[str, float]:
        """Seconds by cause; they add up to the step.

        What a simulation adds to the closed form, or takes from it, is time of the replicas' exchanges, or waiting;
        where it takes more than these are, of all parts alike.
        """
        times = self.estimates.times
        parts = {name: float(getattr(times, name)[0]) for name in PARTS} | {"data": 0.0}
        left = self.step_seconds - sum(parts.values())
        for name in ("dp", "bubble", "other") if parts["dp"] else ("bubble", "other"):
            taken = max(left, -max(parts[name], 0.0))
            parts[name] += taken
            left -= taken
        scale = self.step_seconds / (self.step_seconds - left)
        return {name: seconds * scale for name, seconds in parts.items()}

    @cached_property
    def compute_parts(self) -> Mapping[str, float]:
        """What `compute` is made of: forward, backward, and what an action of its own computes again."""
        times = self.estimates.times
        forward, again = float(times.forward[0]), float(times.again[0])
        computed = {"forward": forward, "backward": float(times.compute[0]) - forward - again, "recompute": again}
        scale = self.parts["compute"] / sum(computed.values())
        return {name: seconds * scale for name, seconds in computed.items()}

    @property
    def spread(self) -> float:
        """The part by which the step time may be off, on either side."""
        return EXPERTS_RANGE if self.plan.arch.experts else DENSE_RANGE

    @property
    def is_uncalibrated(self) -> bool:
        """Whether the device's rates are guesses: `local` until `doctor --calibrate` has measured this machine."""
        return self.cluster.sources.get("device.matrix_flops", "").startswith("guess")

    @cached_property
    def range_seconds(self) -> tuple[float, float]:
        """Where the step time lies. Masked documents see fewer keys, at the least none but their own token."""
        low = self.step_seconds
        if self.plan.data.documents is Documents.MASKED:
            arch = replace(self.plan.arch, sliding_window=1, windowed_layers=())
            low = float(estimate(replace(self.target, arch=arch), of_plan(self.plan)).times.step[0])
        if self.is_uncalibrated:
            return low / GUESS_FACTOR, self.step_seconds * GUESS_FACTOR
        return low * (1 - self.spread), self.step_seconds * (1 + self.spread)

    @cached_property
    def worst_peak(self) -> int:
        """The peak if routing sent every token of an expert group to one rank; equal to the peak without experts."""
        ep, tokens = self.plan.degrees.ep, self.plan.batch.micro * self.plan.data.sequence_length
        if self.plan.arch.experts is None or ep == 1:
            return self.memory["peak"]
        share = routed_share(self.plan.arch, self.plan.data.sequence_length)
        most = min(ep, self.plan.arch.experts.count / self.plan.arch.experts.active) if tokens else 1
        return int(self.memory["peak"] + self.memory["activations"] * share * (most - 1))

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """What `meshwright train` would need to run such a plan and does not have yet, by name."""
        return missing(self.plan)

    @property
    def runs(self) -> bool:
        """Whether `meshwright train` runs such a plan."""
        return not self.missing

    @cached_property
    def is_folded(self) -> bool:
        """Whether memory is the fold of the program itself: of every layout that the trainer runs, unless very long."""
        return self.target.is_literal and self.runs and not self._is_long

    @property
    def _is_long(self) -> bool:
        """Whether the program has more actions than are worth folding or simulating one by one."""
        return self.plan.accumulation * self.plan.arch.num_units > _FOLDED

    @cached_property
    def trained_peak(self) -> int | None:
        """The largest sum of live bytes where `meshwright train` runs the plan, whatever software the price is about:
        the fold of its program. None where it does not run."""
        if not self.runs:
            return None
        if self.is_folded:
            return max(self.stage_peaks)
        return max(each.peak for each in folded(self.plan, self.cluster, may_be_fullest(self.plan)))

    @cached_property
    def fits_trained(self) -> bool:
        """Whether `meshwright train` would not run out of memory; True where it does not run such a plan at all.

        No stage is folded whose closed form leaves room to spare: each costs up to 0.1 s.
        """
        if not self.runs:
            return True
        stages = range(self.plan.degrees.pp) if self.is_folded else self._unsure
        peaks = (folded(self.plan, self.cluster, [stage])[0].peak for stage in stages)
        return all(self._reserved(peak) <= self.cluster.device.memory_bytes for peak in peaks)

    @property
    def _unsure(self) -> list[int]:
        """Of the stages that may be the fullest, those of which the program's closed form is not so far below the
        device's memory that the fold must be too."""
        stages, pp = may_be_fullest(self.plan), self.plan.degrees.pp
        if self.plan.data.documents is Documents.MASKED:
            return stages  # of whose masks it knows nothing
        target, layout = self.target.literal, of_plan(self.plan)
        found = memories(target, layout, weights(target, layout))
        closed = {0: found.peaks_first, pp - 1: found.peaks_last} if pp > 1 else {0: found.peaks_first}
        room = self.cluster.device.memory_bytes
        return [
            stage for stage in stages if self._reserved(int(closed.get(stage, found.peaks_inner)[0] * SPARED)) > room
        ]

    @cached_property
    def stage_peaks(self) -> tuple[int, ...]:
        """The largest sum of live bytes on a rank of each pipeline stage."""
        pp = self.plan.degrees.pp
        if self.is_folded:
            return tuple(each.peak for each in self._by_stage)
        memory = self.estimates.memory
        first, inner, last = (int(each[0]) for each in (memory.peaks_first, memory.peaks_inner, memory.peaks_last))
        return (first,) if pp == 1 else (first, *[inner] * (pp - 2), last)

    @cached_property
    def memory(self) -> dict[str, int]:
        """Bytes by category on the fullest stage, and `peak`, `reserved`, `device`."""
        closed = self.estimates.memory
        peak = max(self.stage_peaks)
        if self.is_folded:
            fullest = self._by_stage[self.stage_peaks.index(peak)]
            sizes = {category.value: size for category, size in fullest.largest.items()}
        else:
            sizes = {name: int(getattr(closed, name)[0]) for name in CATEGORIES}
        reserved, outside = self._reserved(peak), float(closed.device[0] - closed.reserved[0])
        return sizes | {"peak": peak, "reserved": int(reserved), "device": int(reserved + outside)}

    def _reserved(self, peak: int) -> float:
        return float(reserved_bytes(self.target, peak))

    @property
    def fits(self) -> bool:
        """Whether the device holds what its allocator reserves (its memory is given without contexts)."""
        return self.memory["reserved"] <= self.cluster.device.memory_bytes

    @property
    def fits_surely(self) -> bool:
        """Whether it holds that with contexts and communicators, and with what the price may be off."""
        spread = 0.0 if self.is_folded else MEMORY_RANGE
        return self.fits and self.memory["device"] * (1 + spread) <= self.cluster.device.memory_bytes

    @cached_property
    def fullest(self) -> str:
        """Where the peak occurs, in words."""
        stage = self.stage_peaks.index(max(self.stage_peaks))
        if not self.is_folded:
            return f"stage {stage}, when most micro-batches are in flight"
        return fullest_moment(self.plan, self.cluster, stage)

    @cached_property
    def _by_stage(self) -> tuple[StageBytes, ...]:
        return folded(self.plan, self.cluster, range(self.plan.degrees.pp))

    @cached_property
    def flops(self) -> dict[str, int]:
        """Floating-point operations of a step over all ranks, in three conventions."""
        plan, sequence = self.plan, self.plan.data.sequence_length
        causal = flops_per_sequence(plan.arch, sequence) * plan.batch.sequences
        full = flops_per_sequence(plan.arch, sequence, Convention.FULL) * plan.batch.sequences
        again = int(self._repeated() * plan.batch.sequences)  # on a share of the blocks, perhaps
        return {"model_per_step": causal, "model_full_attention_per_step": full, "hardware_per_step": causal + again}

    def _repeated(self) -> float:
        """FLOPs of one sequence that recomputation repeats."""
        plan, software, recompute = self.plan, self.cluster.software, self.plan.execution.recompute
        # Usual trainers keep the output of fused attention, and repeat none of its products; the literal program keeps
        # that of a context axis.
        keeps = plan.degrees.cp > 1 if self.target.is_literal else not self.target.unfused
        if recompute is Recompute.SELECTIVE and keeps:
            return 0.0
        return repeated_flops(plan.arch, plan.data.sequence_length, recompute) * software.share

    @cached_property
    def mfu(self) -> float | None:
        """Model FLOPs, causal attention, over the device's peak for the products' dtype."""
        peak = self.target.peak_flops
        return self.flops["model_per_step"] / self.step_seconds / self.plan.degrees.ranks / peak if peak else None

    @cached_property
    def dollars_per_step(self) -> float:
        """0 where the cluster's price is unknown."""
        return self.cluster.price.dollars_per_device_hour * self.plan.degrees.ranks * self.step_seconds / 3600

    def to_json(self) -> dict[str, Any]:
        """The object of `estimate --json`."""
        plan, ranks = self.plan, self.plan.degrees.ranks
        per_device = self.step_seconds * ranks
        coordinates = (plan.degrees.coordinates(rank).pp for rank in range(ranks))
        tokens = plan.batch.sequences * plan.data.sequence_length
        return {
            "plan": plan.hash,
            "ranks": ranks,
            "cluster": self.cluster.name,
            "traffic": [plain(row) for row in self.traffic],
            "memory": self.memory
            | {"per_rank": [{"rank": rank, "peak": self.stage_peaks[pp]} for rank, pp in enumerate(coordinates)]},
            "flops": self.flops,
            "time": {
                "step_seconds": self.step_seconds,
                **self.parts,
                "model_tflops_per_gpu": self.flops["model_per_step"] / per_device / 1e12,
                "mfu": self.mfu,
                "tokens_per_second_per_gpu": tokens / per_device,
            },
            "fits": self.fits,
            "fits_surely": self.fits_surely,
            "peak_at": self.fullest,
            "time_from": "closed form" if self.simulated_because is None else "simulated program",
            "uncalibrated": self.is_uncalibrated,
            "range": list(self.range_seconds),
            "worst_routing_peak": self.worst_peak,
            "trained_peak": self.trained_peak,
            "fits_trained": self.fits_trained,
            "dollars_per_step": self.dollars_per_step,
        }

    def __str__(self) -> str:
        from meshwright.price.text import table

        return "\n".join(table(self))


def price(plan: Plan, cluster: str | Cluster = "local", rank: int = 0) -> Price:
    """What `plan` costs on a cluster of the catalogue, of a file, or given. Raises RequestError for unknown ones."""
    return Price(plan, cluster if isinstance(cluster, Cluster) else cluster_of(cluster), rank)
