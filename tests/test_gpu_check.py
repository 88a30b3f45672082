"""scripts/gpu_check on a machine without a GPU: a toy run of everything, going on, crashes, hangs, and no time left.

The kernels run interpreted; that those of a real run can be lowered for GPUs is shown as well.
"""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from pallas_kernels.offline import lower
from pallas_kernels.tuning import DecodeTiles

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts"
SECTIONS = ["rates", "correctness", "attention", "matmul", "peers", "generate"]


def load(name: str) -> ModuleType:
    """A script's module; they import each other by their bare names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        return importlib.import_module(name)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "gpu_check.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment})


def read(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(path.read_text())
    return report


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory, step_cache: Path) -> Path:
    """The report of a toy run of all sections."""
    path = tmp_path_factory.mktemp("toy") / "check.json"
    done = run("--interpret", "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert "no case failed" in done.stderr
    assert done.stdout == path.with_suffix(".md").read_text() + "\n"
    return path


@pytest.mark.slow
def test_a_toy_run(toy: Path) -> None:
    report = read(toy)
    assert list(report["sections"]) == SECTIONS
    for section in report["sections"].values():
        assert list(section["results"]) == section["planned"]
    results = {name: section["results"] for name, section in report["sections"].items()}
    assert all(0 <= result["error"] <= result["tolerance"] for result in results["correctness"].values())
    for section in ("attention", "matmul"):
        for result in results[section].values():
            assert 0 < result["least_us"] <= result["us"]
            assert result["bytes"] > 0
            assert result["flops"] > 0
    [generated] = results["generate"].values()
    assert generated["equal_tokens"] > 0.5
    assert 0 <= generated["mean_logprob_gap"] < 0.05
    assert set(generated["tokens_per_s"]) == {"pallas-interpret", "xla"}


@pytest.mark.slow
def test_the_tables_of_a_toy_run(toy: Path) -> None:
    text = toy.with_suffix(".md").read_text()
    titles = ["0 cases failed", "The card's rates", "Correctness", "Attention", "Products with quantised weights"]
    titles += ["Tiles beside the table's", "Peers", "The whole engine"]
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == titles
    assert "no time here means anything" in text
    assert "| ragged_paged_attention: toy, bfloat16 |" in text


@pytest.mark.slow
def test_a_run_goes_on_with_what_is_missing(toy: Path, tmp_path: Path) -> None:
    report = read(toy)
    kept = dict(list(report["sections"]["correctness"]["results"].items())[:-1])
    marked = {case: result | {"mark": 1} for case, result in kept.items()}
    report["sections"]["correctness"]["results"] = marked
    path = tmp_path / "check.json"
    path.write_text(json.dumps(report))
    done = run("--interpret", "--json", str(path), "--sections", "correctness", "rates", "--again", "rates")
    assert done.returncode == 0, done.stderr
    assert "correctness: 5 cases, 4 of them done" in done.stderr
    assert "rates: 3 cases, 0 of them done" in done.stderr
    after = read(path)["sections"]
    assert {case for case, result in after["correctness"]["results"].items() if "mark" in result} == set(kept)
    assert len(after["correctness"]["results"]) == len(kept) + 1
    assert after["rates"] != report["sections"]["rates"]
    assert after["matmul"] == report["sections"]["matmul"]


def test_without_a_gpu(tmp_path: Path) -> None:
    done = run("--json", str(tmp_path / "check.json"), JAX_PLATFORMS="cpu")
    assert done.returncode == 3
    [line] = done.stderr.splitlines()
    assert line.startswith("gpu_check: no NVIDIA GPU")
    assert "pip install 'jax[cuda13]==" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [["--minutes", "0"], ["--memory", "0.5"], ["--json", "x.md"], ["--again", "x"]])
def test_wrong_usage(options: list[str]) -> None:
    done = run(*options)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("gpu_check: error: ")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"sections": 3}'])
def test_a_file_of_something_else(tmp_path: Path, text: str) -> None:
    path = tmp_path / "check.json"
    path.write_text(text)
    done = run("--json", str(path))
    assert done.returncode == 2
    assert done.stderr == f"gpu_check: {path} is no report of gpu_check: choose another --json FILE\n"
    assert path.read_text() == text


def test_a_wrong_kernel_and_one_that_raises() -> None:
    """What a worker reports of them, and that the other cases go on."""
    correctness, worker = load("gpu_check_correctness"), load("gpu_check_worker")

    def wrong(**arrays: Any) -> Any:
        return 1.1 * correctness.reference.quant_matmul(**arrays)

    def raising(**_: Any) -> Any:
        raise ValueError("no such tile\nand more")

    kept = [case for case in correctness.cases(toy_setup()) if case.name.startswith(("kv_", "quant_"))]
    write, product = kept
    trial = dataclasses.replace(write, name="trial", function=raising, is_trial=True)
    broken = [dataclasses.replace(product, function=wrong), trial, write]
    events: list[dict[str, Any]] = []
    is_alive = worker.work("correctness", broken, 2, 1e12, lambda event, **more: events.append({"event": event} | more))
    assert is_alive
    first, second, third = (event["result"] for event in events if event["event"] == "result")
    assert first["status"] == "failed"
    assert first["error"] == pytest.approx(0.1, rel=1e-3)
    assert first["message"].startswith("error 1.00e-01, over 1.50e-02")
    assert second == {"status": "failed", "message": "ValueError: no such tile", "trial": True}
    assert third["status"] == "ok"

    report = {"sections": {"correctness": {"planned": ["a", "b"], "results": {"a": first, "b": second}}}}
    assert load("gpu_check_report").failures(report, ["correctness"]) == [("correctness", "a", first["message"])]


def test_nothing_is_taken_for_right_that_is_not_finite() -> None:
    correctness = load("gpu_check_correctness")
    result = correctness.close(np.array([1.0, np.nan]), np.ones(2))
    assert result == {"status": "failed", "error": None, "tolerance": 1.5e-2, "message": "not finite"}


def toy_setup() -> Any:
    return load("gpu_check_cases").Setup("sm_90", 1 << 34, interpret=True)


# A worker that does as the name of its case says. It knows from the driver what is done, as the real one does.
FAKE_WORKER = """
import json, os, sys, time
orders = json.load(sys.stdin)
def say(event, **more): print(json.dumps({"event": event} | more), flush=True)
say("device", facts={"device": "none", "jax": "0"})
for order in orders["sections"]:
    cases = CASES
    say("plan", section=order["name"], cases=cases)
    for case in cases:
        if case in order["done"]: continue
        if case == "compiles no more" and orders["threads"] > 1: os.abort()
        say("start", section=order["name"], case=case)
        if case == "aborts": print("out of luck", file=sys.stderr, flush=True); os.abort()
        if case == "hangs": time.sleep(60)
        failed = case in ("fails", "loses the device")
        result = {"status": "failed", "message": "so it is"} if failed else {"status": "ok"}
        say("result", section=order["name"], case=case, result=result)
        if case == "loses the device": say("lost"); sys.exit()
