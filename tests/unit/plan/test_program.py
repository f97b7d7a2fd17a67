"""Small step programs, drawn."""

from __future__ import annotations

from meshwright.config.choices import Recompute
from meshwright.plan.action import Action, Kind, Op, What
from meshwright.plan.plan import Plan
from meshwright.plan.program import Program, program, role_program
from tests.unit.plan.plans import make_plan

UNITS = {0: "emb", 3: "head"}  # of two blocks


def drawn(plan: Plan, rank: int = 0, kind: Kind = Kind.TRAIN) -> str:
    """One word an action: letter, unit or bucket, micro-batch; a wait is the word it ends in brackets."""
    steps = program(plan, rank, kind)
    return " ".join(word(steps, action) for action in steps.actions)


def word(steps: Program, action: Action) -> str:
    unit = UNITS.get(action.unit, str(action.unit))
    match action.op:
        case Op.WAIT:
            return f"({word(steps, steps.actions[action.of])})"
        case Op.FORWARD | Op.RECOMPUTE | Op.BACKWARD:
            letter = {Op.FORWARD: "F", Op.RECOMPUTE: "R", Op.BACKWARD: "B"}[action.op]
            return f"{letter}{action.micro}.{unit}"
        case Op.SEND | Op.RECEIVE:
            arrow = ">" if action.op is Op.SEND else "<"
            return f"{'act' if action.what is What.ACTIVATION else 'cot'}{arrow}{action.peer}.{action.micro}"
        case Op.SUM if action.what is What.LOSS:
            return f"loss.{action.group}"
        case Op.SUM:
            return f"sum{action.bucket}.{action.group}"
        case Op.COUNT | Op.NORM:
            return action.op.value
        case _:
            return f"{action.op.value}{action.bucket}"


def lines(text: str) -> str:
    return " ".join(text.split())


def test_one_process() -> None:
    assert drawn(make_plan(accumulation=2)) == lines("""
        count
        F0.emb F0.1 F0.2 F0.head B0.head B0.2 B0.1 B0.emb
        F1.emb F1.1 F1.2 F1.head B1.head B1.2 B1.1 B1.emb
        norm update0 update1 update2 update3
    """)


def test_data_parallel_sums_in_the_last_micro_batch() -> None:
    assert drawn(make_plan(accumulation=2, dp=2)) == lines("""
        count (count)
        F0.emb F0.1 F0.2 F0.head B0.head B0.2 B0.1 B0.emb
        F1.emb F1.1 F1.2 F1.head B1.head sum3.dense B1.2 sum2.dense B1.1 sum1.dense B1.emb sum0.dense
        loss.tokens (loss.tokens)
        (sum3.dense) (sum2.dense) (sum1.dense) (sum0.dense)
        norm (norm) update0 update1 update2 update3
    """)


def test_stage_1_publishes() -> None:
    assert drawn(make_plan(dp=2, zero=1)).endswith(
        lines("""
        norm (norm) update0 publish0 update1 publish1 update2 publish2 update3 publish3
        (publish0) (publish1) (publish2) (publish3)
    """)
    )


def test_stage_2_ends_each_sum_before_the_next() -> None:
    """... and the sum of the embedding before the next micro-batch's first."""
    assert drawn(make_plan(accumulation=2, dp=2, zero=2)).startswith(
        lines("""
        count (count)
        F0.emb F0.1 F0.2 F0.head
        B0.head sum3.dense B0.2 (sum3.dense) sum2.dense B0.1 (sum2.dense) sum1.dense B0.emb (sum1.dense) sum0.dense
        F1.emb F1.1 F1.2 F1.head
        B1.head (sum0.dense) sum3.dense B1.2 (sum3.dense) sum2.dense B1.1 (sum2.dense) sum1.dense B1.emb (sum1.dense)
        sum0.dense loss.tokens (loss.tokens) (sum0.dense) norm (norm)
        update0 publish0 update1 publish1
    """)
    )


def test_stage_3_gathers_ahead_and_releases_behind() -> None:
    assert drawn(make_plan(dp=2, zero=3)).startswith(
        lines("""
        count (count)
        gather0 (gather0) gather1 F0.emb release0
        (gather1) gather2 F0.1 release1
        (gather2) gather3 F0.2 release2
        (gather3) F0.head
        gather2 B0.head release3 sum3.dense
        (gather2) gather1 B0.2 release2 (sum3.dense) sum2.dense
        (gather1) B0.1 release1 (sum2.dense) sum1.dense
        B0.emb (sum1.dense) sum0.dense
    """)
    )


def test_two_stages_one_forward_one_backward() -> None:
    plan = make_plan(accumulation=2, pp=2)
    assert drawn(plan, 0) == lines("""
        count
        cot<1.0 F0.emb F0.1 act>1.0
        F1.emb F1.1 (act>1.0) act>1.1
        cot<1.1 (cot<1.0) B0.1 B0.emb
        (cot<1.1) B1.1 B1.emb
        (act>1.1) loss.pp (loss.pp)
        norm (norm) update0 update1
    """)
    assert drawn(plan, 1) == lines("""
        count act<0.0 act<0.1 (act<0.0) F0.2 F0.head
        B0.head B0.2 cot>0.0
        (act<0.1) F1.2 F1.head
        B1.head B1.2 (cot>0.0) cot>0.1
        (cot>0.1) loss.pp (loss.pp)
        norm (norm) update0 update1
    """)


def test_recomputation_is_an_action_of_blocks() -> None:
    assert drawn(make_plan(recompute=Recompute.FULL)).startswith(
        "count F0.emb F0.1 F0.2 F0.head B0.head R0.2 B0.2 R0.1 B0.1 B0.emb"
    )


def test_an_evaluation_only_goes_forward() -> None:
    plan = make_plan(dp=2, pp=2, zero=1)
    assert drawn(plan, 2, Kind.EVALUATE) == lines("""
        count (count) act<0.0 (act<0.0) F0.2 F0.head loss.tokens (loss.tokens) loss.pp (loss.pp)
    """)


def test_a_tied_tensor_is_summed_last_on_both_stages() -> None:
    plan = make_plan(dp=2, pp=2, arch={"tie_embeddings": True})
    for rank in (0, 2):
        text = drawn(plan, rank)
        tied = next(bucket.index for bucket in program(plan, rank).buckets if bucket.tied)
        assert f"(sum{tied}.dense)" in text
        assert text.index(f"(sum{tied}.dense)") < text.index(f"sum{tied}.tied (sum{tied}.tied) norm")


def test_ranks_of_a_role_share_one_program() -> None:
    plan = make_plan(dp=2, pp=2)
    assert program(plan, 0) is program(plan, 1)
    assert program(plan, 2) is role_program(plan, 1, Kind.TRAIN)
