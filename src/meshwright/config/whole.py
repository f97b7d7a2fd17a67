"""Files that are written for users: whole, or as they were before."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from meshwright.config.errors import RequestError

__all__ = ["check_writable", "write_whole"]


def check_writable(file: Path) -> None:
    """Raise RequestError where `file` could not be written: asked before long work, not after it."""
    try:
        if file.is_dir():
            raise RequestError(f'"{file}"', "is a folder; a file is wanted", (str(file / "FILE"),))
        if not file.parent.is_dir():
            raise RequestError(str(file), f"there is no folder {file.parent}", (f"mkdir -p {file.parent}",))
        if _is_special(file):
            return
        target = file.resolve()
        if target.exists() and not os.access(target, os.W_OK):
            raise RequestError(str(file), "may not be written: it is read-only", ("another FILE",))
        _draft(target).touch()
        _draft(target).unlink()
    except OSError as error:
        raise _failed(file, error) from None


def write_whole(file: Path, text: str) -> None:
    """Write `text` beside `file` and put it in its place, so that whoever ends this leaves no half of it.

    Raises RequestError where there is no room or no right to.
    """
    if _is_special(file):
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise _failed(file, error) from None
        return
    target = file.resolve()  # a link stays one
    draft = _draft(target)
    try:
        with draft.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        if target.exists():
            shutil.copymode(target, draft)
        draft.replace(target)
    except OSError as error:
        raise _failed(file, error) from None
    finally:
        draft.unlink(missing_ok=True)


def _is_special(file: Path) -> bool:
    """A device or a pipe, whose place nothing may take."""
    return file.exists() and not file.is_file()


def _draft(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}.part")


def _failed(file: Path, error: OSError) -> RequestError:
    return RequestError(str(file), f"cannot be written: {error.strerror or error}", ("another FILE",))
