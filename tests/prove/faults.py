"""Faults that have happened to somebody: each in the file where it would be made, with what must notice.

Names of logical tensors are those that differ first in order of execution: forward borders, then gradients from the
head to the embedding, the norm, weights after the first step, later losses.
"""

from __future__ import annotations

from typing import Any

from meshwright.testing.faults import Fault

EXECUTOR, STORE, SPLIT = "parallel/executor.py", "parallel/store.py", "parallel/split.py"
TAIL, BORDERS, COMPUTES = "plan/lowering/tail.py", "plan/lowering/borders.py", "plan/lowering/computes.py"
GRADIENTS, PARAMETERS, LISTING = (f"plan/lowering/{name}.py" for name in ("gradients", "parameters", "listing"))
TENSOR, DECLARED, CALLS = "parallel/tensor.py", "plan/strategies/tensor.py", "plan/strategies/calls.py"
DIRECT, DIRECT_TENSOR, LINEAR, VOCABULARY = (
    f"parallel/{name}.py" for name in ("direct", "tensor_direct", "tensor_linear", "tensor_vocabulary")
)
FORMS = "parallel/recompute_forms.py"
RECIPES, OFFLOAD = "parallel/recompute.py", "parallel/offload.py"
CONJUGATE, RING, ROWS = "comm/conjugate.py", "comm/ring.py", "layout/rows.py"
NORMS, ROTATION = "parallel/norms.py", "parallel/rotation.py"
OWNERSHIP = "layout/ownership.py"
EXPERTS, BALANCING = "parallel/experts.py", "parallel/balancing.py"
BLOCKS, HEADS, KERNELS = (f"parallel/context_{name}.py" for name in ("blocks", "heads", "kernels"))
RECTANGLES, SEQUENCES = "layout/blocks.py", "plan/strategies/context.py"
EXPERT_AXIS, DECLARED_EXPERTS = "parallel/expert_axis.py", "plan/strategies/expert.py"


def runs(mesh: dict[str, int], micro: int = 1, sequences: int = 12, **sections: dict[str, Any]) -> dict[str, Any]:
    return {"mesh": mesh, "batch": {"global": sequences, "micro": micro}, **sections}


DP = runs({"dp": 2}, micro=2)
ZERO = {stage: runs({"dp": 2}, micro=2, parallel={"zero": stage}) for stage in (1, 2, 3)}
TIED = {"tie_embeddings": True}
PIPE = runs({"dp": 1, "pp": 2}, micro=2)
TP = runs({"dp": 1, "tp": 2}, micro=4)
RINGS = runs({"dp": 1, "tp": 4}, micro=4, parallel={"asynchronous_tensor": True})
GPT2 = {"family": "gpt2", "max_positions": 64}
SELECTIVE = runs({"dp": 1}, micro=4, parallel={"recompute": "selective"})
SELECTIVE_TP = runs({"dp": 1, "tp": 2}, micro=4, parallel={"recompute": "selective", "sequence": False})
SELECTIVE_SEQUENCE = runs({"dp": 1, "tp": 2}, micro=4, parallel={"recompute": "selective", "sequence": True})
MIXTRAL = {"family": "mixtral", "experts": 4, "experts_per_token": 2}
EXACT = {"compute": "float64"}  # the last rung of another precision leaves routers no choice
ROUTED = runs({"dp": 2}, micro=2, model=MIXTRAL, moe={"auxiliary_loss": 0.5}, precision=EXACT)
ROUTED_TP = runs(
    {"dp": 1, "tp": 2}, micro=4, model=MIXTRAL, moe={"auxiliary_loss": 0.5}, parallel={"sequence": False},
    precision=EXACT,
)  # fmt: skip
ROUTED_EP = runs({"dp": 2, "ep": 2}, sequences=12, model=MIXTRAL, moe={"auxiliary_loss": 0.5}, precision=EXACT)
ROUTED_CP = runs({"dp": 1, "cp": 2}, micro=4, model=MIXTRAL, moe={"auxiliary_loss": 0.5}, precision=EXACT)
BIASED = runs({"dp": 2}, micro=2, model=MIXTRAL, moe={"balance": "bias"}, precision=EXACT)
MASKED = runs({"dp": 2}, micro=2, data={"documents": "masked"})
CONTEXT = runs({"dp": 1, "cp": 4}, micro=4)
DOCUMENTS = runs({"dp": 1, "cp": 2}, micro=4, data={"documents": "masked"})
EXCHANGE = runs({"dp": 1, "cp": 4}, micro=4, parallel={"context": "ulysses"})
GROUPED = runs({"dp": 1, "cp": 4}, micro=4, parallel={"context_inner": 2})
HALF = runs({"dp": 2}, micro=2, precision={"compute": "bfloat16"})
SCALED = runs({"dp": 2}, micro=2, precision={"compute": "float16"})
AWAY = runs({"dp": 2}, micro=2, parallel={"zero": 3, "offload": "params"})

