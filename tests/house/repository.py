"""The repository as the tests of the house see it: its root, its files, and their syntax trees."""

import ast
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def files() -> list[Path]:
    """Every file that git knows or would add, as absolute paths."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return sorted(path for name in names.split("\0") if name and (path := ROOT / name).is_file())


def modules(*packages: str) -> list[Path]:
    """The Python files of these packages."""
    return [path for path in files() if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in packages]


def tree(path: Path) -> ast.Module:
    """The syntax tree of a Python file."""
    return ast.parse(path.read_text(), path.name)


def place(path: Path, node: ast.AST | None = None) -> str:
    """Where something stands, as editors understand it: `pagedjax/step.py:12`."""
    line = f":{node.lineno}" if isinstance(node, ast.stmt | ast.expr) else ""
    return f"{path.relative_to(ROOT)}{line}"
