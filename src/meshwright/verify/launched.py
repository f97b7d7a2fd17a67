"""The ladder on the ranks that a launcher started: they are there already, on one host or several.

    rank 0       twin -> rungs -> references -> rung 0, rung 1, .. -> gathers the reports, judges -> verdict
    others       twin -> rungs -> .......... -> rung 0, rung 1, .. -> their reports              -> hear it

Every host has references of its own, made by its lowest rank: no disk need be shared. Rungs that need fewer ranks leave
the others waiting; a run of more ranks than there are is verified as a twin of as many.
"""

from __future__ import annotations

import pickle
import platform
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from meshwright.comm.agree import Side
from meshwright.comm.mesh import device_of
from meshwright.config.choices import DeviceKind
from meshwright.config.errors import RequestError
from meshwright.launch.environment import Place
from meshwright.launch.meeting import Meeting
from meshwright.launch.status import RankStatus
from meshwright.layout.axes import Axis
from meshwright.plan.plan import Plan
from meshwright.verify.ladder import Rung, ladder
from meshwright.verify.twin import twin
from meshwright.verify.verify import References, Report, climb_all, judge_all, references_of

__all__ = ["twin_for", "verify_launched"]


def twin_for(plan: Plan, world: int) -> tuple[Plan, str]:
    """The plan as `world` ranks can verify it, and what was made smaller. Raises RequestError where they cannot."""
    small, told = twin(plan, world)
    if small.degrees.ranks > world:
        used = [axis.value for axis in Axis if plan.degrees.on(axis) > 1]
        raise RequestError(
            f"verify on {world} ranks of a launcher",
            f"with {' and '.join(used)} the smallest twin of this run has {small.degrees.ranks} ranks",
            (f"{small.degrees.ranks} ranks", "meshwright verify, without a launcher"),
        )
    return small, told


def verify_launched(
    place: Place, status: RankStatus, plan: Plan, told: str, device: DeviceKind,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[bool, Report | None]:  # fmt: skip
    """Climb the ladder of `plan`, made by `twin_for`, as the rank at `place`: whether all is equal; rank 0's report.

    `say` is heard on rank 0 alone. Raises JoinError where ranks do not come, or what ended this rank.
    """
    rungs = ladder(plan)
    if place.rank == 0:
        say(told or f"{plan.degrees.ranks} of {place.world} ranks")
        say(f"{len(rungs)} rungs on up to {plan.degrees.ranks} ranks; optimizer and precision are the ladder's own")
    status.at(None, "start-up")
    kind = device_of(device).type
    with Meeting.at(place, kind) as meeting, tempfile.TemporaryDirectory(prefix="meshwright-verify-") as folder:
        status.at(None, "training the reference")
        references = _references(meeting, rungs, Path(folder))
        reports = climb_all(meeting, rungs, references, kind, at=lambda phase: status.at(None, phase))
        status.at(None, "gathering the reports")
        with meeting.group(place.world):
            side = Side()
            gathered = [pickle.loads(each) for each in side.gather(pickle.dumps(reports))]
            report = Report(plan, told, judge_all(rungs, references, gathered)) if place.rank == 0 else None
            ok = bool(side.broadcast(b"equal" if report is not None and report.ok else b""))
            side.close()
    return ok, report


def _references(meeting: Meeting, rungs: Sequence[Rung], folder: Path) -> list[References]:
    """Those of this host: its lowest rank makes them below `folder` and tells where they are."""
    meeting.tell(f"host of {meeting.rank}", platform.node())
    hosts = [meeting.hear(f"host of {rank}") for rank in range(meeting.world)]
    maker = hosts.index(hosts[meeting.rank])
    if maker == meeting.rank:
        references = [references_of(rung.plan, folder) for rung in rungs]
        meeting.tell(f"references of {maker}", str(folder))
        return references
    place = Path(meeting.hear(f"references of {maker}"))
    return [references_of(rung.plan, place) for rung in rungs]
