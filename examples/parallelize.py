"""Your own loop and data over a model that is cut over several ranks.

    torchrun --nproc-per-node 2 examples/parallelize.py mesh.tp=2 parallel.sequence=true
    torchrun --nproc-per-node 4 examples/parallelize.py mesh.dp=2 mesh.pp=2 parallel.zero=2 parallel.schedule=zb-h1

The plan decides what lies where and what is sent. The loop is that of one process: every rank is given the global batch
and takes its share of it.
"""

import sys

import numpy as np

import meshwright as mw
from meshwright.config.load import load_run
from meshwright.data.batch import Batch
from meshwright.model import build_decoder, initialise

RUN = [
    *("model.layers=4", "model.hidden=64", "model.heads=4", "model.kv_heads=2", "model.head_dim=16", "model.ffn=128"),
    *("model.vocab=64", "data.sequence_length=32", "batch.global=16", "batch.micro=4", "mesh.dp=1"),
]
STEPS = 40


def main() -> None:
    plan = mw.plan(load_run(None, [*RUN, *sys.argv[1:]]))
    mesh = mw.Mesh.of(plan).start()
    model = build_decoder(plan.arch, device="cpu")
    initialise(model, plan.arch, seed=1)  # or weights of your own: equal on every rank
    model = mw.parallelize(model, plan, mesh)
    if mesh.rank == 0:
        print(plan)

    random = np.random.default_rng(0)
    for step in range(STEPS):  # count up, from a random token on, in steps of one or two
        first, by = random.integers(0, plan.arch.vocab, (16, 1)), random.integers(1, 3, (16, 1))
        batch = Batch.of_tokens((first + by * np.arange(33)) % plan.arch.vocab, step)
        result = model.engine.step(model.engine.share(batch), learning_rate=3e-3)
        if mesh.rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {result.loss:.3f}, norm {result.grad_norm:.3f}")

    mw.checkpoint.save(model.engine, "runs/counting", step=STEPS, samples=16 * STEPS)
    mesh.close()


if __name__ == "__main__":
    main()
