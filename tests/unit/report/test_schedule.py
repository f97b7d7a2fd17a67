"""The picture of a pipeline is well-formed, and tells each slot."""

from __future__ import annotations

from xml.etree import ElementTree

from meshwright.config.choices import Schedule
from meshwright.plan.folds.timeline import flop_durations, planned_timeline
from meshwright.report.schedule import draw_svg
from tests.unit.plan.plans import make_plan


def test_planned_beside_measured() -> None:
    plan = make_plan(layers=4, pp=2, chunks=2, schedule=Schedule.ZB_V, accumulation=3)
    timeline = planned_timeline(plan, flop_durations(plan))
    root = ElementTree.fromstring(draw_svg({"planned": timeline, "measured <1>": timeline}))
    name = "{http://www.w3.org/2000/svg}"
    bars = root.findall(f"{name}rect")
    assert len(bars) == 2 * 2 * 3 * 3 * 2  # timelines, stages, micro-batches, parts, chunks
    titles = [title.text for title in root.iter(f"{name}title")]
    assert any(text and text.startswith("weight products, micro-batch 2, chunk 1") for text in titles)
    right = max(float(bar.attrib["x"]) + float(bar.attrib["width"]) for bar in bars)
    assert right <= 1000.01
