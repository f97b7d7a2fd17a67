"""Rows on a device: the model's place in the world, second argument of every unit.

    B  sequences      S  tokens of each      N = B*S  tokens of the residual stream      F  rotary frequencies

What all layers need and none should compute again is computed here, once a micro-batch: rotary tables, attention
masks, and the keys of dropout. Index arithmetic stays in `layout.rows`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshwright.arch.arch import Arch
from meshwright.layout import rows as layout
from meshwright.layout.blocks import Meeting, Sees, blocks, flat
from meshwright.model.counter import token_keys
from meshwright.model.masks import attention_mask
from meshwright.model.rope import rotary_tables


class Sight(NamedTuple):
    """Which keys the queries of a layer see: what its attention core is given."""

    mask: Tensor | None
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Rows:
    """Tensors of one micro-batch; indices are int64. A mask that is None means: causal, nothing else."""

    step: Tensor
    """() the optimizer step; a tensor, because a compiled unit would be compiled again for each integer."""
    sample_ids: Tensor
    """(B,) index of each sequence in the stream; -1 for padding."""
    positions: Tensor
    """(B, S) index inside the token's own document where documents are masked, else the offset."""
    offsets: Tensor
    """(B, S) index inside the sample."""
    document_ids: Tensor | None
    """(B, S), None where all of a sample may be seen."""
    valid: Tensor | None
    """(B, S) bool, False at padding; None where every token is real."""
    token_keys: Tensor
    """(N,) dropout keys of the tokens whose residual stream is held here; a cut of the stream cuts these alike."""
    cos: Tensor | None
    """(B or 1, S, 1, F) rotary table; None for learned positions."""
    sin: Tensor | None
    """The same of sines."""
    mask: Tensor | None
    """(B or 1, 1, S, S) bool, of layers that see all before them; on a context axis as of a `Meeting`."""
    window_mask: Tensor | None
    """The same for layers with a sliding window."""
    blocks: tuple[int, ...] = ()
    """On a context axis, what they see of each ring coordinate's keys: `layout.blocks.flat`."""
    window_blocks: tuple[int, ...] = ()
    """The same for layers with a sliding window."""
    first_feature: int = 0
    """Global index of the first hidden feature held here."""

    def sight(self, windowed: bool) -> Sight:
        """What a layer sees, with its sliding window or without one."""
        return Sight(self.window_mask, self.window_blocks) if windowed else Sight(self.mask, self.blocks)


def rows_to_torch(
    rows: layout.Rows,
    arch: Arch,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    meeting: Meeting | None = None,
) -> Rows:
    """Index arithmetic -> tensors on `device` for a model of `arch` that computes in `dtype`.

    `seed` is the run's (dropout). Tables keep float64 and are float32 in every lower precision. `meeting`: on a context
    axis, what attention works on beside the tokens held.
    """

    step = torch.tensor(rows.step, dtype=torch.int64, device=device)
    sample_ids_B = _move(device, rows.sample_ids)
    positions_BS, offsets_BS = _move(device, rows.positions), _move(device, rows.offsets)
    document_ids_BS, valid_BS = _moved(device, rows.document_ids), _moved(device, rows.valid)
    # Without documents all sequences hold the same columns: one row of tables serves them all.
    alike = rows.document_ids is None and bool((rows.positions == rows.positions[:1]).all())
    cos_BS1F, sin_BS1F = None, None
    if arch.rope is not None:
        table_dtype = torch.promote_types(dtype, torch.float32)
        held_BS = positions_BS[:1] if alike else positions_BS
        cos_BS1F, sin_BS1F = rotary_tables(arch.rope, arch.head_dim, held_BS, table_dtype)

    def sight(window: int) -> Sight:
        if meeting is not None:
            return _met(meeting, window, device)
        ragged = document_ids_BS is not None or valid_BS is not None
        span = int(np.ptp(rows.offsets)) + 1 if rows.offsets.size else 0
        if not ragged and not 0 < window < span:
            return Sight(None)
        columns_BS = offsets_BS[:1] if alike and not ragged else offsets_BS
        seen = attention_mask(
            columns_BS,
            columns_BS,
            window=window,
            query_documents_BS=document_ids_BS,
            key_documents_BZ=document_ids_BS,
            key_valid_BZ=valid_BS,
        )
        return Sight(seen)

    windows = {arch.window(layer) for layer in range(arch.layers)}
    everything = sight(0) if 0 in windows else Sight(None)
    windowed = sight(arch.sliding_window) if windows - {0} else Sight(None)
    return Rows(
        step=step,
        sample_ids=sample_ids_B,
        positions=positions_BS,
        offsets=offsets_BS,
        document_ids=document_ids_BS,
        valid=valid_BS,
        token_keys=token_keys(seed, step, sample_ids_B, offsets_BS),
        cos=cos_BS1F,
        sin=sin_BS1F,
        mask=everything.mask,
        window_mask=windowed.mask,
        blocks=everything.blocks,
        window_blocks=windowed.blocks,
        first_feature=rows.first_feature,
    )


def _met(meeting: Meeting, window: int, device: torch.device | str) -> Sight:
    """The mask (B or 1, 1, queries, all keys), where a block needs one, and the blocks."""
    met, (queries, keys) = blocks(meeting, window), (meeting.queries, meeting.keys)
    if all(block.sees is not Sees.MASKED for block in met):
        return Sight(None, flat(met))
    one = slice(None) if queries.document_ids is not None or queries.valid is not None else slice(1)
    documents = [_moved(device, each.document_ids) for each in (queries, keys)]
    seen = attention_mask(
        _move(device, queries.offsets[one]),
        _move(device, keys.offsets[one]),
        window=window,
        query_documents_BS=documents[0],
        key_documents_BZ=documents[1],
        key_valid_BZ=_moved(device, keys.valid),
    )
    return Sight(seen, flat(met))


def _moved(
    device: torch.device | str, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]] | None
) -> Tensor | None:
    return None if array is None else _move(device, array)


def _move(device: torch.device | str, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
    return torch.from_numpy(np.array(array)).to(device)
