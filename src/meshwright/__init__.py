"""Meshwright: trains transformer language models on a process mesh.

    import meshwright as mw
    mesh = mw.Mesh(dp=2)                          # degrees; joins a process group on mesh.start()
    plan = mw.plan("run.toml")                    # frozen: print(plan), plan.math, plan.layout, plan.degrees, ...
    price = mw.price(plan, cluster="h100-sxm")    # memory, traffic, time
    ranking = mw.search("run.toml", gpus=64, cluster="h100-sxm")
    model = mw.parallelize(model, plan, mesh)     # a decoder, in place; model.engine.step(batch, learning_rate)
    parallel = mw.data_parallel(module, mesh)     # any module
    mw.checkpoint.save(model.engine, "runs/mine", step, samples), mw.checkpoint.load(model.engine, "runs/mine")

Importing this package imports no torch; a name that needs it does so when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright import checkpoint
    from meshwright.parallel.data_parallel import data_parallel
    from meshwright.parallel.parallelize import parallelize
    from meshwright.plan.front import plan_run as plan
    from meshwright.price.price import price
    from meshwright.price.search import search
    from meshwright.train.mesh import Mesh

__all__ = ["Mesh", "checkpoint", "data_parallel", "parallelize", "plan", "price", "search"]

_PACKAGES = frozenset({"checkpoint", "plan", "price"})  # `plan` and `price` may be called
_MODULES = {
    "Mesh": "train.mesh",
    "data_parallel": "parallel.data_parallel",
    "parallelize": "parallel.parallelize",
    "search": "price.search",
}


def __getattr__(name: str) -> object:
    if name in _PACKAGES:
        return import_module(f"meshwright.{name}")
    if name in _MODULES:
        return getattr(import_module(f"meshwright.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
