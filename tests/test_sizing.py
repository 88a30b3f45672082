"""How much memory there is for the cache, and that no sampling setting leaves float32."""

from pathlib import Path

import numpy as np
import pytest

from pagedjax.config import SamplingParams
from pagedjax.sampling_rows import SamplingRows
from pagedjax.sizing import MIB, available_memory

GIB = 1024 * MIB


def machine(folder: Path, free: int) -> Path:
    """An account of a machine's memory in which `free` bytes are available."""
    path = folder / "meminfo"
    path.write_text(f"MemTotal:       67108864 kB\nMemFree:          1024 kB\nMemAvailable:   {free // 1024} kB\n")
    return path


def group(folder: Path, limit: str, used: int, stat: str | None) -> Path:
    """A control group's folder."""
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    if stat is not None:
        (folder / "memory.stat").write_text(stat)
    return folder


@pytest.mark.parametrize(
    ("limit", "used", "stat", "expected"),
    [
        ("max", 7 * GIB, "anon 1\n", 32 * GIB),
        (str(8 * GIB), 7 * GIB, None, GIB),
        (str(8 * GIB), 7 * GIB, "anon 1\nslab 2\n", GIB),
        # A checkpoint of 5 GiB was read: its pages count as used, and can be had back.
        (str(8 * GIB), 7 * GIB, f"anon {2 * GIB}\nfile {5 * GIB}\ninactive_file {5 * GIB}\nactive_file 0\n", 6 * GIB),
        (str(64 * GIB), GIB, "inactive_file 0\n", 32 * GIB),
        (str(GIB), 2 * GIB, "inactive_file 0\n", 0),
    ],
)
def test_available_memory(tmp_path: Path, limit: str, used: int, stat: str | None, expected: int) -> None:
    folder = group(tmp_path, limit, used, stat)
    assert available_memory(machine(tmp_path, 32 * GIB), folder) == expected


def test_available_memory_without_accounts(tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path, 3 * GIB), tmp_path / "none") == 3 * GIB
    assert available_memory(tmp_path / "none", tmp_path / "none") > 0
    assert available_memory() > 0


def row(**fields: float) -> dict[str, np.float32]:
    rows = SamplingRows(num_lanes=1, vocab_size=8, max_bias=1)
    rows.set(0, SamplingParams(**fields), prompt_len=1, key=(0, 0))  # type: ignore[arg-type]
    taken = rows.take([0], 1)
    return {name: value[0] for name in fields if (value := taken[name]) is not None}


@pytest.mark.parametrize("top_p", [5e-324, 1e-46, 1e-40, 1e-7])
def test_the_least_top_p_still_cuts(top_p: float) -> None:
    assert row(top_p=top_p)["top_p"] == np.float32(1e-6)


@pytest.mark.parametrize(("penalty", "taken"), [(5e-324, 1e-6), (1e-46, 1e-6), (1e39, 1e6), (1.7e308, 1e6)])
def test_repetition_penalty_stays_in_float32(penalty: float, taken: float) -> None:
    with np.errstate(all="raise"):
        assert row(repetition_penalty=penalty)["repetition_penalty"] == np.float32(taken)


@pytest.mark.parametrize("value", [1e-5, 0.5, 1.0])
def test_ordinary_settings_pass_unchanged(value: float) -> None:
    assert row(top_p=value, repetition_penalty=value) == {
        "top_p": np.float32(value),
        "repetition_penalty": np.float32(value),
    }
