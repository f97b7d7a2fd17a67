"""Meshwright: trains transformer language models on a process mesh.

    import meshwright as mw
    mesh = mw.Mesh(dp=2)                # degrees; joins the default process group on mesh.start()
    plan = mw.plan("run.toml")          # frozen: plan.math, plan.layout, plan.degrees, ...

Importing this package imports no torch; a name that needs it does so when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.comm.mesh import Mesh
    from meshwright.parallel.data_parallel import data_parallel
    from meshwright.plan.front import plan_run as plan
    from meshwright.price.price import price
    from meshwright.price.search import search

__all__ = ["Mesh", "data_parallel", "plan", "price", "search"]


def __getattr__(name: str) -> object:
    if name in ("plan", "price"):
        return import_module(f"meshwright.{name}")  # a package that may be called
    if name == "Mesh":
        from meshwright.comm.mesh import Mesh

        return Mesh
    if name == "search":
        from meshwright.price.search import search

        return search
    if name == "data_parallel":
        from meshwright.parallel.data_parallel import data_parallel

        return data_parallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
