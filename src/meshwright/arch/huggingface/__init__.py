"""Hugging Face configurations (config.json) in and out."""

from meshwright.arch.huggingface.read import ConfigWarning, arch_from_hf, read_hf_config
from meshwright.arch.huggingface.write import hf_config

__all__ = ["ConfigWarning", "arch_from_hf", "hf_config", "read_hf_config"]
