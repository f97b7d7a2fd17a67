"""The declared halves of the strategies: what is legal, who holds what, and what a unit sends while it runs."""
