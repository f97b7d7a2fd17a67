"""What asynchronous tensor parallelism hides: hops under parts of products, never more than there is."""

from __future__ import annotations

import pytest

from meshwright.config.load import load_run
from meshwright.price.catalogue import cluster_of
from meshwright.price.price import Price
from meshwright.price.search import search
from tests.unit.price.ask import ask

RUN = (
    "model.preset=llama3-8b", "mesh.tp=8", "batch.global=8", "batch.micro=1", "precision.compute=bfloat16",
    "cluster.software.following=literal",
)  # fmt: skip


def exposed(price: Price) -> float:
    return price.parts["tp"]


def both(*words: str) -> tuple[float, float]:
    """Exposed seconds of the tensor axis: at once, and round a ring."""
    plain, ring = (ask(*RUN, *words, f"parallel.asynchronous_tensor={on}") for on in ("false", "true"))
    assert ring.parts["compute"] == plain.parts["compute"]
    return exposed(plain), exposed(ring)


def test_large_products_hide_most_of_it() -> None:
    plain, ring = both("mesh.tp=2", "data.sequence_length=8192")
    assert 0.05 * plain < ring < 0.2 * plain


def test_small_products_hide_less() -> None:
    """Eight ranks: attention's products are shorter than their hops, the feed-forward's cover them."""
    plain, ring = both("model.preset=llama3-70b", "data.sequence_length=8192")
    assert 0.4 * plain < ring < 0.8 * plain


def test_slow_links_show_what_products_do_not_cover() -> None:
    """A link a hundred times slower: products hide their own length, and all else is seen."""
    words = ("data.sequence_length=8192", "cluster.node.link_bytes_per_s=4e9")
    plain, ring = both(*words)
    saved = plain - ring
    assert 0 < saved < ask(*RUN, *words).parts["compute"]
    assert ring > 0.5 * plain


def test_few_tokens_lose_by_being_cut() -> None:
    """Products of a few rows a chunk cost what whole ones do, and every hop is a call."""
    plain, ring = both("data.sequence_length=256")
    assert ring > plain


def test_a_search_offers_it_with_sequence_parallel_alone() -> None:
    run = load_run(None, ["model.preset=llama3-8b", "batch.global=8", "parallel.asynchronous_tensor=true"])
    rows = search(run, 8, cluster_of("h100-sxm"), top=20).rows
    assert any(row.keys["mesh.tp"] > 1 for row in rows)
    assert all(row.keys["parallel.sequence"] for row in rows if row.keys["mesh.tp"] > 1)


@pytest.mark.parametrize("sequence", ["true", "false"])
def test_without_the_option_nothing_changes(sequence: str) -> None:
    words = (*RUN, "data.sequence_length=8192", f"parallel.sequence={sequence}")
    assert ask(*words, "parallel.asynchronous_tensor=false").step_seconds == ask(*words).step_seconds
