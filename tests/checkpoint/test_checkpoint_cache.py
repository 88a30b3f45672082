"""The cache of converted models: a folder is whole or not there, whoever is killed or comes at once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoint.tiny_gguf import tiny_llama

from pagedjax.checkpoint import cache_root, conversion, open_checkpoint
from pagedjax.checkpoint.cache import file_digest, folder_in_cache
from pagedjax.config import UserError

# Fills the folder "made", logs that it began, and goes on half way only when the gate is there.
GATED_FILL = """
import sys, time
from pathlib import Path
from pagedjax.checkpoint.cache import folder_in_cache

def fill(folder):
    with Path(sys.argv[1]).open("a") as log:
        log.write("begun\\n")
    (folder / "half").write_text("x")
    while not Path(sys.argv[2]).exists():
        time.sleep(0.01)
    (folder / "whole").write_text("y")

print(folder_in_cache("made", lambda folder: (folder / "whole").is_file(), fill))
"""


def filler(log: Path, gate: Path) -> subprocess.Popen[str]:
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": root}
    command = [sys.executable, "-c", GATED_FILL, str(log), str(gate)]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.01)


def weights_file(path: Path, dtype: str) -> Path:
    opened = open_checkpoint(str(path), dtype=dtype, progress=silent)
    return next(iter(opened.tensors.values())).path


def silent(done: int, total: int) -> None:
    """Progress that nobody watches."""


def test_two_at_once_make_it_once_and_both_get_it(tmp_path: Path, cache: Path) -> None:
    log, gate = tmp_path / "log", tmp_path / "gate"
    first = filler(log, gate)
    wait_for(log)
    second = filler(log, gate)
    assert second.stderr is not None
    assert "waiting for another process" in second.stderr.readline()
    gate.touch()
    assert [p.communicate(timeout=60)[0].strip() for p in (first, second)] == [str(cache / "made")] * 2
    assert log.read_text() == "begun\n"
    assert sorted(path.name for path in (cache / "made").iterdir()) == ["half", "whole"]


def test_what_a_killed_process_leaves_is_never_taken_for_whole(tmp_path: Path, cache: Path) -> None:
    log, gate = tmp_path / "log", tmp_path / "gate"
    killed = filler(log, gate)
    wait_for(cache / ".made.partial" / "half")
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    assert not (cache / "made").exists()
    gate.touch()
    out, _ = filler(log, gate).communicate(timeout=60)
    assert out.strip() == str(cache / "made")
    assert (cache / "made" / "whole").is_file()
    assert not (cache / ".made.partial").exists()


def test_a_failed_conversion_leaves_nothing_and_the_next_one_succeeds(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_llama(tmp_path / "m.gguf")

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_checkpoint(str(path), progress=interrupt)
    assert all(left.suffix == ".lock" for left in (cache / "gguf").iterdir())
    assert open_checkpoint(str(path), progress=silent).names()


def test_later_starts_neither_convert_nor_hash_nor_parse(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_llama(tmp_path / "m.gguf")
    first = open_checkpoint(str(path), progress=silent)

    def never(*_args: object) -> None:
        raise AssertionError("must not be called")

    monkeypatch.setattr(conversion, "read_gguf", never)
    monkeypatch.setattr("pagedjax.checkpoint.cache._sha256", never)
    assert open_checkpoint(str(path)).tensors == first.tensors


def test_a_damaged_cache_is_made_again(tmp_path: Path, cache: Path) -> None:
    path = tiny_llama(tmp_path / "m.gguf")
    weights = weights_file(path, "bfloat16")
    before = weights.read_bytes()
    weights.write_bytes(before[:-5])
    open_checkpoint(str(path), progress=silent)
    assert weights.read_bytes() == before


def test_another_content_or_dtype_is_another_folder(tmp_path: Path, cache: Path) -> None:
    path = tiny_llama(tmp_path / "m.gguf")
    folders = {weights_file(path, dtype).parent for dtype in ("bfloat16", "float32")}
    digest = file_digest(path)
    tiny_llama(path, {"llama.context_length": 64})
    assert file_digest(path) != digest
    opened = open_checkpoint(str(path), progress=silent)
    assert opened.config["max_position_embeddings"] == 64
    folders.add(weights_file(path, "bfloat16").parent)
    assert len(folders) == 3
    with pytest.raises(UserError, match="float16"):
        open_checkpoint(str(path), dtype="float16")


def test_a_bar_on_standard_error_shows_the_conversion(
    tmp_path: Path, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    open_checkpoint(str(tiny_llama(tmp_path / "shown.gguf")))
    out, err = capfd.readouterr()
    assert out == ""
    assert "converting shown.gguf: 100%" in err


def test_a_cache_that_cannot_be_written_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PAGEDJAX_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="PAGEDJAX_CACHE"):
        folder_in_cache("name", Path.is_dir, lambda folder: None)
    with pytest.raises(UserError, match="file"):
        open_checkpoint(str(tiny_llama(tmp_path / "m.gguf")))


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PAGEDJAX_CACHE", str(tmp_path / "own"))
    assert cache_root() == tmp_path / "own"
    monkeypatch.delenv("PAGEDJAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "pagedjax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "pagedjax"
