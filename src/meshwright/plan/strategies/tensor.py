"""Tensor and sequence parallelism, declared (Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022,
arXiv:2205.05198).

    T ranks      residual stream      query key value / gate up       output / down             stream
    tensor       whole, N x D    f    columns: heads, ffn             rows: the same      f*    whole
    + sequence   N/T x D         g    gathered first                  scattered after     g*    N/T x D

    f  identity forward, all-reduce backward        f*  all-reduce forward, identity backward
    g  all-gather forward, reduce-scatter backward  g*  reduce-scatter forward, all-gather backward

What is cut follows from what a dimension means: query heads, feed-forward and vocabulary by all T ranks, key/value
heads by as many as there are. tp = kv_cut x kv_copy: where T passes the number of key/value heads, kv_copy neighbours
hold the same ones, each for its own query heads.

    tp 4, two key/value heads      rank        0    1    2    3
                                   query heads 0 1  2 3  4 5  6 7
                                   key heads   0    0    1    1        kv_cut 2, kv_copy 2

`asynchronous_tensor` sends the gathers and scatters beside products round a ring in chunks, each under the product of
another (`comm/ring.py`): the same calls of the same bytes. The embedding's have no product beside them.

A vocabulary that does not divide is padded in memory: the last ranks hold fewer rows of the tensor, and no product
ever reads the others.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.arch.arch import Arch
from meshwright.arch.heads import kv_heads_divide
from meshwright.arch.tensors import LogicalAxis, Tensor, UnitKind
from meshwright.config.errors import RequestError
from meshwright.layout.axes import Axis, Degrees, Factor, whole
from meshwright.layout.groups import GroupName
from meshwright.layout.ownership import Cut
from meshwright.plan.action import Action, Op
from meshwright.plan.operation import Operation
from meshwright.plan.plan import Plan
from meshwright.plan.strategies.call import Call

_CUT_BY_ALL = frozenset({LogicalAxis.HEADS, LogicalAxis.FFN, LogicalAxis.EXPERT_FFN, LogicalAxis.VOCABULARY})
_OF_THE_STREAM = frozenset({LogicalAxis.HIDDEN, LogicalAxis.ROUTES})
_STATISTICS = 3  # of a token over one rank's vocabulary: largest logit, sum of exponentials, logit of the label


def kv_copies(degrees: Degrees, arch: Arch) -> int:
    """How many neighbours on the tensor axis hold the same key/value heads."""
    return max(degrees.tp // arch.kv_heads, 1)


def kv_factor(degrees: Degrees, arch: Arch) -> Factor:
    """The digit of the tensor coordinate that cuts key/value heads."""
    copies = kv_copies(degrees, arch)
    return Factor((Axis.TP,), degrees.tp // copies, stride=copies)


def cuts(degrees: Degrees, arch: Arch, tensor: Tensor) -> tuple[Cut, ...]:
    """How the tensor axis cuts a logical tensor."""
    if degrees.tp == 1:
        return ()
    factors = {axis: whole(degrees, Axis.TP) for axis in _CUT_BY_ALL} | {LogicalAxis.KV_HEADS: kv_factor(degrees, arch)}
    return tuple(Cut(dim, factors[axis]) for dim, axis in enumerate(tensor.axes) if axis in factors)


def partial(plan: Plan, tensor: Tensor) -> tuple[GroupName, ...]:
    """The groups over which the gradient of a tensor is a partial sum.

    key/value heads on several ranks     each saw the gradient of its own query heads
    gains inside a head                  each rank has heads of its own
    router                               each weighed the columns of the experts' outputs that it holds
    whole, on the residual stream        under sequence parallel each rank has tokens of its own
    """
    if plan.degrees.tp == 1:
        return ()
    axes = frozenset(tensor.axes)
    if LogicalAxis.KV_HEADS in axes:
        return (GroupName.KV_COPY,) if kv_copies(plan.degrees, plan.arch) > 1 else ()
    if LogicalAxis.ROUTES in axes:
        return (GroupName.TP,)
    if LogicalAxis.HEAD_DIM in axes or (plan.execution.sequence and axes <= _OF_THE_STREAM):
        return (GroupName.TP,)
    return ()


def micro_tokens(plan: Plan) -> int:
    """N: tokens of one micro-batch that a tensor group works on."""
    return plan.batch.micro * (plan.data.sequence_length // plan.degrees.cp)


def stream_tokens(plan: Plan) -> int:
    """Tokens of the residual stream that one rank holds: N, or N / T under sequence parallel."""
    return micro_tokens(plan) // (plan.degrees.tp if plan.execution.sequence else 1)


def calls(plan: Plan, action: Action) -> Iterator[Call]:
    """What one compute action sends over the tensor axis.

    The gathered input of column products is kept for their weight gradients, so both ways cost the same.
    """
    if plan.degrees.tp == 1:
        return
    kind = plan.arch.unit_kind(action.unit)
    forward = action.op in (Op.FORWARD, Op.RECOMPUTE)
    if action.op is Op.WEIGHT or (kind is UnitKind.EMBEDDING and action.split):
        if kind is UnitKind.EMBEDDING and action.op is Op.WEIGHT:  # its backward is all weight product
            yield from _leaves(plan, forward=False)
        return
    if kind is UnitKind.BLOCK:
        for _ in ("attention", "feed-forward"):
            yield from _enters(plan, forward)
            yield from _leaves(plan, forward)
    elif kind is UnitKind.EMBEDDING:
        yield from _leaves(plan, forward)
    else:
        yield from _enters(plan, forward)
        if forward:
            width = max(4, plan.precision.compute.num_bytes)
            payload = plan.degrees.tp * _STATISTICS * micro_tokens(plan) * width
            yield Call(GroupName.TP, Operation.ALL_GATHER, payload)


def _enters(plan: Plan, forward: bool) -> Iterator[Call]:
    """f, or g under sequence parallel."""
    if plan.execution.sequence:
        yield _stream_call(plan, Operation.ALL_GATHER if forward else Operation.REDUCE_SCATTER)
    elif not forward:
        yield _stream_call(plan, Operation.ALL_REDUCE)


def _leaves(plan: Plan, forward: bool) -> Iterator[Call]:
    """f*, or g* under sequence parallel."""
    if plan.execution.sequence:
        yield _stream_call(plan, Operation.REDUCE_SCATTER if forward else Operation.ALL_GATHER)
    elif forward:
        yield _stream_call(plan, Operation.ALL_REDUCE)


def _stream_call(plan: Plan, operation: Operation) -> Call:
    """All tokens' hidden states, or their cotangents."""
    payload = micro_tokens(plan) * plan.arch.hidden * plan.precision.sent_bytes
    return Call(GroupName.TP, operation, payload)


