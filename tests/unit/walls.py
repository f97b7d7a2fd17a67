"""Reads a source file and lists where it breaks a wall. Pure: text in, complaints (`line: what`) out."""

import ast
import re
from collections.abc import Iterator
from pathlib import PurePath

MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 80

_LINE = ["config", "arch", "layout", "plan", "price", "report"]  # no torch here; each sees what stands before it
_TORCH_BASE = ["comm", "model", "data", "optim"]  # side by side: they see config..plan, not each other
_TORCH_TOWER = ["parallel", "checkpoint", "train", "verify", "survive"]  # each sees what stands before it
_PRICE_FROM = "train"
_LEAVES = ["launch", "observe"]


def _allowed() -> dict[str, set[str]]:
    """Package -> the packages it may import. Leaves may be imported by the command and by what drives ranks."""
    table = {name: set(_LINE[:place]) for place, name in enumerate(_LINE)}
    plain = set(_LINE[: _LINE.index("price")])
    for name in _TORCH_BASE:
        table[name] = set(plain)
    below = plain | set(_TORCH_BASE)
    for name in _TORCH_TOWER:
        if name == _PRICE_FROM:
            below = below | {"price", "report", *_LEAVES}
        table[name] = set(below)
        below = below | {name}
    for name in _LEAVES:
        table[name] = set()
    everything = set(table)
    table["cli"] = set(everything)
    table["testing"] = everything | {"cli"}
    return table


MAY_IMPORT = _allowed()
NO_TORCH = frozenset([*_LINE, "cli"])  # cli: not while it is imported; a command may, when it runs

_COLLECTIVES = frozenset(
    [
        *("all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor", "all_gather_single"),
        *("all_gather_object", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all"),
        *("all_to_all_single", "broadcast", "broadcast_object_list", "reduce", "gather", "gather_object", "scatter"),
        *("scatter_object_list", "send", "recv", "isend", "irecv", "batch_isend_irecv", "barrier"),
        *("monitored_barrier", "new_group", "new_subgroups", "P2POp", "_functional_collectives"),
    ]
)
_TORCH_PRIVATE = PurePath("comm/torch_private.py")
_ENVIRONMENT_READS = frozenset(["environ", "environb", "getenv", "getenvb"])

# Assembled from pieces, or this very file would be among the findings.
_FOREIGN = re.compile(
    "|".join(
        [
            r"(?<![\w.\-])/(?:work|tmp|root|farm)/\w",
            r"(?<![\w.\-/])/home/(?!user\b)\w",
            "co-authored" + "-by",
            r"generated (?:with|by) (?:an? )?(?:AI|assistant)\b",
            r"pypi\." + "org|files\\.python" + "hosted|download\\.py" + "torch",
            r"\." + "library/",
        ]
    ),
    re.IGNORECASE,
)


def violations(file: PurePath, text: str) -> list[str]:
    """Every wall that `text`, the file `file` (relative to the package), breaks."""
    tree = ast.parse(text)
    package = file.parts[0] if len(file.parts) > 1 else ""
    found = [*_sizes(file, text, tree), *_environment(file, tree), *_exports(tree)]
    found += [f"{node.lineno}: global statement" for node in ast.walk(tree) if isinstance(node, ast.Global)]
    for node, module, names, at_import in _imports(file, tree):
        found += [f"{node.lineno}: {what}" for what in _import(package, module, names, at_import)]
        if file != _TORCH_PRIVATE and module.split(".")[0] == "torch" and re.search(r"(?<!\w)_", f"{module}.{names}"):
            found.append(f"{node.lineno}: a private name of torch; {_TORCH_PRIVATE} has them")
    if package != "comm":
        found += _collectives(tree)
    return found


def foreign_words(text: str) -> Iterator[str]:
    """Lines that name a machine's folders, a registry's host, or who wrote them."""
    for number, line in enumerate(text.splitlines(), 1):
        if match := _FOREIGN.search(line):
            yield f"{number}: {match.group()}"


def _sizes(file: PurePath, text: str, tree: ast.Module) -> Iterator[str]:
    if file.name in {"utils.py", "util.py", "helpers.py", "misc.py"}:
        yield f"1: {file.name}: name the idea"
    if (lines := len(text.splitlines())) > MAX_FILE_LINES:
        yield f"1: {lines} lines, at most {MAX_FILE_LINES}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{node.lineno}: function {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"


def _imports(file: PurePath, tree: ast.Module) -> Iterator[tuple[ast.stmt, str, list[str], bool]]:
    """(statement, absolute module, imported names, whether it runs when the file is imported)."""
    for node, at_import in _statements(tree, True):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name, [], at_import
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = ["meshwright", *file.parent.parts]
                parents = parents[: len(parents) - (node.level - 1)]
                base = ".".join([*parents, base] if base else parents)
            yield node, base, [alias.name for alias in node.names], at_import


def _statements(tree: ast.AST, at_import: bool) -> Iterator[tuple[ast.stmt, bool]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt):
            yield node, at_import
        lazy = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        yield from _statements(node, at_import and not lazy and not typing_only)


def _import(package: str, module: str, names: list[str], at_import: bool) -> Iterator[str]:
    root, _, rest = module.partition(".")
    if root == "pydantic" and package != "config":
        yield "pydantic is used in config only"
    if root == "torch" and (package in NO_TORCH or not package) and (at_import or package in _LINE):
        yield f"{package or 'the package itself'} imports torch"
    if root != "meshwright":
        return
    for target in [rest.split(".")[0]] if rest else names:
        if target == "testing" and package != "testing":
            yield "imports testing, which only tests may"
        elif target in MAY_IMPORT and package and target != package and target not in MAY_IMPORT.get(package, set()):
            yield f"{package} imports {target}, which does not stand below it"


def _collectives(tree: ast.Module) -> Iterator[str]:
    """Collectives of torch.distributed, by whatever name the module was imported."""
    names, functions = {"torch.distributed"}, set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.asname for a in node.names if a.name.startswith("torch.distributed") and a.asname}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            for alias in node.names:
                if node.module == "torch" and alias.name == "distributed":
                    names.add(alias.asname or alias.name)
                elif (node.module or "").startswith("torch.distributed") and alias.name in _COLLECTIVES:
                    functions.add(alias.asname or alias.name)
                    yield f"{node.lineno}: imports the collective {alias.name}; comm has it"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in _COLLECTIVES and ast.unparse(node.value) in names:
            yield f"{node.lineno}: {ast.unparse(node)}; collectives are called in comm only"


