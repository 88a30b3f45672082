"""The README and docs/: their examples run as they are typed, and everything they name is there.

Where the demo package is installed, as it is in CI, the examples run with the demo model, in the user's own cache.
Elsewhere, and at night in any case, a tiny Llama stands in for it: a package of the demo package's name, found before
it, gives another GGUF file. So not a letter of an example is changed, but for the server's port, which must be free.
"""

import json
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from checkpoint.tiny_gguf import golden_model, metadata_of, tensors_of, write_gguf

from pagedjax.checkpoint.demo import PACKAGE
from pagedjax.cli import _not_built, _parse, main

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PRESENT = [README, *sorted((ROOT / "docs").glob("*.md"))]  # what they say is so now; decisions speak of plans too
PAGES = [README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
ADDRESS = "127.0.0.1:8000"  # what the README's examples talk to
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,!?'-\u2581"


def fenced(page: Path, language: str) -> list[str]:
    """The fenced code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def code_spans(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(page))


def name_of(block: str) -> str:
    """An example is called by the first name that it imports from us or from openai, unless it shows a later one."""
    found = re.search(r"^from (?:pagedjax|openai) import (.+)", block, re.MULTILINE)
    assert found, f"an example that imports nothing of ours:\n{block}"
    names = found[1].split(", ")
    return "StructuredOutputsParams" if "StructuredOutputsParams" in names else names[0]


EXAMPLES = {name_of(block): block for block in fenced(README, "python")}
OF_ITSELF = [name for name, block in EXAMPLES.items() if ADDRESS not in block]
OF_A_CLIENT = [name for name in EXAMPLES if name not in OF_ITSELF]
[BENCH_SERVE] = [block for block in fenced(README, "bash") if "bench serve" in block]
[NODE] = fenced(README, "javascript")
NODE_MODULES = ROOT / "tests" / "node" / "node_modules"  # `npm ci` makes it
[CURL] = [block for block in fenced(README, "bash") if block.startswith("curl")]

# ---- the examples run ----


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory, shared_cache_folder: Path) -> dict[str, str]:
    """The environment of a process in which `demo` is a tiny Llama with random weights."""
    folder = tmp_path_factory.mktemp("packages")
    package = folder / PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text(
        "import pathlib, shutil\n"
        "MODEL_NAME, EXPECTED_SHA256 = 'tiny.gguf', 'cd' * 32\n"
        "def assemble(path):\n"
        "    return shutil.copy(pathlib.Path(__file__).with_name('tiny.gguf'), path)\n"
    )
    config, tensors = golden_model("llama")
    config["num_hidden_layers"] = 1
    tensors = {name: tensor for name, tensor in tensors.items() if ".layers." not in name or ".layers.0." in name}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *LETTERS]
    tokens += [f"<spare{i}>" for i in range(config["vocab_size"] - len(tokens))]
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3}
    vocabulary = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * len(tokens),
        "token_type": [kinds.get(token, 6 if token.startswith("<0x") else 1) for token in tokens],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    metadata = metadata_of(config, "llama") | {f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()}
    write_gguf(package / "tiny.gguf", "llama", metadata, tensors_of(config, tensors, "llama"))
    return environment(folder, PAGEDJAX_CACHE=str(shared_cache_folder))


@pytest.fixture(scope="module")
def real() -> dict[str, str]:
    """The environment of a process in which `demo` is what it says."""
    return environment()


def environment(*packages: Path, **variables: str) -> dict[str, str]:
    """The variables of a process that finds these packages and ours."""
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(map(str, [*packages, ROOT]))} | variables


def has_demo() -> bool:
    return find_spec(PACKAGE) is not None


@pytest.fixture(
    params=[
        pytest.param("real" if has_demo() else "stand_in", marks=pytest.mark.slow),
        *([pytest.param("stand_in", marks=pytest.mark.nightly)] if has_demo() else []),
    ]
)
def variables(request: pytest.FixtureRequest) -> dict[str, str]:
    """The environment of a process that finds a demo model."""
    found: dict[str, str] = request.getfixturevalue(request.param)
    return found


def run_python(text: str, variables: dict[str, str], folder: Path) -> str:
    """What a program prints; it must end well."""
    program = folder / "example.py"
    program.write_text(text)
    done = subprocess.run(
        [sys.executable, str(program)], cwd=folder, env=variables, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_are_the_examples_that_the_tests_know() -> None:
    assert OF_ITSELF == ["LLM", "StructuredOutputsParams", "AsyncLLM", "PackedRow"]
    assert OF_A_CLIENT == ["OpenAI"]


def test_llm(variables: dict[str, str], tmp_path: Path) -> None:
    printed = run_python(EXAMPLES["LLM"], variables, tmp_path)
    starts = ["The capital of France is", "Once upon a time"]
    continued = re.fullmatch("(?s)" + "(.+)\n".join(map(re.escape, starts)) + "(.+)\n", printed)
    assert continued, printed
    if is_real(variables):
        assert said_in_the_readme(continued[1])


def test_structured_outputs(variables: dict[str, str], tmp_path: Path) -> None:
    said = json.loads(run_python(EXAMPLES["StructuredOutputsParams"], variables, tmp_path))
    assert list(said) == ["city", "capital"]
    if is_real(variables):
        assert said["city"] == "Paris"


@pytest.mark.parametrize("name", [pytest.param("AsyncLLM", marks=pytest.mark.nightly), "PackedRow"])
def test_example(name: str, variables: dict[str, str], tmp_path: Path) -> None:
    printed = run_python(EXAMPLES[name], variables, tmp_path)
    assert printed.strip()
    if name == "PackedRow":
        ids = json.loads(printed)
        assert len(ids) == 20
        if is_real(variables):
            assert ids[6:10] == [506, 5279, 529, 506]  # " the capital of the"


def test_curl_and_the_openai_client(variables: dict[str, str], tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    with served(variables, tmp_path) as address:
        command = ["bash", "-c", CURL.replace(ADDRESS, address)]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        text = text_of_events(answer)
        assert text
        if is_real(variables):
            assert said_in_the_readme(text)
        for name in OF_A_CLIENT:
            assert run_python(EXAMPLES[name].replace(ADDRESS, address), variables, tmp_path)
        if NODE_MODULES.is_dir() or "CI" in os.environ:
            assert run_node(NODE.replace(ADDRESS, address), tmp_path)
        program = shlex.join([sys.executable, "-m", "pagedjax.cli"])
        command[2] = BENCH_SERVE.replace(ADDRESS, address).replace(".venv/bin/pagedjax", program)
        done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert re.findall(r"^Successful requests: +(\d+)$", done.stdout, re.MULTILINE) == ["16", "16"]
        assert (tmp_path / "latency.png").stat().st_size > 1000


def run_node(text: str, folder: Path) -> str:
    """What a module prints; it must end well."""
    (folder / "node_modules").symlink_to(NODE_MODULES)
    (folder / "example.mjs").write_text(text)
    command = ["node", "example.mjs"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=True).stdout


def is_real(variables: dict[str, str]) -> bool:
    return variables["PYTHONPATH"] == str(ROOT)


def said_in_the_readme(text: str) -> bool:
    """Whether the text begins as the README says. Other processors may go another way later on."""
    shown = re.search(r"\*(the capital [^*…]+)", " ".join(README.read_text().split()))
    assert shown, "the README shows what the demo model says"
    return text.split()[:4] == shown[1].split()[:4]


def text_of_events(answer: str) -> str:
    """The text of a completion's server-sent events, of which the last says that it is done."""
    lines = [line for line in answer.splitlines() if line]
    assert lines[-1] == "data: [DONE]", answer
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert len(events) > 4, "the text comes in parts"
    assert events[-1]["choices"][0]["finish_reason"] in ("length", "stop")
    return "".join(event["choices"][0]["text"] for event in events)


@contextmanager
def served(variables: dict[str, str], folder: Path) -> Iterator[str]:
    """A server of the demo model as `scripts/serve` starts it, on a free port; its address."""
    log = folder / "server.log"
    command = [sys.executable, "-m", "pagedjax.cli", "serve", "demo", "--port", "0"]
    with (
        log.open("wb") as errors,
        subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True) as process,
    ):
        assert process.stderr is not None
        try:
            for line in process.stderr:
                errors.write(line.encode())
                if ready := re.fullmatch(r"pagedjax: ready on http://(\S+)\n", line):
                    break
            else:
                errors.flush()
                pytest.fail(f"the server did not start:\n{log.read_text()}")
            yield ready[1]
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


