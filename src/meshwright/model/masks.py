"""Which keys a query may see, as one boolean tensor a micro-batch, or none where a causal flag says it all.

B  sequences      S  queries of each      Z  keys of each
"""

from __future__ import annotations

from torch import Tensor


def attention_mask(
    query_offsets_BS: Tensor,
    key_offsets_BZ: Tensor,
    *,
    window: int = 0,
    query_documents_BS: Tensor | None = None,
    key_documents_BZ: Tensor | None = None,
    key_valid_BZ: Tensor | None = None,
) -> Tensor:
    """(B, 1, S, Z) bool, True where query may see key: not later, inside the window, of one document, no padding.

    A token always sees itself, so that no row is empty and padding stays finite. `window` counts tokens, the query
    included; 0 is none. Offsets are those inside the sample, so queries and keys may be any columns of it.
    """
    queries_BS1, keys_B1Z = query_offsets_BS[:, :, None], key_offsets_BZ[:, None, :]
    seen = queries_BS1 >= keys_B1Z  # comparisons alone: a difference would be eight times as large as the mask
    if window:
        seen &= queries_BS1 - window < keys_B1Z
    if query_documents_BS is not None and key_documents_BZ is not None:
        seen &= query_documents_BS[:, :, None] == key_documents_BZ[:, None, :]
    if key_valid_BZ is not None:
        seen &= key_valid_BZ[:, None, :]
        seen |= queries_BS1 == keys_B1Z
    return seen[:, None]
