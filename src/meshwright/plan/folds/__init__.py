"""Folds over the step program: whatever is predicted of a step is computed from the actions that are executed."""
