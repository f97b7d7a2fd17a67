"""Using a checkpoint without training: its model on one process, its loss on any layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from meshwright.arch.parameters import tensors
from meshwright.checkpoint.beside import beside_of, place_beside
from meshwright.checkpoint.fits import planned_checkpoint
from meshwright.checkpoint.folder import load_manifest
from meshwright.checkpoint.loader import load_weights
from meshwright.checkpoint.source import Source, checkpoint_source, fill
from meshwright.checkpoint.state import bias_pieces
from meshwright.checkpoint.storage import Local, Storage, open_storage
from meshwright.comm.agree import Side
from meshwright.comm.mesh import Mesh, device_of
from meshwright.config.choices import DeviceKind, OptimizerKind
from meshwright.config.errors import RequestError
from meshwright.data import Dataset, Split, batch_place, evaluation_ids, open_dataset
from meshwright.data.tokenizer.bytewise import ByteTokenizer
from meshwright.launch.environment import Place
from meshwright.launch.join import join, leave
from meshwright.launch.status import RankStatus
from meshwright.layout.moves import Piece
from meshwright.layout.rectangles import full
from meshwright.layout.rows import part_of
from meshwright.model import Decoder, build_decoder
from meshwright.model.routers import prepare_routers
from meshwright.parallel.dtypes import TORCH_DTYPES
from meshwright.parallel.engine import Engine
from meshwright.plan.plan import Plan
from meshwright.plan.rules import canonical
from meshwright.train.evaluate import EvalResult

__all__ = ["Evaluating", "decoder_of", "evaluate_rank", "plan_of", "splits_of", "tokenizer_of"]

_TOKENIZER_KEYS = ("--tokenizer FILE", "data.tokenizer=FILE")


@dataclass(frozen=True)
class Evaluating:
    """What a rank needs to evaluate a checkpoint: the plan, cut as asked, and which splits of the data."""

    plan: Plan
    address: str
    path: str
    cache: Path
    splits: tuple[str, ...]
    device: DeviceKind = DeviceKind.AUTO


def plan_of(storage: Storage, path: str) -> Plan:
    """The plan that a checkpoint was saved under. Raises DamagedError, CheckpointError."""
    return planned_checkpoint(storage, path)[1]


def decoder_of(storage: Storage, path: str, plan: Plan, device: torch.device | str = "cpu") -> Decoder:
    """The plain model with the checkpoint's weights, each block of a file checked as it is read.

    It computes in the plan's compute type; on a CPU in float32 where that is narrower, for it is faster there.
    """
    dtype = TORCH_DTYPES[plan.precision.compute]
    if torch.device(device).type == "cpu":
        dtype = torch.promote_types(dtype, torch.float32)
    decoder = build_decoder(plan.arch, dtype=dtype, device=device)
    held = dict(decoder.named_parameters())
    source = _source(storage, path)
    wanted = {Piece(each.name, full(each.shape)): held[each.name].data for each in tensors(plan.arch)}
    biases = prepare_routers(plan, dict(enumerate(decoder.units)), device)
    wanted |= {piece: biases[name] for name, piece in bias_pieces(plan).items() if source.of([piece.tensor])}
    fill(source, wanted)
    return decoder.eval()


def tokenizer_of(storage: Storage, path: str, plan: Plan) -> str:
    """The name of the tokenizer that a checkpoint's model reads: what lies beside imported weights, else that of the
    training data. Raises RequestError for imported weights of which none is known or none can be read where it lies,
    DamagedError where it is not what was imported."""
    place = place_beside(path)
    names = beside_of(storage, path, load_manifest(storage, path))
    if "tokenizer.json" in names:
        if not isinstance(storage, Local):
            rule = "is at an address, and a tokenizer is read from a folder of this machine"
            raise RequestError(storage.where(f"{place}/tokenizer.json"), rule, _TOKENIZER_KEYS)
        return storage.where(place)
    named = plan.data.tokenizer
    if names and named == "bytes" and plan.arch.vocab != ByteTokenizer.vocab_size:  # a default that nobody chose
        raise RequestError(storage.where(path), "was imported without a tokenizer.json", _TOKENIZER_KEYS)
    return named


def evaluate_rank(
    place: Place, status: RankStatus, asked: Evaluating, told: Callable[[int, int], None] = lambda done, of: None
) -> EvalResult:
    """The mean loss over the asked splits, as the rank at `place`; equal on every rank."""
    status.at(None, "start-up")
    if place.world > 1:
        join(place, device_of(asked.device).type)
    # Nothing is updated, so the optimizer without states; the weights stay in the type they are kept in.
    sgd = replace(asked.plan.optimizer, kind=OptimizerKind.SGD, weight_decay=0.0)
    plan = canonical(replace(asked.plan, optimizer=sgd))
    mesh = Mesh.of(plan).start()
    status.at(None, "opening the data")
    splits = splits_of(asked)
    status.at(None, "loading the weights")
    engine, side = Engine(plan, mesh, device_of(asked.device)), Side()
    load_weights(engine, _source(open_storage(asked.address), asked.path), side)
    status.at(None, "evaluation")
    result = _evaluate(engine, splits, told)
    side.close()
    leave()
    return result


def splits_of(asked: Evaluating) -> list[Split]:
    """The data asked for. Raises RequestError where it cannot be read, is empty, or does not fit the model."""
    dataset = open_dataset(asked.plan.data, asked.cache)
    dataset.check_vocabulary(asked.plan.arch.vocab)
    splits = [_split(dataset, name) for name in asked.splits]
    if not any(split.num_samples for split in splits):
        raise RequestError(
            f"--split {' '.join(asked.splits)}", "holds no sample", ("--split all", "data.eval_fraction")
        )
    return splits


def _split(dataset: Dataset, name: str) -> Split:
    return dataset.train if name == "train" else dataset.eval


def _source(storage: Storage, path: str) -> Source:
    return checkpoint_source(storage, path, load_manifest(storage, path))


def _evaluate(engine: Engine, splits: list[Split], told: Callable[[int, int], None]) -> EvalResult:
    plan = engine.plan
    place, ways = batch_place(plan, engine.mesh.rank)
    size = plan.batch.sequences
    batches = [(split, start) for split in splits for start in range(0, split.num_samples, size)]
    total, count = 0.0, 0
    for number, (split, start) in enumerate(batches):
        ids = evaluation_ids(split.num_samples, start, size)
        part = engine.evaluate(split.read(ids[part_of(size, place, ways)]))
        total += part.loss_sum
        count += part.trained_tokens
        told(number + 1, len(batches))
    return EvalResult(total / max(count, 1), count)
