"""Who may import whom, what may import torch and ray, and how long files and functions may be."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "verst"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80

EVERYBODY = {"errors", "types"}
"""Level-0 modules without imports of verst. `types` is not for the packages without torch: it names Tensor."""
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "types": set(),
    "torchvision_shim": set(),
    "config": set(),
    "obs": set(),
    "web": set(),
    "flow": set(),
    "weights": set(),
    "rewards": {"config"},
    "router": {"web"},
    "dashboard": {"obs", "web"},
    "families": {"config", "flow"},
    "algorithms": {"config", "flow"},
    "engine": {"config", "obs", "web", "flow", "families", "weights"},
    "data": {"config", "flow", "families"},
    "trainer": {"config", "obs", "flow", "families", "weights", "algorithms"},
    # flow: the seeds of samples and the steps of a group are drawn by the rollout side, without any model.
    "rollout": {"config", "obs", "flow", "algorithms", "rewards", "engine"},
    "cluster": {"config", "obs", "web", "algorithms", "engine", "router", "trainer", "rollout", "rewards", "weights"},
}
_ALL = set(MAY_IMPORT)
MAY_IMPORT["loops"] = _ALL
MAY_IMPORT["cli"] = _ALL | {"loops"}
MAY_IMPORT["api"] = _ALL | {"loops"}
"""Package -> packages it may import besides itself and EVERYBODY; the table of the design."""
ONLY_MODULES = {
    ("rollout", "engine"): {"wire", "client"},
    ("cluster", "algorithms"): {"pairs"},
    ("cluster", "weights"): {"block"},
}
"""(importer, imported) -> the only modules of the imported package that it may see."""
WITHOUT_TORCH = {"config", "obs", "web", "router", "dashboard"}
CLI_AT_MODULE_LEVEL = {"cli", "config", "errors"}

Import = tuple[Path, int, str, bool]
"""File, line, dotted name, and whether it is run when the file is imported."""


def sources() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def package(path: Path) -> str:
    """`flow` for flow/noise.py, `types` for types.py, `verst` for the root."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return "verst" if parts == ("__init__",) else parts[0]


