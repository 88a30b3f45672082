"""What the house asks of the code beyond what the linter can say: small and plain, nothing hidden."""

import ast
from collections.abc import Iterator

import pytest
from house.repository import modules, place, tree

FILE_LINES = 400
FUNCTION_LINES = 60
NAMELESS = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}

# Modules that may import inside a function, and why.
LATE_IMPORTS = {
    "pagedjax/cli.py": "`pagedjax --version` and errors of usage must not wait seconds for jax",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(node: ast.AST) -> Iterator[Function]:
    """All functions below `node`, at any depth."""
    return (child for child in ast.walk(node) if isinstance(child, Function))


def lines_of(function: Function) -> int:
    """Lines from `def` to the end, those of the docstring not counted."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        lines -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return lines


def test_there_is_code_to_check() -> None:
    assert len(modules("pagedjax", "server")) > 10


def test_files_are_short() -> None:
    sizes = {place(path): len(path.read_text().splitlines()) for path in modules("pagedjax", "server")}
    assert {name: size for name, size in sizes.items() if size > FILE_LINES} == {}


def test_functions_are_short() -> None:
    sizes = {
        f"{place(path, function)} {function.name}": lines_of(function)
        for path in modules("pagedjax", "server")
        for function in functions(tree(path))
    }
    assert {name: size for name, size in sizes.items() if size > FUNCTION_LINES} == {}


def test_modules_are_named_after_what_they_hold() -> None:
    paths = modules("pagedjax", "server", "pallas_kernels", "scripts", "tests")
    assert [place(path) for path in paths if NAMELESS & {path.stem, *path.parent.parts}] == []


def test_imports_stand_at_the_top() -> None:
    late = [
        place(path, node)
        for path in modules("pagedjax", "server", "pallas_kernels")
        if place(path) not in LATE_IMPORTS
        for function in functions(tree(path))
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert late == []


def hidden(node: ast.AST) -> str | None:
    """What `node` is, if it belongs to the things no file of ours may hold."""
    match node:
        case ast.Import(names=names) if {alias.name.split(".")[0] for alias in names} & {
            "pickle",
            "dill",
            "shelve",
        }:
            return "unpickling runs code that a file brings"
        case ast.ImportFrom(module="pickle" | "dill" | "shelve"):
            return "unpickling runs code that a file brings"
        case ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING") | ast.alias(name="TYPE_CHECKING"):
            return "an import for the type checker alone hides a cycle"
        case ast.Call(func=ast.Name(id="eval" | "exec")):
            return "code made from text"
        case ast.Attribute(value=ast.Name(id="os"), attr="system" | "popen"):
            return "a shell's command line made from text"
        case ast.keyword(arg="shell", value=ast.Constant(value=True)):
            return "a shell's command line made from text"
        case ast.keyword(arg="trust_remote_code" | "allow_pickle", value=ast.Constant(value=True)):
            return "code from a download"
    return None


def test_no_hidden_imports_and_no_code_from_data() -> None:
    found = {
        place(path, node): reason
        for path in modules("pagedjax", "server", "pallas_kernels", "scripts", "tests")
        for node in ast.walk(tree(path))
        if (reason := hidden(node))
    }
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "from typing import TYPE_CHECKING",
        "import typing; typing.TYPE_CHECKING",
        "eval('1')",
        "exec(text)",
        "os.system('ls')",
        "subprocess.run('ls', shell=True)",
        "load(name, trust_remote_code=True)",
    ],
)
def test_hidden_things_are_seen(line: str) -> None:
    assert any(hidden(node) for node in ast.walk(ast.parse(line)))


def test_harmless_things_are_not_taken_for_hidden_ones() -> None:
    lines = [
        "import json",
        "model.eval()",
        "run(['ls'], shell=False)",
        "load(trust_remote_code=False)",
        "system()",
    ]
    assert [node for node in ast.walk(ast.parse("\n".join(lines))) if hidden(node)] == []


def test_public_names_have_docstrings() -> None:
    missing = [
        f"{place(path, node)} {node.name}"
        for path in modules("pagedjax", "server", "pallas_kernels")
        for node in tree(path).body
        if isinstance(node, Function | ast.ClassDef)
        if not node.name.startswith("_") and ast.get_docstring(node) is None
    ]
    assert missing == []
