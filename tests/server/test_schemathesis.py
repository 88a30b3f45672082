"""Schemathesis draws requests from ``/openapi.json``, right and wrong ones, and sends them to a real server."""

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from chain_model import write_chain_model

FLAGS = (
    "--load-format dummy --dtype float32 --block-size 8 --num-kv-blocks 64 --max-num-seqs 8 --port 0 --log-level error"
)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, step_cache: Path) -> Iterator[str]:
    folder = write_chain_model(tmp_path_factory.mktemp("drawn"), recite={"<go>": "on"}, max_model_len=128).folder
    command = [sys.executable, "-m", "pagedjax.cli", "serve", str(folder), *FLAGS.split()]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        ready = next(filter(None, (re.match(r"pagedjax: ready on (\S+)", line) for line in process.stderr)))
        try:
            yield ready[1]
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


@pytest.mark.parametrize(
    "seconds", [pytest.param(60, marks=pytest.mark.slow), pytest.param(300, marks=pytest.mark.nightly)]
)
def test_no_request_brings_a_fault_to_light(address: str, seconds: int, tmp_path: Path) -> None:
    command = [
        str(Path(sys.executable).with_name("st")), "run", f"{address}/openapi.json", "--checks", "not_a_server_error",
        "--phases", "coverage,fuzzing", "--max-time", str(seconds), "--generation-database", "none", "--no-color",
        "--request-timeout", "20", "--continue-on-failure",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=seconds + 200, check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    found = re.search(r"(\d+) generated", done.stdout)
    assert found, done.stdout[-3000:]
    assert int(found[1]) > 300
    with urllib.request.urlopen(f"{address}/debug/blocks", timeout=10) as answer:
        pool = json.load(answer)
    assert not pool["requests"]
    assert all(block["state"] != "referenced" for block in pool["blocks"])