say("end")
"""


def drive(folder: Path, cases: list[str], *options: str) -> tuple[int, dict[str, Any]]:
    """Run the driver with the fake worker on section `rates`: its status, and the results."""
    path = folder / "check.json"
    command = [sys.executable, "-c", FAKE_WORKER.replace("CASES", repr(cases))]
    status = load("gpu_check").main(["--json", str(path), "--sections", "rates", "--threads", "4", *options], command)
    return status, read(path)["sections"]["rates"]["results"]


def test_a_crash_is_that_cases_result_and_the_rest_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = ["one", "aborts", "two", "loses the device", "three", "compiles no more", "four"]
    status, results = drive(tmp_path, cases)
    assert status == 1
    assert {case: result["status"] for case, result in results.items()} == {
        "one": "ok", "aborts": "failed", "two": "ok", "loses the device": "failed", "three": "ok",
        "compiles no more": "ok", "four": "ok",
    }  # fmt: skip
    assert results["aborts"]["message"] == "the process ended with status -6: out of luck"
    output = capsys.readouterr()
    assert "gpu_check: 2 cases failed" in output.err
    assert "| rates | aborts | the process ended with status -6: out of luck |" in output.out


def test_a_hang_is_that_cases_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(load("gpu_check").SILENCE_S, "rates", 0.5)
    status, results = drive(tmp_path, ["hangs", "one"])
    assert status == 1
    assert results["hangs"] == {"status": "failed", "message": "no answer for 0 s"}
    assert results["one"] == {"status": "ok"}


def test_a_case_that_failed_fails_a_run_that_only_goes_on(tmp_path: Path) -> None:
    assert drive(tmp_path, ["one", "fails"])[0] == 1
    assert drive(tmp_path, ["one", "fails"])[0] == 1
    assert drive(tmp_path, ["one"], "--again", "rates")[0] == 0


def test_a_file_of_another_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = {"facts": {"device": "another"}, "sections": {"rates": {"planned": [], "results": {}}}}
    (tmp_path / "check.json").write_text(json.dumps(report))
    assert drive(tmp_path, ["one"])[0] == 2
    assert "choose another --json FILE" in capsys.readouterr().err


def test_no_time_left(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker hangs until the end: what it was at and what comes after is named, and nothing is called failed."""
    monkeypatch.setattr(load("gpu_check"), "GRACE_S", 0.5)
    status, results = drive(tmp_path, ["one", "hangs", "two"], "--minutes", "0.03")
    assert status == 0
    assert results == {"one": {"status": "ok"}}
    output = capsys.readouterr()
    assert "gpu_check: no time was left for rates: hangs; two" in output.err
    assert "## No time was left for\n\n- rates: hangs; two" in output.out


