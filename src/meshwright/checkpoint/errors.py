"""What goes wrong with checkpoints: damage, failed saves, refusals."""

from __future__ import annotations

__all__ = ["AddressError", "CheckpointError", "DamagedError", "SaveError", "os_words", "spelled"]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read, written or continued; the message is for the user."""


class AddressError(CheckpointError):
    """An address at which there is no checkpoint, or can be none: it as it was written, and why, as a clause."""

    def __init__(self, address: str, rule: str) -> None:
        self.address, self.rule = spelled(address), rule
        super().__init__(f"{self.address} {rule}")


class DamagedError(CheckpointError):
    """What a file holds is not what was written, or nothing that could have been written: where, and the proof.

    `file` is the path or address; `tensor` what lies at the damaged place; digests are hexadecimal where two of them
    were compared, else "".
    """

    def __init__(self, file: str, problem: str, *, tensor: str = "", expected: str = "", actual: str = "") -> None:
        self.file, self.problem, self.tensor, self.expected, self.actual = file, problem, tensor, expected, actual
        place = f", holding {tensor}" if tensor else ""
        digests = f": expected {expected}, actual {actual}" if expected or actual else ""
        super().__init__(f"{file}: {problem}{place}{digests}")

    def fields(self) -> dict[str, str]:
        """What it was made of: `DamagedError(**fields)` is equal."""
        return {name: getattr(self, name) for name in ("file", "problem", "tensor", "expected", "actual")}


class SaveError(CheckpointError):
    """A checkpoint was not written; older ones are as they were. Equal on every rank."""


def spelled(name: str) -> str:
    """A name as it is where a reader can see all of it, else with escapes."""
    return name if name.isprintable() and name.strip() else repr(name)


def os_words(error: OSError, place: str) -> str:
    """What the system refused, and of which file; `place` where it does not say."""
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return f"{' -> '.join(names) or place}: {error.strerror or error}"