def problems(plan: Plan) -> Iterator[RequestError]:
    """What makes the tensor degree illegal."""
    tp, arch = plan.degrees.tp, plan.arch
    if tp == 1:
        return
    works = [f"mesh.tp = {size}" for size in legal_degrees(arch)]
    yield from (RequestError(f"mesh.tp = {tp}", rule, works) for rule in degree_rules(arch, tp))
    if plan.execution.sequence and micro_tokens(plan) % tp:
        yield _odd_length(plan)
    if plan.execution.asynchronous_tensor and not plan.execution.sequence:
        yield RequestError(
            "parallel.asynchronous_tensor = true with parallel.sequence = false",
            "cuts the gathers and scatters of sequence parallelism into chunks; an all-reduce needs its whole product",
            ("parallel.sequence = true", "parallel.asynchronous_tensor = false"),
        )


def legal_degrees(arch: Arch) -> tuple[int, ...]:
    """The tensor degrees that cut `arch`, ascending."""
    return tuple(tp for tp in range(1, arch.heads + 1) if not any(degree_rules(arch, tp)))


def degree_rules(arch: Arch, tp: int) -> Iterator[str]:
    """What a tensor degree of `tp` must do and does not."""
    if arch.heads % tp:
        yield f"must divide the {arch.heads} query heads"
    elif not kv_heads_divide(arch.kv_heads, tp):
        yield f"must divide the {arch.kv_heads} key/value heads, or be a multiple of them"
    for name, size in _widths(arch):
        if size % tp:
            yield f"must divide the {name} of {size}"


def _widths(arch: Arch) -> Iterator[tuple[str, int]]:
    experts = arch.experts
    if experts is None or experts.dense_layers:
        yield "feed-forward width", arch.ffn
    if experts is not None:
        yield "experts' feed-forward width", experts.ffn


def _odd_length(plan: Plan) -> RequestError:
    """Sequence parallel cuts the micro-batch's tokens, all sequences behind one another, in T equal parts."""
    tp, micro, length = plan.degrees.tp, plan.batch.micro, plan.data.sequence_length
    lengths = (length + sign * step for step in range(1, tp * plan.degrees.cp + 1) for sign in (1, -1))
    near = [
        size
        for size in lengths
        if size > 0 and size % plan.degrees.cp == 0 and micro * (size // plan.degrees.cp) % tp == 0
    ]
    return RequestError(
        f"data.sequence_length = {length} with batch.micro = {micro} and parallel.sequence = true",
        f"the {micro_tokens(plan)} tokens of a micro-batch must be a multiple of mesh.tp = {tp}",
        [*(f"data.sequence_length = {size}" for size in near[:2]), f"batch.micro = {tp}", "parallel.sequence = false"],
    )
