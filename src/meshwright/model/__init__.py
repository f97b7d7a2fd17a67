"""The plain model: a decoder built from an Arch, its place in the world, and numbers that know no layout."""

from meshwright.model.decoder import Decoder, build_decoder
from meshwright.model.initialise import initialise
from meshwright.model.rows import Rows, rows_to_torch

__all__ = ["Decoder", "Rows", "build_decoder", "initialise", "rows_to_torch"]
