"""From what a user typed to a plan and a cluster. Prices are told for what does not run yet, too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from meshwright.arch.arch import Arch
from meshwright.arch.resolve import arch_from_model
from meshwright.config.choices import Balanced
from meshwright.config.errors import RequestError
from meshwright.config.load import load_run
from meshwright.config.schema import RunConfig
from meshwright.plan.plan import Plan
from meshwright.plan.resolve import resolve
from meshwright.price.catalogue import cluster_of
from meshwright.price.cluster import Cluster
from meshwright.price.legal import spare_stages, stage_counts


def requested(
    path: Path | None, words: Sequence[str], cluster: str = "local", gpus: int | None = None
) -> tuple[RunConfig, Plan, Cluster]:
    """The run, its plan and the cluster of `section.key=value` words, those of `cluster.*` among them.

    With `gpus` and no data-parallel degree asked for, dp is what the other degrees leave. Raises RequestError.
    """
    own, others = of_cluster(words)
    if gpus is not None and path is None and not any(word.startswith("mesh.dp=") for word in others):
        others.append("mesh.dp=fill")
    where = cluster_of(cluster, own)
    run = load_run(path, others)
    arch = arch_from_model(run.model)
    return run, planned(run, arch, gpus, where), where


def of_cluster(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The `cluster.*` words, and the others."""
    own = [word for word in words if word.startswith("cluster.")]
    return own, [word for word in words if word not in own]


def planned(run: RunConfig, arch: Arch, gpus: int | None = None, cluster: Cluster | None = None) -> Plan:
    """The plan of a run. The virtual stages of a usual trainer on `cluster` may outnumber blocks: see `legal`."""
    pp, chunks = run.mesh.pp, run.parallel.chunks
    spare = 0 if cluster is None else spare_stages(cluster, pp, arch.layers)
    if isinstance(run.parallel.stages, Balanced) and arch.layers < pp * chunks <= arch.layers + spare:
        counts = stage_counts(arch.layers, pp * chunks, 0.0)
        run = run.model_copy(update={"parallel": run.parallel.model_copy(update={"stages": counts})})
    try:
        return resolve(run, arch, gpus)
    except RequestError as error:
        raise _of_devices(error) from None


def _of_devices(error: RequestError) -> RequestError:
    """The error of a command that starts no ranks: it takes their number from --gpus."""
    rule = error.rule.replace("ranks were started", "are asked for with --gpus")
    works = []
    for each in error.nearest:
        if each != "a launcher":
            number = each.removesuffix(" ranks")
            works.append(f"--gpus {number}" if number != each else each.replace("--ranks", "--gpus"))
    return RequestError(error.value, rule, works, error.problems)
