"""A training run: the loop around the engine, its evaluation, its files, and what it says of itself."""
