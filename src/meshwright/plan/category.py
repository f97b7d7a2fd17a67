"""What a byte of a rank's memory is for."""

from __future__ import annotations

from enum import StrEnum


class Category(StrEnum):
    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    MASTER = "master"
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    BUFFERS = "buffers"
