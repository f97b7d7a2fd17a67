"""A process with torch imported and nothing of this project: what it forks can import any copy of it.

    python fault_server.py     one JSON line a trial on stdin:  {"path": .., "request": .., "out": file, "err": file}
                               two on stdout:                   {"pid": ..}  when it runs,  {"code": ..}  at its end

A program by its path, never imported: the directory it lies in is taken off the search path.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def serve() -> None:
    """Fork a child for each line until stdin ends."""
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if not pid:
            _run(order)
        _say({"pid": pid})
        _, status = os.waitpid(pid, 0)
        _say({"code": os.waitstatus_to_exitcode(status)})


def _run(order: dict[str, Any]) -> None:
    """The child: a session of its own, so that all it starts can be ended with it. Does not return."""
    code = 1
    try:
        os.setsid()
        for name, target in ((order["out"], 1), (order["err"], 2)):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), target)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.path.insert(0, order["path"])
        from meshwright.testing.trial import attempt

        attempt(order["path"], order["request"])
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _say(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    sys.path.pop(0)
    import torch
    import torch.distributed
    import torch.fx.experimental.symbolic_shapes
    import torch.profiler

    torch.set_num_threads(1)
    serve()