FAULTS = [
    # ------------------------------------------------------------------ the executor
    Fault(
        "a missing sum", EXECUTOR,
        "            return all_reduce(over, store.seal(), action.phase)\n",
        "            return Handle() if store.seal() is not None else Handle()\n",
        DP, "head.weight", "missing sum", ledger=True,
    ),
    Fault(
        "gradients divided by dp although the loss was normalised", EXECUTOR,
        "torch.tensor(self.loss_scale.value, dtype", "torch.tensor(self.loss_scale.value / 2, dtype",
        DP, "head.weight", "factor",
    ),
    Fault(
        "labels shifted once more", EXECUTOR,
        "torch.from_numpy(part.labels).to(device),", "torch.from_numpy(part.labels).to(device).roll(-1, 1),",
        DP, "loss",
    ),
    Fault(
        "every micro-batch reads the first one's samples", EXECUTOR,
        "part = self._batch.micro(micro, self", "part = self._batch.micro(0, self",
        DP, "samples", "wrong rows",
    ),
    Fault(
        "the norm counts every copy", EXECUTOR,
        "store.counted_norm(squared_norm)", "squared_norm(store.reduced)",
        DP, "norm", "factor",
    ),
    Fault(
        "dropout without the step", EXECUTOR,
        "                part.rows, self.plan.arch, seed",
        '                __import__("dataclasses").replace(part.rows, step=0), self.plan.arch, seed',
        runs({"dp": 2}, model={"dropout": 0.25}), "loss",
    ),
    Fault(
        "recomputed with other dropout", EXECUTOR,
        "        x = _leaf(self._held.pop(key))\n",
        "        x = _leaf(self._held.pop(key))\n        self._micro(key[1]).rows.token_keys.add_(1)\n",
        runs({"dp": 1}, micro=12, model={"dropout": 0.25}, parallel={"recompute": "full"}), "layers.0",
    ),
    Fault(
        "each rank divides by its own tokens", EXECUTOR,
        "return all_reduce(self.mesh.communicator(action.group), self.count, action.phase)", "return Handle()",
        DP, "trained tokens", "missing sum", ledger=True,
    ),
    Fault(
        "received into another micro-batch's place", EXECUTOR,
        "        self._crossing(action)[action.arrives_at, action.micro] = value\n",
        "        self._crossing(action)[action.arrives_at, (action.micro + 1) % self.plan.accumulation] = value\n",
        runs({"dp": 1, "pp": 2}, micro=2, parallel={"schedule": "gpipe"}),
    ),
    # ------------------------------------------------------------------ stores and buckets
    Fault(
        "padding is not zeroed", STORE,
        "        self.gradient[end:].zero_()\n", "        self.gradient[end:].fill_(1.0)\n",
        ZERO[1], "norm",
    ),
    Fault(
        "a micro-batch overwrites the one before", STORE,
        "                flat.add_(parameter.grad)\n", "                flat.copy_(parameter.grad)\n",
        DP, "head.norm.weight", "missing sum",
    ),
    Fault(
        "a later micro-batch's shard is dropped", STORE,
        "            self._reduced.add_(arrived)\n", "            pass\n",
        ZERO[2], "head.weight", "missing sum",
    ),
    Fault(
        "gradients are kept after the update", STORE,
        "        self._sealed = False\n        if self._reduced is not None:\n            self.allocator.release",
        "        return\n        if self._reduced is not None:\n            self.allocator.release",
        ZERO[1],
    ),
    Fault(
        "shards in mirrored order", "plan/buckets.py",
        "        return min(place * block, self.numel), min(",
        "        place = ways - 1 - place\n        return min(place * block, self.numel), min(",
        ZERO[1], "head.weight",
    ),
    Fault(
        "norm gains decay", "plan/buckets.py",
        "decay_stop = offset if owner.tensor.decays else decay_stop", "decay_stop = offset",
        DP, "layers.0.attention_norm.weight",
    ),
    Fault(
        "bias correction one step ahead", "optim/update.py",
        "[run.step for run, _ in chosen],", "[run.step.add_(1) for run, _ in chosen],",
        DP, "embedding.weight",
    ),
    # ------------------------------------------------------------------ collectives
    Fault(
        "a reduce-scatter forgets the third rank", "comm/operations.py",
        "    for part in after:\n", "    for part in after[1:]:\n",
        runs({"dp": 3}, micro=2, parallel={"zero": 1}), "head.weight", "missing sum",
    ),
    Fault(
        "an all-gather that is counted as a chunk", "comm/operations.py",
        "_record(over, Operation.ALL_GATHER, phase, whole)", "_record(over, Operation.ALL_GATHER, phase, whole[:1])",
        ZERO[3], ledger=True,
    ),
    # ------------------------------------------------------------------ lowering
    Fault(
        "copies of a shard are not summed", TAIL,
        "        if copies is not None and is_hybrid(plan, bucket.replicas):\n", "        if False:\n",
        runs({"dp": 4}, parallel={"zero": 1, "zero_shard_within": 2}), "head.weight", "missing sum", program="copy",
    ),
    Fault(
        "a tied bucket is summed on one stage only", TAIL,
        "        if bucket.tied_elsewhere:\n", "        if False:\n",
        runs({"dp": 1, "pp": 2}, micro=2, model=TIED), "embedding.weight", "missing sum", program="tied",
    ),
    Fault(
        "updated parameters are not published", TAIL,
        "    if plan.sharding.stage in (1, 2) and", "    if plan.sharding.stage in (2,) and",
        ZERO[1], "embedding.weight",
    ),
    Fault(
        "receives posted last first", BORDERS,
        "            self._due[peer].reverse()\n", "",
        PIPE, program="means",
    ),
    Fault(
        "a received value is not waited for", BORDERS,
        "            out.wait(self._posted[message])\n", "            pass\n",
        PIPE, program="is under way",
    ),
    Fault(
        "recomputation reads parameters that were released", COMPUTES,
        "needs_weights=action.op is not Op.WEIGHT and", "needs_weights=action.op not in (Op.WEIGHT, Op.RECOMPUTE) and",
        runs({"dp": 2}, micro=2, parallel={"zero": 3, "recompute": "full"}), program="parameters",
    ),
    Fault(
        "a forward keeps the graph that will be made again", COMPUTES,
        "keep=train and not _recomputed(plan, unit)", "keep=train",
        runs({"dp": 1}, micro=12, parallel={"recompute": "full"}), program="is not there",
    ),
    Fault(
        "summed after the first writer instead of the last", GRADIENTS,
        "if self._last_writer[self._turn(bucket, compute)] == compute.index\n", "if bucket not in self._pending\n",
        DP, program="sum",
    ),
    Fault(
        "written while it travels", GRADIENTS,
        "            if bucket in self._pending:\n                out.wait(self._pending.pop(bucket))\n",
        "            self._pending.pop(bucket, None)\n",
        runs({"dp": 2}, micro=2, model=TIED, parallel={"zero": 2}), program="gradient",
    ),
    Fault(
        "used before it is gathered", PARAMETERS,
        "            out.wait(self._gathering.pop(bucket, -1))\n", "            self._gathering.pop(bucket, -1)\n",
        ZERO[3], program="parameters",
    ),
    Fault(
        "gathered parameters are never released", PARAMETERS,
        "sorted(self._whole.difference(needed))", "sorted(self._whole.difference(needed))[:0]",
        ZERO[3], program="parameters",
    ),
    Fault(
        "the last sum is not waited for", LISTING,
        "        for index in [i for i in self._open if not ops or self.actions[i].op in ops]:",
        "        for index in [i for i in self._open if not ops or self.actions[i].op in ops][:-1]:",
        DP, program="sum",
    ),
    # ------------------------------------------------------------------ a split backward
    Fault(
        "a split backward loses the gains", SPLIT,
        "            parameter.grad = gradient\n", "            parameter.grad = None\n",
        runs({"dp": 1, "pp": 2}, micro=2, parallel={"schedule": "zb-h1"}), "head.norm.weight", "not written",
    ),
    Fault(
        "a split backward keeps the gradients of the gains in place as well", SPLIT,
        "                parameter.grad = None\n", "                pass\n",
        runs({"dp": 1, "pp": 2}, micro=2, parallel={"schedule": "zb-h1"}), "head.norm.weight",
    ),
    # ------------------------------------------------------------------ tensor
    Fault(
        "gains under sequence parallel are not summed", DECLARED,
        "if LogicalAxis.HEAD_DIM in axes or (plan.execution.sequence and axes <= _OF_THE_STREAM):",
        "if LogicalAxis.HEAD_DIM in axes:",
        runs({"dp": 1, "tp": 2}, micro=4), "head.norm.weight",
    ),
    Fault(
        "copied key heads are not summed", DECLARED,
        "return (GroupName.KV_COPY,) if kv_copies(plan.degrees, plan.arch) > 1 else ()", "return ()",
        runs({"dp": 1, "tp": 4}, micro=4), "layers.1.attention.value.weight", "missing sum",
    ),
    Fault(
        "dropout of the first rank's tokens everywhere", TENSOR,
        "rows.token_keys.chunk(plan.degrees.tp)[at.tp]", "rows.token_keys.chunk(plan.degrees.tp)[0]",
        runs({"dp": 1, "tp": 2}, micro=4, model={"dropout": 0.25}), "embedding",
    ),
    Fault(
        "a bias is left out of a row product", TENSOR,
        "return y_ND if self.bias is None else y_ND + self.bias", "return y_ND if self.bias is None else y_ND",
        runs({"dp": 1, "tp": 2}, micro=4, model=GPT2), "layers.1.mlp.down.bias", "not written",
    ),
    # ------------------------------------------------------------------ forwards whose products go to their place
    Fault(
        "the label is not taken from its logit's gradient", DIRECT,
        "        gradient_NV.scatter_add_(1, known_N[:, None], -each_N[:, None])\n", "",
        DP, "head.weight",
    ),
    Fault(
        "a bias takes the gradient of one token", DIRECT,
        "(g.sum(0) if needed", "(g[0] if needed",
        runs({"dp": 2}, micro=2, model=GPT2), "layers.1.mlp.down.bias",
    ),
    Fault(
        "the last of the products of one input is left out", DIRECT_TENSOR,
        "zip(ctx.places, gs, strict=True)", "zip(ctx.places[:-1], gs[:-1], strict=True)",
        TP, "layers.1.mlp.up.weight", "not written",
    ),
    Fault(
        "a row product is divided by the degree", DIRECT_TENSOR,
        "            ctx.products.add(ctx.place, g_ND, x)\n", "            ctx.products.add(ctx.place, g_ND / 2, x)\n",
        TP, "layers.1.mlp.down.weight", "factor",
    ),
    Fault(
        "the input's gradient is a rank's own", LINEAR,
        "    return begin_leaving(product, gs[0].shape[0], group, sequence)\n",
        "    return lambda: product(0, gs[0].shape[0])\n",
        runs({"dp": 1, "tp": 2}, micro=4, parallel={"sequence": False}), "layers.1.mlp_norm.weight", ledger=True,
    ),
    Fault(
        "outputs of joined weights in another order", LINEAR,
        "    for weight in weights[1:]:\n", "    for weight in weights[:0:-1]:\n",
        TP, "layers.0",
    ),
    Fault(
        "tokens of other ranks look up the first row", VOCABULARY,
        "    part_ND = part_ND.masked_fill(elsewhere_N[:, None], 0)\n", "",
        TP, "embedding",
    ),
    Fault(
        "labels of other ranks are taken from the first token here", VOCABULARY,
        "torch.where(here[low:high] < 0, 0, -weight_N[low:high])", "-weight_N[low:high]",
        TP, "head.weight",
    ),
    Fault(
        "each rank's own largest logit", VOCABULARY,
        "(statistics[0] - most_N).exp_().div_(sums_N)", "torch.ones_like(most_N).div_(sums_N)",
        TP, "head.weight",
    ),
    # ------------------------------------------------------------------ between the products
    Fault(
        "the gradient of a norm's input has no mean", NORMS,
        "dx.add_(sums.mul_(scale), alpha=1 / x.shape[-1])", "sums.mul_(scale)",
        DP, "layers.1.mlp.down.weight",
    ),
    Fault(
        "gradients are turned on, not back", ROTATION,
        "_turned(of_q, of_k, cos, sin, -1)", "_turned(of_q, of_k, cos, sin, 1)",
        DP, "layers.1.attention.key.weight",
    ),
    # ------------------------------------------------------------------ what is made again, what lives elsewhere
    Fault(
        "queries and keys are not rotated", RECIPES,
        "partial(attention.mixed, rows=rows)",
        "partial(attention.mixed, rows=__import__('dataclasses').replace(rows, cos=None))",
        SELECTIVE, "layers.0",
    ),
    Fault(
        "gains of recipes are counted twice", RECIPES,
        "of_parameters = [next(found)", "of_parameters = [2 * next(found)",
        SELECTIVE, "layers.1.mlp_norm.weight", "factor",
    ),
    Fault(
        "the gradient of columns made again is not summed", FORMS,
        "return gs, begin_input_gradient(gs, weights, group, False)", "return gs, partial(input_gradient, gs, weights)",
        SELECTIVE_TP, "layers.1.mlp_norm.weight", ledger=True,
    ),
    Fault(
        "a row product made again reads a part of the cotangent", FORMS,
        "return [g_ND], end", "return [g_ND.zero_()], end",
        SELECTIVE_SEQUENCE, "layers.1.mlp.down.weight",
    ),
    Fault(
        "what visited does not go home", OFFLOAD,
        "self._mover.put([(home, copy) for home, copy, _ in guest.copies])", "self._mover.put([])",
        AWAY, "embedding.weight",
    ),
    Fault(
        "values visit empty-handed", OFFLOAD,
        "self._mover.fetch([(home, copy) for home, copy, _ in guest.copies])",
        "self._mover.fetch([(home, copy.zero_()) for home, copy, _ in guest.copies][1:])",
        AWAY, "embedding.weight",
    ),
    # ------------------------------------------------------------------ norms, rows, pairs
    Fault(
        "the mean of a norm's gradient keeps half", NORMS,
        "alpha=1 / x.shape[-1])", "alpha=0.5 / x.shape[-1])",
        DP, "layers.1.mlp.down.weight",
    ),
    Fault(
        "gains of norms take the gradient of half the rows", NORMS,
        "return dx, dw_D, None", "return dx, dw_D / 2, None",
        DP, "head.norm.weight", "factor",
    ),
    Fault(
        "every part is the first", ROWS,
        "return slice(index * width, (index + 1) * width)", "return slice(0, width)",
        DP, "samples", "wrong rows",
    ),
    Fault(
        "tokens of a micro-batch carry the names of the first one's", ROWS,
        "            sample_ids=self.sample_ids[span],\n",
        "            sample_ids=self.sample_ids[: span.stop - span.start],\n",
        runs({"dp": 2}, micro=2, model={"dropout": 0.25}), "samples", "wrong rows",
    ),
    Fault(
        "a scattered stream's gradient is a mean", CONJUGATE,
        "(all_gather(g, ctx.group), None)", "(all_gather(g / 2, ctx.group), None)",
        TP, "embedding.weight", "factor",
    ),
    Fault(
        "a bias beside a scattered sum counts on one rank", CONJUGATE,
        "    return whole, whole.clone(), None", "    return whole, whole.clone().zero_(), None",
        runs({"dp": 1, "tp": 2}, micro=4, model=GPT2), "embedding.positions",
    ),
    # ------------------------------------------------------------------ round a ring
    Fault(
        "a rank sends its own chunk round and round", RING,
        "operations.hop(over, whole[slice(*here)], ",
        "operations.hop(over, whole[slice(*_bounds(over.place, over, size))], ",
        RINGS, "layers.0",
    ),
    Fault(
        "a rank adds nothing to the sum that came round", RING,
        "        return part.add_(arriving)\n", "        return part\n",
        RINGS, "layers.0",
    ),
    Fault(
        "sums of a ring end one rank too late", RING,
        "    part = product(*_bounds(over.place - 1, over, size))\n",
        "    part = product(*_bounds(over.place, over, size))\n",
        RINGS, "layers.0",
    ),
    Fault(
        "each hop of a ring is a call", RING,
        "        under_way = operations.hop(over, part, arriving)\n",
        "        under_way = operations.hop(over, part, arriving)\n"
        "        operations.count(over, Operation.REDUCE_SCATTER, over.ledger.phase, _num_bytes(part))\n",
        RINGS, ledger=True,
    ),
    Fault(
        "both moments decay alike", "optim/update.py",
        "beta2=settings.betas[1]", "beta2=settings.betas[0]",
        DP, "norm",
    ),
    # ------------------------------------------------------------------ experts
    Fault(
        "the router's gradient is lost", EXPERTS,
        "        ctx.products.add(ctx.place, g_NE, x.to(g_NE.dtype))\n", "",
        ROUTED, "layers.1.mlp.router.weight",
    ),
    Fault(
        "the second product of experts' rows gives their input no gradient", EXPERTS,
        "dx_MI[low:high].addmm_(g[low:high], each)", "dx_MI[low:high].addmm_(g[low:high], each, alpha=0)",
        ROUTED, "layers.1.mlp_norm.weight",
    ),
    Fault(
        "a later micro-batch's experts overwrite those before", STORE,
        "                each.addmm_(g_MO[low:high].t(), x_MI[low:high])\n",
        "                torch.mm(g_MO[low:high].t(), x_MI[low:high], out=each)\n",
        ROUTED, "layers.1.mlp.experts.down", "missing sum",
    ),
    Fault(
        "the router's gradient is taken for whole on every tensor rank", DECLARED,
        "    if LogicalAxis.ROUTES in axes:\n        return (GroupName.TP,)\n", "",
        ROUTED_TP, "layers.1.mlp.router.weight",
    ),
    Fault(
        "every tensor rank adds the whole of the loss terms", BALANCING,
        "1.0 / plan.degrees.tp)", "1.0)",
        ROUTED_TP, "layers.1.mlp.router.weight",
    ),
    Fault(
        "rows that arrive are taken to stand by expert", EXPERT_AXIS,
        "by_expert = [source * own + expert for expert in range(own) for source in range(self._ep)]",
        "by_expert = list(range(len(came)))",
        ROUTED_EP, "layers.0",
    ),
    Fault(
        "outputs go back in the order of experts", EXPERT_AXIS,
        "            y_RD = _ordered(y_RD, [came[run] for run in by_expert], _inverse(by_expert))\n", "",
        ROUTED_EP, "layers.0",
    ),
    Fault(
        "gradients of rows are put in order the wrong way round", EXPERT_AXIS,
        "_reorder(g_RD, [ctx.sizes[run] for run in ctx.order], _inverse(ctx.order))",
        "_reorder(g_RD, ctx.sizes, ctx.order)",
        ROUTED_EP, "layers.1.mlp.experts.down",
    ),
    Fault(
        "rows that were sent get no gradient", CONJUGATE,
        "exchanged(g, ctx.received, ctx.sent, ctx.rows, ctx.group), None,",
        "exchanged(g * 0, ctx.received, ctx.sent, ctx.rows, ctx.group), None,",
        ROUTED_EP, "layers.1.mlp.experts.down",
    ),
    Fault(
        "experts are summed over ranks that have others", DECLARED_EXPERTS,
        "return GroupName.EXPERT if cuts(degrees, tensor) else GroupName.DENSE", "return GroupName.DENSE",
        ROUTED_EP,
    ),
    Fault(
        "shares of a term are of a rank's part of a sequence", EXPERTS,
        "        mlp.whole = partial(all_reduce, group=group)\n", "        del mlp\n",
        ROUTED_CP, "auxiliary loss", "factor", ledger=True,
    ),
    Fault(
        "each rank moves biases by its own tokens", BALANCING,
        "move_bias(self.biases[name], packed[counts_at(self._plan, unit)])",
        "move_bias(self.biases[name], self._counts[unit])",
        BIASED, "layers.0.mlp.router.bias", "missing sum",
    ),
    Fault(
        "biases are moved by the last micro-batch", BALANCING,
        "router.counts if counted is None else counted + router.counts", "router.counts",
        BIASED, "layers.1.mlp.router.bias", "missing sum",
    ),
    # ------------------------------------------------------------------ groups, owners, batches
    Fault(
        "all ranks read the first rank's samples", "data/batch.py",
        "return group.place(plan.degrees, plan.degrees.coordinates(rank)), group.size", "return 0, group.size",
        DP, "samples", "wrong rows",
    ),
    Fault(
        "documents of a micro-batch see one another", ROWS,
        "document_ids=None if self.document_ids is None else self.document_ids[span],", "document_ids=None,",
        MASKED, "layers.0", "mask",
    ),
    Fault(
        "learned positions run on across documents", ROWS,
        "            positions=self.positions[span],", "            positions=self.offsets[span],",
        runs({"dp": 2}, micro=2, model=GPT2, data={"documents": "masked"}), "embedding", "mask",
    ),
    Fault(
        "random numbers by rank", EXECUTOR,
        "seed=self.plan.seed, dtype", "seed=self.plan.seed + self.mesh.rank, dtype",
        runs({"dp": 2}, micro=2, model={"dropout": 0.25}), "embedding", "randomness",
    ),
    Fault(
        "the norm of one tensor rank", TAIL,
        "group=_shared(plan, GroupName.WORLD)))", "group=_shared(plan, GroupName.DENSE)))",
        runs({"dp": 2, "tp": 2}, micro=2), "norm",
    ),
    Fault(
        "the norm is judged before it is summed", EXECUTOR,
        "return all_reduce(self.mesh.communicator(action.group), self.packed, action.phase).then(self._judge)",
        "self._judge()\n        return all_reduce(self.mesh.communicator(action.group), self.packed, action.phase)",
        ZERO[1], "norm",
    ),
    Fault(
        "a tied tensor counts on both stages", OWNERSHIP,
        "return at.pp == self.stages[0] and all(", "return all(",
        runs({"dp": 1, "pp": 2}, micro=2, model=TIED), "norm",
    ),
    Fault(
        "what tensor ranks hold alike counts on each", OWNERSHIP,
        "all(copy == 0 for copy in self._copies(degrees, at, axes))", "True",
        TP, "norm",
    ),
    Fault(
        "copies of key heads are sought at other ranks", "layout/groups.py",
        "    _, kv_copy = split(degrees, kv_copies, Axis.TP)\n",
        "    kv_copy = Factor((Axis.TP,), kv_copies, stride=degrees.tp // kv_copies)\n",
        runs({"dp": 1, "tp": 4}, micro=4), "layers.1.attention.value.weight", "missing sum",
    ),
    Fault(
        "labels of the first micro-batch", EXECUTOR,
        "return head.loss(x, inputs.rows, inputs.labels, count)",
        "return head.loss(x, inputs.rows, self._micro(0).labels, count)",
        PIPE, "loss",
    ),
    Fault(
        "a tied table adds what was looked up twice", STORE,
        "flat.index_add_(0, rows_N, g_ND.to(flat.dtype))", "flat.index_add_(0, rows_N, g_ND.to(flat.dtype), alpha=2)",
        runs({"dp": 2}, micro=2, model=TIED), "embedding.weight", "counted twice",
    ),
    # ------------------------------------------------------------------ the context axis
    Fault(
        "positions count from the rank's first token", EXECUTOR,
        "                part = part.columns(held_columns(self.plan, at, part.rows))\n",
        "                import dataclasses\n"
        "                part = part.columns(held_columns(self.plan, at, part.rows))\n"
        "                own = part.rows.positions - part.rows.positions.min()\n"
        "                part = dataclasses.replace(part, rows=dataclasses.replace(part.rows, positions=own))\n",
        CONTEXT, "layers.0",
    ),
    Fault(
        "every rank holds the first coordinate's tokens", SEQUENCES,
        "    columns = ring_columns(plan, rows)[ring_place(plan, at)]\n", "    columns = ring_columns(plan, rows)[0]\n",
        CONTEXT, "embedding",
    ),
    Fault(
        "packed documents see each other", "model/rows.py",
        "    documents = [_moved(device, each.document_ids) for each in (queries, keys)]\n",
        "    documents = [None, None]\n",
        DOCUMENTS, "layers.0",
    ),
    Fault(
        "the last query that sees a block is left out", RECTANGLES,
        "    queries = int(rows[0]), int(rows[-1]) + 1\n", "    queries = int(rows[0]), int(rows[-1])\n",
        DOCUMENTS,
    ),
    Fault(
        "blocks are averaged", KERNELS,
        "torch.sigmoid(other_log_sum - log_sum)", "(0 * torch.sigmoid(other_log_sum - log_sum) + 0.5)",
        CONTEXT, "layers.0",
    ),
    Fault(
        "what sees nothing of a block weighs as if it did", KERNELS,
        "    if mask is not None:\n        log_sum = log_sum.masked_fill(~mask.any(-1), -math.inf)\n", "",
        DOCUMENTS, "layers.0",
    ),
    Fault(
        "gradients of keys do not come home", BLOCKS,
        "        finish(over, under_way)\n        own += coming\n", "        finish(over, under_way)\n",
        CONTEXT, "layers.1.attention.value.weight",
    ),
    Fault(
        "gradients of keys go round with the wrong block", BLOCKS,
        "        leaving = torch.zeros_like(kv) if coming is None else coming\n        add(leaving)\n",
        "        leaving = torch.zeros_like(kv) if coming is None else coming\n        add(own)\n",
        CONTEXT, "layers.1.attention.value.weight",
    ),
    Fault(
        "only one of the ranks that share a key head trains it", HEADS,
        ".sum(3) if copies > 1", ".select(3, 0).clone() if copies > 1",
        EXCHANGE, "layers.1.attention.value.weight",
    ),
    Fault(
        "heads come back in the order of another rank", HEADS,
        "    return arriving.permute(1, 2, 0, 3, 4).flatten(2, 3).contiguous()\n",
        "    return arriving.permute(1, 2, 3, 0, 4).flatten(2, 3).contiguous()\n",
        GROUPED, "layers.0",
    ),
    Fault(
        "gradients that go round are in no ledger", SEQUENCES,
        "* (1 if forward else 2) if", "if",
        CONTEXT, ledger=True,
    ),
    # ------------------------------------------------------------------ lower precisions
    Fault(
        "masters do not reach what computes", STORE,
        "            own[low:high].copy_(run.values, non_blocking=True)\n", "            pass\n",
        HALF, "embedding.weight", "stale",
    ),
    Fault(
        "the loss scale stays in the gradient", EXECUTOR,
        "self.plan.optimizer.clip_norm) / scale", "self.plan.optimizer.clip_norm)",
        SCALED, "embedding.weight", "factor",
    ),
    Fault(
        "what routers add is not scaled", BALANCING,
        "router.balance.scale = scale", "router.balance.scale = 1.0",
        runs({"dp": 2}, micro=2, model=MIXTRAL, moe={"auxiliary_loss": 0.5}, precision={"compute": "float16"}),
        "layers.1.mlp.router.weight",
    ),
    # ------------------------------------------------------------------ what a step tells
    Fault(
        "every tensor rank tells the loss terms", BALANCING,
        "        if not self._counts_here:\n            return\n", "",
        ROUTED_TP, "auxiliary loss", "factor",
    ),
    Fault(
        "the last micro-batch's loss terms are told", BALANCING,
        "terms if self._terms is None else self._terms + terms", "terms",
        ROUTED, "auxiliary loss", "factor",
    ),
    # ------------------------------------------------------------------ what the ledger knows of
    Fault(
        "collectives inside units are in no ledger", CALLS,
        "        yield from tensor.calls(plan, action)\n", "        yield from ()\n",
        TP, ledger=True,
    ),
    Fault(
        "backwards are in no ledger", CALLS,
        "    if action.op in COMPUTE:\n", '    if action.op in COMPUTE and action.op.value != "backward":\n',
        TP, ledger=True,
    ),
]  # fmt: skip