def _environment(file: PurePath, tree: ast.Module) -> Iterator[str]:
    if file == PurePath("launch/environment.py"):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in _ENVIRONMENT_READS and ast.unparse(node.value) == "os":
            yield f"{node.lineno}: os.{node.attr}; the environment is read in launch/environment.py only"
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            for alias in node.names:
                if alias.name in _ENVIRONMENT_READS:
                    yield f"{node.lineno}: os.{alias.name}; the environment is read in launch/environment.py only"


def _exports(tree: ast.Module) -> Iterator[str]:
    """`__all__`, where declared, is exactly the public names the file binds (imported ones count in a file that
    only imports: a package's front)."""
    declared: list[str] | None = None
    line, defined, imported = 1, set[str](), set[str]()
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            bound = {target.id for target in targets if isinstance(target, ast.Name) and not _is_type_variable(node)}
            if "__all__" in bound and node.value is not None:
                declared, line = list(ast.literal_eval(node.value)), node.lineno
            defined |= bound
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
    if declared is None:
        return
    public = {name for name in defined if not name.startswith("_")}
    if missing := public - set(declared):
        yield f"{line}: public but not in __all__: {sorted(missing)}"
    # A module with __getattr__ binds names when they are asked for.
    if "__getattr__" not in defined and (unknown := set(declared) - defined - imported):
        yield f"{line}: in __all__ but not bound: {sorted(unknown)}"
    if len(set(declared)) != len(declared):
        yield f"{line}: __all__ names something twice"


def _is_type_variable(node: ast.Assign | ast.AnnAssign) -> bool:
    return isinstance(node.value, ast.Call) and ast.unparse(node.value.func).endswith(("TypeVar", "ParamSpec"))
