"""The shape of the code, read from its syntax: who imports whom, where floats may stand, what a variant has."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import attncalc
from attncalc.attention import VARIANTS
from attncalc.dimensions import BUILD
from attncalc.errors import AttncalcError

PACKAGE = Path(attncalc.__file__).parent
TESTS = Path(__file__).parent
MAX_LINES = 400

# Every module may import those of its own layer and of the layers before it.
LAYERS = (
    ("attncalc.errors", "attncalc"),
    ("attncalc.units", "attncalc.dtypes", "attncalc.axes", "attncalc.reach", "attncalc.search"),
    ("attncalc.ops", "attncalc.cache", "attncalc.workload"),
    ("attncalc.attention.base",),
    ("attncalc.attention", "attncalc.ffn", "attncalc.latent_moe", "attncalc.channel_mix"),
    ("attncalc.model",),
    ("attncalc.weights",),
    ("attncalc.fields",),
    ("attncalc.document", "attncalc.hf_config", "attncalc.export"),
    ("attncalc.device", "attncalc.hub", "attncalc.presets", "attncalc.dimensions"),
    ("attncalc.engines", "attncalc.allocation", "attncalc.flops", "attncalc.compare", "attncalc.explain"),
    ("attncalc.capacity",),
    ("attncalc.inputs",),
    ("attncalc.measure", "attncalc.verify"),
    ("attncalc.report",),
    ("attncalc.commands", "attncalc.fitting", "attncalc.proof", "attncalc.render"),
    ("attncalc.cli",),
    ("attncalc.__main__",),
)


class Import(NamedTuple):
    module: str
    line: int
    lazy: bool  # inside a function or for types alone: no cycle at start-up


def sources() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    out = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ["attncalc", *path.relative_to(PACKAGE).with_suffix("").parts]
        out[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return out


SOURCES = sources()


def tree(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text(encoding="utf-8"))


def imports(module: str) -> Iterator[Import]:
    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, lazy)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} line {node.lineno}: a relative import"
            name = node.module or ""
            for alias in node.names:
                inner = f"{name}.{alias.name}"
                yield Import(inner if inner in SOURCES else name, node.lineno, lazy)
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        inside = lazy or typing_only or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside)

    yield from walk(tree(module), False)  # noqa: FBT003


def rank(module: str) -> int:
    """The layer of the longest prefix that is named."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        for i, layer in enumerate(LAYERS):
            if name in layer and (name != "attncalc" or module == "attncalc"):
                return i
    raise AssertionError(f"{module} is in no layer: add it to LAYERS")


def within(module: str, *packages: str) -> bool:
    return any(module == p or module.startswith(f"{p}.") for p in packages)


def test_the_package_was_found() -> None:
    assert len(SOURCES) > 40
    assert {"attncalc", "attncalc.attention.gqa", "attncalc.cli"} <= set(SOURCES)
    found = list(imports("attncalc.model"))
    assert any(i.module == "attncalc.dtypes" and not i.lazy for i in found)
    assert any(i.module == "attncalc.flops" and i.lazy for i in found)


@pytest.mark.parametrize("module", SOURCES)
def test_imports_point_downwards(module: str) -> None:
    for found in imports(module):
        if within(found.module, "attncalc") and not found.lazy:
            assert rank(found.module) <= rank(module), f"{module} line {found.line} imports {found.module}"


@pytest.mark.parametrize("module", [m for m in SOURCES if within(m, "attncalc.attention")])
def test_attention_knows_nothing_of_engines_reports_or_commands(module: str) -> None:
    """Not even inside a function."""
    above = {"engines", "report", "cli", "commands", "render", "proof", "measure", "verify", "allocation", "flops"}
    above |= {"ffn", "model", "fields", "document", "presets", "dimensions", "compare", "inputs", "explain", "device"}
    for found in imports(module):
        assert not within(found.module, *(f"attncalc.{x}" for x in above)), f"line {found.line}: {found.module}"


def test_there_is_no_cycle() -> None:
    graph = {m: {i.module for i in imports(m) if i.module in SOURCES and not i.lazy} for m in SOURCES}
    done = set[str]()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for other in sorted(graph[module]):
                visit(other, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())
    assert done == set(SOURCES)


def may_import_torch(module: str) -> bool:
    name = module.rpartition(".")[2]
    if within(module, "attncalc.attention"):
        return name.endswith("_torch") or name in ("torch_base", "rotary")
    measuring = tuple(f"attncalc.measure.{name}" for name in ("hardware", "reference", "run"))
    return module in measuring or within(module, "attncalc.verify")


@pytest.mark.parametrize("module", SOURCES)
def test_heavy_packages_have_their_places(module: str) -> None:
    for found in imports(module):
        top, where = found.module.partition(".")[0], f"{module} line {found.line}"
        if top == "torch":
            assert may_import_torch(module) or (module == "attncalc.proof" and found.lazy), where
        elif top == "rich":
            assert module == "attncalc.render", where
            assert found.lazy, where
        elif top == "yaml":
            assert module in ("attncalc.presets", "attncalc.export"), where
            assert found.lazy, where
        elif top == "typer":
            assert within(module, "attncalc.cli"), where
        else:
            assert top not in ("numpy", "transformers", "scipy", "pandas"), where


