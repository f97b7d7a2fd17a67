"""The ``[model]`` table: a catalogue name, a Hugging Face folder, or the fields themselves."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from meshwright.config.choices import Family, RopeKind, Weights
from meshwright.config.errors import RequestError
from meshwright.config.values import (
    Fraction,
    NonNegative,
    Number,
    Positive,
    PositiveNumber,
    Section,
    Switch,
    Text,
)

__all__ = ["ModelConfig", "RopeScaling"]


class RopeScaling(Section):
    """Rotary scaling; the keys that a kind does not use stay unset."""

    kind: RopeKind
    """linear, llama3 or yarn."""
    factor: PositiveNumber
    """By how much the context grows."""
    original_max_positions: Positive | None = None
    """Positions the model was first trained for (llama3, yarn)."""
    low_frequency_factor: PositiveNumber | None = None
    """llama3: wavelengths above original_max_positions / this are divided by factor."""
    high_frequency_factor: PositiveNumber | None = None
    """llama3: wavelengths below original_max_positions / this are kept."""
    beta_fast: PositiveNumber | None = None
    """yarn: rotations above which a dimension is kept."""
    beta_slow: PositiveNumber | None = None
    """yarn: rotations below which a dimension is interpolated."""
    attention_factor: PositiveNumber | None = None
    """yarn: scale of the rotary tables; unset: 0.1 ln(factor) + 1."""
    mscale: Number | None = None
    """yarn: slope of the attention temperature, numerator."""
    mscale_all_dim: Number | None = None
    """yarn: slope of the attention temperature, denominator."""


class ModelConfig(Section):
    """What is trained. Fields given beside ``preset`` or ``hf`` replace theirs; unset ones are left to it."""

    preset: Text | None = Field(default=None, json_schema_extra={"default": "demo"})
    """A catalogue name; "demo" where neither hf nor family is given."""
    hf: Text | None = None
    """A folder with config.json, or the file itself."""
    family: Family | None = None
    """The architecture family."""
    layers: Positive | None = None
    """Transformer blocks."""
    hidden: Positive | None = None
    """Width of the residual stream."""
    heads: Positive | None = None
    """Query heads."""
    kv_heads: Positive | None = None
    """Key and value heads; must divide heads."""
    head_dim: Positive | None = None
    """Width of a head; unset: hidden / heads."""
    ffn: Positive | None = None
    """Inner width of the MLP."""
    vocab: Positive | None = None
    """Tokens of the vocabulary."""
    rope_theta: PositiveNumber | None = None
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Rotary scaling beyond the trained context."""
    tie_embeddings: Switch | None = None
    """Whether the output head is the embedding."""
    norm_eps: Number | None = None
    """Epsilon of the norms."""
    max_positions: Positive | None = None
    """Longest sequence."""
    sliding_window: NonNegative | None = None
    """Tokens a token sees back, itself included; 0: all."""
    qkv_bias: Switch | None = None
    """Biases on the query, key and value projections."""
    qk_norm: Switch | None = None
    """RMSNorm on each head's query and key."""
    experts: NonNegative | None = None
    """Routed experts of a layer; 0: a dense MLP."""
    experts_per_token: Positive | None = None
    """Routed experts a token goes to."""
    expert_ffn: Positive | None = None
    """Inner width of a routed expert."""
    shared_experts: NonNegative | None = None
    """Experts every token goes to."""
    dense_layers: NonNegative | None = None
    """First layers that keep a dense MLP in a model with experts."""
    weights: Weights = Weights.RANDOM
    """random, or load: the hf folder's weights."""
    dropout: Fraction | None = Field(default=None, json_schema_extra={"default": 0.0})
    """Share of features dropped at the embedding, attention output and MLP output; with hf, unset: its config's."""

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, data: object) -> object:
        if isinstance(data, dict) and all(data.get(key) is None for key in ("preset", "hf", "family")):
            data = {**data, "preset": "demo"}
        if isinstance(data, dict) and data.get("hf") is None and data.get("dropout") is None:
            data = {**data, "dropout": 0.0}
        return data

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if self.preset is not None and self.hf is not None:
            raise RequestError(
                f'model.hf = "{self.hf}"',
                f'cannot stand beside model.preset = "{self.preset}": a model comes from one of them',
                ("model.preset alone", "model.hf alone"),
            )
        if self.weights is Weights.LOAD and self.hf is None:
            raise RequestError(
                'model.weights = "load"',
                "loads the weights of an hf folder, and model.hf is not given",
                ('model.hf = "folder with config.json"', 'model.weights = "random"'),
            )
        return self
