"""The one exception that means "the request was wrong": exit code 2, one message, no traceback."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["RequestError"]


class RequestError(ValueError):
    """A request that cannot be honoured: what was given, the rule it breaks, and what works instead.

    ``value``    what was given, with its name: ``"mesh.tp = 3"``, ``"heads 12 with tp 5"``
    ``rule``     the rule, as a clause: ``"tp must divide the heads"``
    ``nearest``  the nearest values that work, best first; may be empty
    ``problems`` the single errors, when several are reported together

    ``str()`` is the whole message. It is a ``ValueError`` so that validators may raise it as it is; all arguments
    are kept in ``args``, so it survives pickling between processes.
    """

    def __init__(
        self,
        value: str,
        rule: str,
        nearest: Sequence[object] = (),
        problems: tuple[RequestError, ...] = (),
    ) -> None:
        self.value = value
        self.rule = rule
        self.nearest = tuple(str(each) for each in nearest)
        self.problems = problems
        super().__init__(value, rule, self.nearest, problems)

    def __str__(self) -> str:
        if self.problems:
            return "\n".join([f"{self.value}: {self.rule}", *(f"  {problem}" for problem in self.problems)])
        works = f"; what works: {', '.join(self.nearest)}" if self.nearest else ""
        return f"{self.value}: {self.rule}{works}"

    @classmethod
    def joined(cls, problems: Iterable[RequestError]) -> RequestError:
        """Return one error that tells all ``problems`` (at least one): all are worth mending before the next try."""
        every = tuple(problems)
        if len(every) == 1:
            return every[0]
        return cls("the request", f"has {len(every)} problems", (), every)