# ---- what the pages say is so ----


def command_lines(page: Path) -> list[list[str]]:
    """The arguments of each `pagedjax` command line in the page's bash blocks, `scripts/serve` counted as one."""
    found = []
    for block in fenced(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            if not line.startswith((".venv/bin/pagedjax", "pagedjax", "bash scripts/serve", "scripts/serve")):
                continue
            words = [word for word in shlex.split(line, comments=True) if word != "bash"]
            found.append(as_serve(words[1:]) if Path(words[0]).name == "serve" else words[1:])
    return found


def as_serve(arguments: list[str]) -> list[str]:
    """What `scripts/serve` makes of its arguments."""
    named = bool(arguments) and not arguments[0].startswith("-")
    return ["serve", *arguments] if named else ["serve", "demo", *arguments]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_command_lines_parse(page: Path) -> None:
    for arguments in command_lines(page):
        assert _parse(arguments).run is not _not_built, arguments


def test_there_are_command_lines() -> None:
    assert {line[0] for page in PAGES for line in command_lines(page)} == {"serve", "generate", "bench"}
    spans = [span for page in PAGES for span in code_spans(page) if span.startswith("scripts/serve ")]
    assert spans
    for span in spans:
        _parse(as_serve(shlex.split(span)[1:]))


def test_flags_exist(capsys: pytest.CaptureFixture[str]) -> None:
    known = {"--help", *re.findall(r"\"(--[a-z-]+)\"", (ROOT / "scripts" / "bench_peers.py").read_text())}
    for command in (["serve"], ["generate"], ["bench", "throughput"], ["bench", "serve"]):
        with pytest.raises(SystemExit):
            main([*command, "--help"])
        known |= set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    named = {flag for page in PAGES for span in code_spans(page) for flag in re.findall(r"--[a-z][a-z-]*", span)}
    assert named
    assert named - known == set()


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        name, _, anchor = target.partition("#")
        if name.startswith("https://"):
            continue
        linked = page.parent / name if name else page
        if not linked.exists() or (anchor and anchor not in headings(linked)):
            dead.append(target)
    assert dead == []


def is_missing_file(span: str) -> bool:
    """Whether a code span names a file or folder of the repository that is not there."""
    if not re.fullmatch(r"\.?\w[\w.-]*(/[\w.-]+)*/?", span) or span.startswith(".venv/"):
        return False
    ours = (ROOT / span.split("/")[0]).exists() and "/" in span
    return (ours or span.endswith((".py", ".md", ".toml", ".lock"))) and not (ROOT / span).exists()


def is_missing_name(span: str) -> bool:
    """Whether a code span names a module of ours, or something in one, that is not there."""
    if not re.fullmatch(r"(pagedjax|server|pallas_kernels)(\.\w+)*", span):
        return False
    try:
        pkgutil.resolve_name(span)
    except (ImportError, AttributeError):
        return True
    return False


@pytest.mark.parametrize("is_missing", [is_missing_file, is_missing_name])
@pytest.mark.parametrize("page", PRESENT, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_named_is_there(page: Path, is_missing: Callable[[str], bool]) -> None:
    assert [span for span in code_spans(page) if is_missing(span)] == []


def test_what_is_not_there_is_seen() -> None:
    spans = ["pagedjax/none.py", "docs/none/", "none.md", "tests/test_docs.py", "path/to/model", "config.json"]
    assert [span for span in spans if is_missing_file(span)] == spans[:3]
    names = [
        "pagedjax.none",
        "pagedjax.pack.Nothing",
        "server.none",
        "pagedjax.pack.StepPacker",
        "server.sse",
        "jax.none",
    ]
    assert [name for name in names if is_missing_name(name)] == names[:3]


def test_the_architecture_names_every_module() -> None:
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for folder in ("pagedjax", "server")
        for pattern in ("*.py", "*/__init__.py")
        for path in (ROOT / folder).glob(pattern)
    }
    assert len(modules) > 30
    assert modules - {"pagedjax", "server"} - set(code_spans(ARCHITECTURE)) == set()


def test_decisions_are_there() -> None:
    """What code, tests and pages call ADR n is a file, and the architecture lists them all."""
    sources = [path for folder in ("pagedjax", "server", "scripts", "tests") for path in (ROOT / folder).rglob("*.py")]
    cited = {int(n) for path in [*sources, *PAGES] for n in re.findall(r"ADR (\d+)", path.read_text())}
    written = {int(path.name[:4]): path.name for path in (ROOT / "docs" / "adr").glob("*.md")}
    assert cited - set(written) == set()
    text = ARCHITECTURE.read_text()
    assert [name for name in written.values() if f"(adr/{name})" not in text] == []
