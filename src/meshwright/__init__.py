"""Meshwright: trains transformer language models on a process mesh."""