def test_a_worker_stops_when_its_time_is_up() -> None:
    events: list[str] = []
    cases = load("gpu_check_correctness").cases(toy_setup())
    assert load("gpu_check_worker").work("correctness", cases, 2, 0.0, lambda event, **_: events.append(event))
    assert set(events) <= {"built"}


def test_the_environment_of_a_worker() -> None:
    environment = load("gpu_check").environment
    given = {"XLA_FLAGS": "--xla_a=1", "JAX_PLATFORMS": "cuda", "HOME": "there"}
    assert environment(given, False) == {
        "XLA_FLAGS": "--xla_a=1 --xla_gpu_enable_triton_gemm=false", "JAX_PLATFORMS": "cuda,cpu", "HOME": "there",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }  # fmt: skip
    assert environment({}, True)["JAX_PLATFORMS"] == "cpu"
    assert "JAX_PLATFORMS" not in environment({}, False)


def test_shares_of_the_floor() -> None:
    """A floor is of bytes or of operations, whichever takes longer; 8-bit products run at twice the rate."""
    report = load("gpu_check_report")
    rates = {"copy": {"bytes_per_s": 2e12}, "product": {"flops_per_s": 1e15}}
    measured = {"sections": {"rates": {"planned": [], "results": rates}}}
    assert report.share(measured, {"us": 100.0, "bytes": 10**8, "flops": 10**9}) == pytest.approx(0.5)
    assert report.share(measured, {"us": 100.0, "bytes": 10**6, "flops": 10**10}) == pytest.approx(0.1)
    eight = {"us": 100.0, "bytes": 10**6, "flops": 10**10, "rate_factor": 2}
    assert report.share(measured, eight) == pytest.approx(0.05)
    assert report.share({"sections": {}}, eight) is None


def test_shapes_that_do_not_fit_are_halved() -> None:
    attention, cases = load("gpu_check_attention"), load("gpu_check_cases")
    assert attention.fitting((64, 4096), 1 << 18) == (64, 4096)
    assert attention.fitting((64, 4096), 1 << 16) == (16, 4096)
    assert attention.fitting((1, 131_072), 50_000) == (1, 32_768)
    small = attention.cases(cases.Setup("sm_90", 1 << 30))
    scaled = [case for case in small if "scaled" in case.facts]
    assert any(case.name.startswith("decode 64 x 4096: Llama 3 8B") for case in scaled)
    for case in small:
        fixed, groups = case.arguments
        arrays = [array for array in [*fixed.values(), *groups] if array is not None]
        assert sum(array.size * array.dtype.itemsize for array in arrays) < 1 << 29


def test_tiles_beside_the_tables() -> None:
    neighbours = load("gpu_check_cases").neighbours
    tiles = DecodeTiles(tokens=64, segments=1, num_warps=4, num_stages=3)
    found = list(neighbours(tiles, {"tokens": (16, 64), "segments": (1, 8), "num_stages": (1, 5)}))
    assert found[0] == tiles
    assert [(one.tokens, one.segments, one.num_stages) for one in found[1:]] == [
        (32, 1, 3), (64, 2, 3), (64, 1, 2), (64, 1, 4),
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.nightly, id="all")])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_kernels_of_a_real_run_lower(arch: str, step: int) -> None:
    """Every case calls a kernel that can be lowered, on arrays that a kernel's offsets reach; names are unique."""
    setup = load("gpu_check_cases").Setup(arch, 16 << 30)
    for section in SECTIONS[:-1]:
        cases = load(f"gpu_check_{section}").cases(setup)
        assert len({case.name for case in cases}) == len(cases)
        plain = ("copy", "product", "bfloat16, XLA", "PyTorch SDPA")  # no kernels of ours
        for case in [case for case in cases if not case.name.startswith(plain)][::step]:
            function = getattr(case, "call", None) or case.function
            assert lower(function, *case.arguments, arch=arch), case.name
            fixed, *_ = case.arguments
            assert all(array.size < 2**31 for array in fixed.values() if array is not None)
