"""The planner's own choice beside published runs: what it predicts of both, and what it would gain.

python benchmarks/choices.py --every 10        every tenth published run, a few seconds each
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from meshwright.arch.resolve import arch_from_model
from meshwright.config.choices import Recompute
from meshwright.config.errors import RequestError
from meshwright.config.load import change_run, load_run
from meshwright.config.schema import RunConfig
from meshwright.price.catalogue import cluster_of
from meshwright.price.cluster import Cluster
from meshwright.price.price import Price
from meshwright.price.ranking import short
from meshwright.price.request import planned
from meshwright.price.search import search

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit" / "price"))


def as_it_ran(run: RunConfig, gpus: int, cluster: Cluster) -> Price:
    """The published layout. A run that ran did fit: where recomputation is not stated, it was the least that fits."""
    kinds = [run.parallel.recompute, *(each for each in Recompute if each is not Recompute.NONE)]
    tried = [change_run(run, [f"parallel.recompute={kind.value}"]) for kind in kinds]
    prices = [Price(planned(each, arch_from_model(each.model), gpus), cluster) for each in tried]
    return next((each for each in prices if each.fits), prices[0])


def main() -> None:
    """Print a line a run: measured, predicted, the choice's, the gain."""
    import published

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=10)
    every = parser.parse_args().every
    timed = [row for row in published.rows() if row["measured"].get("iter_time_s")]
    for row in timed[::every]:
        asked = published.words(row)
        name, gpus = asked[1], int(asked[3])
        words = asked[4:]
        cluster = cluster_of(name, [word for word in words if word.startswith("cluster.")])
        run = load_run(None, [word for word in words if not word.startswith("cluster.")])
        try:
            own = as_it_ran(run, gpus, cluster)
            best = search(run, gpus, cluster, top=1, budget=30_000).best
        except RequestError as error:
            print(f"{row['id']}: {error}")
            continue
        name = str(row["id"])[:52]
        gain = own.step_seconds / best.price.step_seconds - 1
        print(
            f"{name:<52} measured {row['measured']['iter_time_s']:8.2f} s  "
            f"predicted {own.step_seconds:8.2f} s  choice {best.price.step_seconds:8.2f} s  {gain:+6.1%}  "
            f"{short(best.keys)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
