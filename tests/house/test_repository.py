"""What every file keeps to: it speaks of no machine but the reader's, and the locks pin everything."""

import re
import tomllib
from pathlib import Path

import pytest
from house.repository import ROOT, files, place
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# The patterns are put together from halves, so that this file does not hold what it forbids.
FORBIDDEN = {
    "an absolute path of one machine": r"(?<![\w.~$}{-])/(?:"
    + "|".join(["wo" + "rk", "ro" + "ot", "ho" + "me"])
    + r")/",
    "a folder outside the repository": r"(?:\.\./|\b)sha" + r"red/",
    "the host of a package registry": "|".join(["py" + r"pi\.org", "python" + "hosted", r"npm" + r"js\.(?:org|com)"]),
    "an address with a password": r"https?://[^\s/:@]+:[^\s/:@]+" + "@",
}
PROSE_AND_CODE = {".py", ".md", ".toml", ".lock", ".sh", ".html", ".js", ".css", ".json", ".yml", ".txt", ""}
LOCKS = ["requirements.lock", "requirements-dev.lock"]


def readable(path: Path) -> bool:
    """Text that someone wrote; vocabularies hold every string there is."""
    return path.suffix in PROSE_AND_CODE and not path.name.startswith(("tokenizer", "vocab"))


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_names_what_is_not_the_readers(what: str) -> None:
    pattern = re.compile(FORBIDDEN[what])
    found = [
        f"{place(path)}:{number}: {line.strip()[:100]}"
        for path in files()
        if readable(path)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("an absolute path of one machine", "/ro" + "ot/x"),
        ("an absolute path of one machine", "file:///ho" + "me/me/x"),
        ("a folder outside the repository", "see ../sha" + "red/x"),
        ("the host of a package registry", "https://py" + "pi.org/simple"),
        ("an address with a password", "https://me:secret" + "@host/"),
    ],
)
def test_the_patterns_find_what_they_forbid(what: str, text: str) -> None:
    assert re.search(FORBIDDEN[what], text)


def pins(lock: str) -> dict[str, str]:
    """The lock file as {package: version}; fails on a line that is neither a pin nor one of its hashes."""
    found = {}
    for line in (ROOT / lock).read_text().splitlines():
        if not re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line):
            pin = re.fullmatch(r"([a-z0-9-]+)==(\S+)( ; [^\\]*)? \\", line)
            assert pin, f"{lock}: neither a pin nor a hash: {line}"
            found[pin[1]] = pin[2]
    return found


@pytest.mark.parametrize("lock", LOCKS)
def test_the_locks_hold_pins_and_hashes_only(lock: str) -> None:
    assert {"jax", "setuptools"} <= pins(lock).keys()
    assert not {"torch", "triton-xla"} & pins(lock).keys()


def test_the_locks_fit_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    served, checked = (pins(lock) for lock in LOCKS)
    wanted = [(line, served) for line in project["dependencies"] + extras["demo"]]
    wanted += [(line, checked) for line in extras["dev"]]
    for line, locked in wanted:
        requirement = Requirement(line)
        version = locked.get(canonicalize_name(requirement.name))
        assert version, f"{line} is in no lock: run scripts/lock"
        assert requirement.specifier.contains(version), f"{line}, but {version} is locked: run scripts/lock"
    assert served.items() <= checked.items()


def test_every_module_has_its_floor() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    floors = next(contract["layers"] for contract in contracts if contract["id"] == "floors")
    placed = {module.strip() for layer in floors for module in layer.split("|")}
    children = {
        "pagedjax." + path.relative_to(ROOT).parts[1].removesuffix(".py")
        for path in files()
        if path.suffix == ".py" and path.relative_to(ROOT).parts[0] == "pagedjax" and path.stem != "__init__"
    }
    assert children - placed == set()
