"""Digests of frozen plan data, stable across processes, machines and Python versions."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from enum import Enum


def plain(value: object) -> object:
    """Frozen plan data as JSON values: dataclasses become objects, enums their text, tuples lists."""
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return value


def digest(*values: object) -> str:
    """16 hexadecimal digits of blake2b over the canonical JSON of `values`."""
    text = json.dumps([plain(value) for value in values], sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
