"""The checker of the walls finds what it shall find, and nothing else."""

import re
from pathlib import PurePath

import pytest

from tests.unit.walls import MAY_IMPORT, foreign_words, violations


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("plan/a.py", "def f():\n    global x\n    x = 1", "global statement"),
        ("plan/utils.py", "", "name the idea"),
        ("plan/a.py", "x = 1\n" * 401, "401 lines"),
        ("plan/a.py", "def f():\n" + "    x = 1\n" * 80, "function f has 81 lines"),
        ("plan/a.py", "import torch", "plan imports torch"),
        ("plan/a.py", "def f():\n    from torch import nn", "plan imports torch"),
        ("config/a.py", "import torch.nn", "config imports torch"),
        ("__init__.py", "import torch", "the package itself imports torch"),
        ("cli/main.py", "import torch", "cli imports torch"),
        ("layout/a.py", "from meshwright.plan.hash import f", "layout imports plan"),
        ("layout/a.py", "from meshwright import plan", "layout imports plan"),
        ("layout/a.py", "from ..plan import f", "layout imports plan"),
        ("layout/sub/a.py", "from ...plan.x import f", "layout imports plan"),
        ("layout/a.py", "def f():\n    import meshwright.plan.hash", "layout imports plan"),
        ("comm/a.py", "from meshwright.model import x", "comm imports model"),
        ("parallel/a.py", "from meshwright.price.time import x", "parallel imports price"),
        ("launch/a.py", "from meshwright.train import x", "launch imports train"),
        ("train/a.py", "from meshwright.survive import x", "train imports survive"),
        ("train/a.py", "from meshwright.testing.exact import x", "imports testing"),
        ("cli/a.py", "from meshwright import testing", "imports testing"),
        ("train/a.py", "import torch.distributed as dist\ndist.all_reduce(x)", "dist.all_reduce"),
        ("train/a.py", "import torch\ntorch.distributed.barrier()", "torch.distributed.barrier"),
        ("train/a.py", "from torch import distributed as d\nd.isend(x)", "d.isend"),
        ("train/a.py", "from torch.distributed import all_gather as g", "imports the collective all_gather"),
        ("train/a.py", "import os\nx = os.environ['A']", "os.environ"),
        ("train/a.py", "import os\nx = os.getenv('A')", "os.getenv"),
        ("train/a.py", "from os import environ", "os.environ"),
        ("plan/a.py", "from pydantic import BaseModel", "pydantic is used in config only"),
        ("train/a.py", "from torch.utils._pytree import tree_leaves", "a private name of torch"),
        ("comm/a.py", "from torch.utils import _pytree", "a private name of torch"),
        ("plan/a.py", "__all__ = ['f']\ndef f(): ...\ndef g(): ...", r"not in __all__: \['g'\]"),
        ("plan/a.py", "__all__ = ['f', 'g']\ndef f(): ...", r"not bound: \['g'\]"),
        ("plan/a.py", "__all__ = ['f', 'f']\ndef f(): ...", "twice"),
    ],
)
def test_a_broken_wall_is_found(file: str, text: str, complaint: str) -> None:
    found = violations(PurePath(file), text)
    assert len(found) == 1
    assert re.search(complaint, found[0])


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("plan/a.py", "from meshwright.layout.axes import Axis\nfrom meshwright.plan.hash import f\nimport numpy"),
        ("config/a.py", "from pydantic import BaseModel"),
        ("comm/a.py", "import torch.distributed as dist\ndist.all_reduce(x)\ndist.new_group([0])"),
        ("launch/environment.py", "import os\nx = os.environ.get('A')"),
        ("train/a.py", "import torch.distributed as dist\ndist.get_rank()\nx.gather(0, y)\ntorch.gather(x, 0, y)"),
        ("train/a.py", "from meshwright.price.time import x\nfrom meshwright.launch.join import join"),
        ("cli/main.py", "def f():\n    import torch\n    from meshwright.train import loop"),
        ("cli/main.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("cli/main.py", "from meshwright.launch.environment import detect"),
        ("__init__.py", "__all__ = ['Mesh']\ndef __getattr__(name):\n    import torch.nn\n    return name"),
        ("plan/__init__.py", "from meshwright.plan.hash import f\n__all__ = ['f']"),
        ("plan/a.py", "x = 1\n" * 400),
    ],
)
def test_what_is_allowed_is_not_complained_of(file: str, text: str) -> None:
    assert violations(PurePath(file), text) == []


def test_the_order_of_packages() -> None:
    assert MAY_IMPORT["config"] == set()
    assert MAY_IMPORT["plan"] == {"config", "arch", "layout"}
    assert MAY_IMPORT["comm"] == MAY_IMPORT["optim"] == {"config", "arch", "layout", "plan"}
    assert MAY_IMPORT["parallel"] == MAY_IMPORT["comm"] | {"comm", "model", "data", "optim"}
    assert "price" in MAY_IMPORT["train"]
    assert "price" not in MAY_IMPORT["checkpoint"]
    assert MAY_IMPORT["launch"] == MAY_IMPORT["observe"] == set()


@pytest.mark.parametrize(
    "line", ["see /" + "work/notes", "open('/" + "tmp/x')", "Co-" + "Authored-By: x", "https://py" + "pi.org/simple"]
)
def test_foreign_words_are_found(line: str) -> None:
    assert len(list(foreign_words(f"fine\n{line}\n"))) == 1


@pytest.mark.parametrize("line", ["runs/demo/work/x", "a/tmp/b", "tmp_path / 'work'", "./work/x", "PyTorch's session"])
def test_honest_words_pass(line: str) -> None:
    assert list(foreign_words(line)) == []
