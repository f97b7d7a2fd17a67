"""The rules that lower a plan to a step program."""
