"""Tokens on disk: raw files, Megatron's format, the cache of tokenised text; and the one stream made of them."""