@pytest.mark.parametrize("module", [m for m in SOURCES if not may_import_torch(m)])
def test_modules_without_torch_import_none_that_has_it(module: str) -> None:
    for found in imports(module):
        if not found.lazy:
            assert not (found.module in SOURCES and may_import_torch(found.module)), f"line {found.line}"


# Formulas: whole numbers only.

PRINTED = "attncalc.engines.printed"
"""Floats that an engine prints, to be met digit by digit."""
FORMULAS = [
    "attncalc.axes",
    "attncalc.ops",
    "attncalc.cache",
    "attncalc.reach",
    "attncalc.dtypes",
    "attncalc.workload",
    "attncalc.ffn",
    "attncalc.model",
    "attncalc.weights",
    "attncalc.allocation",
    "attncalc.capacity",
    "attncalc.flops",
    *(
        m
        for m in SOURCES
        if within(m, "attncalc.attention", "attncalc.engines") and not may_import_torch(m) and m != PRINTED
    ),
]


def floats(code: ast.AST) -> list[str]:
    """Float literals, true divisions and calls that make floats."""
    out = []
    for node in ast.walk(code):
        line = f"line {getattr(node, 'lineno', 0)}: {ast.unparse(node) if isinstance(node, ast.expr) else ''}"
        if isinstance(node, ast.Constant) and isinstance(node.value, (float, complex)):
            out.append(line)
        if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.Div):
            out.append(line)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("float", "round"):
            out.append(line)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {a.name for a in node.names}
            if isinstance(node, ast.Import) and "math" in names:
                out.append(line)
            if isinstance(node, ast.ImportFrom) and node.module == "math" and names - {"prod", "gcd", "lcm", "isqrt"}:
                out.append(line)
    return out


@pytest.mark.parametrize("module", FORMULAS)
def test_formulas_have_no_floats(module: str) -> None:
    assert floats(tree(module)) == []


@pytest.mark.parametrize("code", ["x = 1.5", "x = a / b", "x /= 2", "x = float(a)", "import math", "x = 1e3"])
def test_a_float_would_be_seen(code: str) -> None:
    assert floats(ast.parse(code))
    assert not floats(ast.parse("from math import prod\nx = a // b * 2 - 5 % 3"))


def test_printed_floats_reach_the_log_alone() -> None:
    importing = [m for m in SOURCES if any(found.module.startswith(PRINTED) for found in imports(m))]
    assert importing == ["attncalc.engines.log"]


def test_every_formula_module_is_there() -> None:
    assert set(FORMULAS) <= set(SOURCES)
    assert {e.module for e in VARIANTS.values()} <= set(FORMULAS)


# Variants: a specification, a torch layer, a test, a place in the comparison.


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_whole(name: str) -> None:
    module = VARIANTS[name].module
    assert module in SOURCES
    assert f"{module}_torch" in SOURCES
    layers = {n.name for n in ast.walk(tree(f"{module}_torch")) if isinstance(n, ast.ClassDef)}
    assert "Layer" in layers
    specifications = {n.name for n in ast.walk(tree(module)) if isinstance(n, ast.ClassDef)}
    assert VARIANTS[name].name in specifications
    assert VARIANTS[name].about
    assert name in BUILD


@pytest.mark.parametrize("module", sorted({e.module for e in VARIANTS.values()}))
def test_a_variant_has_a_test_file(module: str) -> None:
    """`test_NAME.py` or `test_NAME_torch.py`, or a file that says that it covers this layer too."""
    name = module.rpartition(".")[2]
    files = [TESTS / "attention" / f"test_{name}{end}.py" for end in ("", "_torch")]
    shared = [p for p in (TESTS / "attention").glob("test_*_torch.py") if f"{name}_torch" in _imported(p)]
    assert [p for p in files if p.is_file()] or shared


def _imported(path: Path) -> set[str]:
    nodes = [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.ImportFrom)]
    return {a.name for n in nodes for a in n.names} | {(n.module or "").rpartition(".")[2] for n in nodes}


def test_no_torch_layer_is_without_a_variant() -> None:
    layers = {
        m
        for m in SOURCES
        if m.endswith("_torch") and any(isinstance(n, ast.ClassDef) and n.name == "Layer" for n in tree(m).body)
    }
    assert layers == {f"{e.module}_torch" for e in VARIANTS.values()}


def test_a_comparison_has_no_other_variants() -> None:
    assert set(BUILD) <= set(VARIANTS)


@pytest.mark.parametrize("module", SOURCES)
def test_files_are_short(module: str) -> None:
    lines = SOURCES[module].read_text(encoding="utf-8").splitlines()
    assert len(lines) < MAX_LINES


@pytest.mark.parametrize("module", [m for m in SOURCES if m != "attncalc.__main__"])
def test_every_file_says_what_it_is(module: str) -> None:
    assert ast.get_docstring(tree(module))


def test_unknown_modules_need_a_layer() -> None:
    with pytest.raises(AssertionError, match="in no layer"):
        rank("attncalc.something")
    assert rank("attncalc.report.flops") > rank("attncalc.flops")
    assert issubclass(AttncalcError, ValueError)
