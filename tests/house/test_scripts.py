"""The two commands of a fresh machine, without a network: finding Python, knowing when all is installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from house.repository import ROOT

TOOLS = ["bash", "basename", "cat", "cut", "dirname", "flock", "sha256sum", "sort"]
SCRIPTS = ["serve", "test", "venv.sh"]


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A repository with our scripts and nothing else, and a PATH with the system's tools but no Python."""
    for folder in ("bin", "scripts", "pyenv"):
        (tmp_path / folder).mkdir()
    for name in SCRIPTS:
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    for tool in TOOLS:
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool) or tool)
    for name in ("pyproject.toml", "requirements.lock"):
        (tmp_path / name).write_text(f"# {name}\n")
    return tmp_path


def program(path: Path, script: str) -> None:
    """Make an executable file that runs `script` in bash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{shutil.which('bash')}\n{script}\n")
    path.chmod(0o755)


def bash(house: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run bash from another folder than the house, with its PATH and pyenv."""
    environment = {"PATH": str(house / "bin"), "PYENV_ROOT": str(house / "pyenv"), "HOME": str(house)}
    return subprocess.run(["bash", *arguments], cwd="/", env=environment, capture_output=True, text=True, timeout=60)


def find_python(house: Path) -> subprocess.CompletedProcess[str]:
    """What `find_python` of venv.sh prints."""
    return bash(house, "-c", f"set -euo pipefail; source {house}/scripts/venv.sh; find_python")


def prepare(house: Path) -> None:
    """Leave a .venv that fits the lock, whose `pagedjax` prints its arguments."""
    program(house / ".venv/bin/pagedjax", 'echo "$@"')
    command = f"source {house}/scripts/venv.sh; fingerprint requirements.lock >$venv/installed-requirements.lock"
    assert bash(house, "-c", command).returncode == 0


def test_no_python_is_one_clear_line(house: Path) -> None:
    result = find_python(house)
    assert result.returncode == 2
    assert "no Python from 3.12 to 3.14 found" in result.stderr
    assert result.stdout == ""


def test_python_comes_from_path(house: Path) -> None:
    program(house / "bin/python3", f'exec {sys.executable} "$@"')
    assert find_python(house).stdout.strip() == str(house / "bin/python3")


def test_a_name_without_an_interpreter_is_passed_over(house: Path) -> None:
    program(house / "bin/python3.13", "exit 127")
    program(house / "pyenv/versions/3.9.1/bin/python", "exit 1")
    for version in ("3.12.9", "3.12.10"):
        program(house / f"pyenv/versions/{version}/bin/python", f'exec {sys.executable} "$@"')
    assert find_python(house).stdout.strip() == str(house / "pyenv/versions/3.12.10/bin/python")


def test_serve_touches_nothing_once_installed(house: Path) -> None:
    prepare(house)
    result = bash(house, str(house / "scripts/serve"))
    assert (result.returncode, result.stdout, result.stderr) == (0, "serve demo\n", "")


@pytest.mark.parametrize(
    ("given", "passed_on"),
    [
        (["--port", "0"], "serve demo --port 0"),
        (["model.gguf"], "serve model.gguf"),
        (["a folder/of mine", "--port", "0"], "serve a folder/of mine --port 0"),
    ],
)
def test_serve_passes_its_arguments_on(house: Path, given: list[str], passed_on: str) -> None:
    prepare(house)
    assert bash(house, str(house / "scripts/serve"), *given).stdout == passed_on + "\n"


@pytest.mark.parametrize("changed", ["requirements.lock", "pyproject.toml"])
def test_a_changed_lock_asks_for_an_installation(house: Path, changed: str) -> None:
    prepare(house)
    (house / changed).write_text("# something else\n")
    result = bash(house, str(house / "scripts/serve"))
    assert result.returncode == 2
    assert "no Python" in result.stderr


def test_scripts_are_executable() -> None:
    names = [".ci/run", "scripts/bench_peers", "scripts/lock", "scripts/serve", "scripts/test"]
    assert [name for name in names if not os.access(ROOT / name, os.X_OK)] == []