def imports(path: Path) -> Iterator[Import]:
    def walk(node: ast.AST, at_import: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((path, child.lineno, alias.name, at_import) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = _absolute(path, child)
                # `from verst.engine import wire` may name a module: the longer name says more.
                yield from ((path, child.lineno, f"{base}.{alias.name}", at_import) for alias in child.names)
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _for_types_only(child)
            yield from walk(child, at_import and not inside)

    return walk(ast.parse(path.read_text()), at_import=True)


def _for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _absolute(path: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    folder = ("verst", *path.relative_to(SOURCE).parts)[: -node.level]
    return ".".join((*folder, *filter(None, [node.module])))


def all_imports() -> list[Import]:
    return [found for path in sources() for found in imports(path)]


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(SOURCE.parent)}:{line}"


def test_packages_import_only_what_their_row_names():
    wrong = []
    for path, line, name, _ in all_imports():
        importer, (root, *rest) = package(path), name.split(".")
        if root != "verst" or importer == "verst" or name in ("verst", "verst.__version__"):
            continue
        allowed = MAY_IMPORT[importer] | EVERYBODY | {importer}
        if importer in WITHOUT_TORCH | {"errors"}:
            allowed -= {"types"}
        imported = rest[0]
        only = ONLY_MODULES.get((importer, imported))
        if imported not in allowed or (only and (len(rest) < 2 or rest[1] not in only)):
            wrong.append(f"{place(path, line)}: {importer} must not import {name}")
    assert wrong == []


def test_every_package_has_a_row():
    assert {package(path) for path in sources()} - {"verst"} <= set(MAY_IMPORT)


def test_only_cluster_imports_ray():
    assert [place(p, line) for p, line, name, _ in all_imports() if _is(name, "ray") and package(p) != "cluster"] == []


def test_torch_stays_out_of_the_light_packages():
    heavy = ("torch", "diffusers", "transformers")
    assert [
        f"{place(path, line)}: {name}"
        for path, line, name, _ in all_imports()
        if package(path) in WITHOUT_TORCH and any(_is(name, module) for module in heavy)
    ] == []


def test_the_command_line_imports_the_recipe_alone_before_it_has_parsed():
    wrong = []
    for path, line, name, at_import in all_imports():
        root, *rest = name.split(".")
        if (
            package(path) == "cli"
            and at_import
            and (root == "torch" or (root == "verst" and rest[0] not in CLI_AT_MODULE_LEVEL))
        ):
            wrong.append(f"{place(path, line)}: {name}")
    assert wrong == []


@pytest.mark.parametrize("name", [*sorted(WITHOUT_TORCH), "cli"])
def test_importing_a_light_package_loads_nothing_heavy(name):
    """The whole package, with what it imports in turn: the table looks at verst's own files only."""
    modules = [
        ".".join(("verst", *path.relative_to(SOURCE).with_suffix("").parts))
        for path in sources()
        if package(path) == name
    ]
    assert modules
    code = f"import sys, {', '.join(modules)}; print(*sorted({{'torch', 'ray', 'diffusers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


RUNS_CODE = ("pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve")
"""Modules whose readers run what the writer wrote."""
MAY_NAME = {"pickle.UnpicklingError", "pickle.dumps"}
"""An exception that torch.load(weights_only=True) raises; what is written for SGLang's servers, which read nothing else."""
READS_NAMED_RECORDS = {
    "verst/trainer/tensor_index.py": {"pickle.UnpicklingError", "pickle._Unpickler"},
}
"""A reader that makes nothing but what it has a list of."""
OBJECT_COLLECTIVES = {"broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"}
"""torch.distributed's pickles."""
AMONG_TRAINER_RANKS = {"verst/trainer/checkpoint.py"}
"""torch.distributed.checkpoint itself sends objects among the same ranks."""


def test_nothing_that_is_read_can_run_code():
    """Files and bodies are data: no pickle, no eval, torch.load and numpy.load only in their safe forms."""
    wrong = [
        f"{place(path, line)}: imports {name}"
        for path, line, name, _ in all_imports()
        if name not in MAY_NAME | READS_NAMED_RECORDS.get(place(path, 0)[:-2], set())
        and any(_is(name, module) for module in RUNS_CODE)
    ]
    for path in sources():
        among_ranks = place(path, 0)[:-2] in AMONG_TRAINER_RANKS
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            options = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if (
                name in ("eval", "exec")
                or (name == "torch.load" and options.get("weights_only") != "True")
                or options.get("allow_pickle", "False") != "False"
                or options.get("trust_remote_code", "False") != "False"
                or name.endswith(("yaml.load", "unsafe_load"))
                or (name.rsplit(".", 1)[-1] in OBJECT_COLLECTIVES and not among_ranks)
            ):
                wrong.append(f"{place(path, node.lineno)}: {name}({', '.join(options)})")
    assert wrong == []


def test_every_service_stands_behind_the_guard_and_asks_before_it_listens():
    """Who builds an application puts the guard into it; who listens has checked whether it may."""
    applications, listeners = [], []
    for path in sources():
        text = path.read_text()
        if "Starlette(routes" in text.replace("(\n", "(").replace("( ", "(") and "Middleware(Guard" not in text:
            applications.append(place(path, 1))
        if ("uvicorn.Config(" in text or "listen(" in text) and package(path) != "web" and "check_exposed(" not in text:
            listeners.append(place(path, 1))
    assert (applications, listeners) == ([], [])


def test_no_token_is_an_option_or_a_field():
    """A token on a command line is in the list of processes, one in a recipe in the run folder."""
    words = ("token", "password", "secret", "api_key")
    fields = [
        f"{place(path, node.lineno)}: {name}"
        for path in sources()
        if package(path) in ("cli", "config")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.arg | ast.AnnAssign)
        and (name := node.arg if isinstance(node, ast.arg) else ast.unparse(node.target))
        and any(word in name.lower().split("_") or word == name.lower() for word in words)
    ]
    assert fields == []


def test_files_are_small():
    lengths = {place(path, 1): len(path.read_text().splitlines()) for path in sources()}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_functions_are_small():
    functions = (
        (path, node)
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    lengths = {
        f"{place(path, node.lineno)} {node.name}": (node.end_lineno or 0) - node.lineno + 1 for path, node in functions
    }
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES} == {}


def _is(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")
