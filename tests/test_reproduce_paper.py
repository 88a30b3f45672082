"""scripts/reproduce_paper: a quick run writes every table and chart, and its numbers are in order."""

import re
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "reproduce_paper.py"
TRACE = ROOT / "tests" / "data" / "azure_conversation_lengths.csv"
CHARTS = ("figure_2.png", "figure_13.png", "figure_15.png", "figure_18b.png")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a quick run with a recorded trace has written."""
    folder = tmp_path_factory.mktemp("paper")
    done = run("--quick", "--output", str(folder), "--trace", str(TRACE))
    assert done.returncode == 0, done.stderr
    return folder


def rows(folder: Path, heading: str, index: int = 0) -> list[list[str]]:
    """The cells of a section's table, without its head."""
    section = re.split(r"^## ", (folder / "paper.md").read_text(), flags=re.MULTILINE)
    [text] = [part for part in section if part.startswith(heading)]
    table = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)[index]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def ours(cell: str) -> float:
    return float(cell.split(" ")[0])


def decode(path: Path) -> npt.NDArray[np.uint8]:
    """The pixels of an 8-bit RGB PNG whose rows have no filter; every chunk's checksum is looked at."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0] == zlib.crc32(kind + body)
        chunks[kind], at = body, at + 12 + size
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert rest == [8, 2, 0, 0, 0]
    pixels = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    assert not pixels[:, 0].any()
    return pixels[:, 1:].reshape(height, width, 3)


@pytest.mark.parametrize("name", CHARTS)
def test_charts(folder: Path, name: str) -> None:
    image = decode(folder / "paper" / name)
    assert image.shape[0] == 360
    assert 500 < image.shape[1] < 1600
    assert (image[[0, -1], [0, -1]] == 255).all(), "white in the corners"
    for color in ((0, 114, 178), (230, 159, 0), (40, 40, 40)):  # two series and the text
        assert (image == color).all(axis=2).sum() > 300
    assert f"(paper/{name})" in (folder / "paper.md").read_text()


def test_slots(folder: Path) -> None:
    table = rows(folder, "Table 1")
    assert [row[0] for row in table] == ["OPT-13B", "OPT-66B", "OPT-175B"]
    for row, paper in zip(table, (15.7, 9.7, 60.1), strict=True):
        assert float(row[5].rstrip("K")) == pytest.approx(paper, rel=0.02)
        assert row[6] == f"**{paper}K**"


def test_waste(folder: Path) -> None:
    table = rows(folder, "Figure 2")
    assert [row[0] for row in table] == ["ShareGPT fit"] * 4 + ["recorded"] * 4
    for row in table:
        assert sum(map(ours, row[2:6])) == pytest.approx(100, abs=0.25)
    for lengths in (table[:4], table[4:]):
        of_held = [ours(row[6]) for row in lengths]
        assert of_held == sorted(set(of_held)), "Max < Pow2 < Oracle < paged"
        assert of_held[3] > 90
        assert ours(lengths[2][4]) == ours(lengths[3][3]) == 0  # Oracle has nothing over, paging reserves nothing


def test_running(folder: Path) -> None:
    table = rows(folder, "Figure 13")
    assert len(table) == 4
    for row in table:
        running = [ours(cell) for cell in row[2:6]]
        assert running == sorted(running)
        assert 0 < running[0] <= 7


def test_sharing(folder: Path) -> None:
    table = {(row[0], row[1]): [ours(cell) for cell in row[2:]] for row in rows(folder, "Figure 15")}
    assert len(table) == 6
    for (lengths, method), saved in table.items():
        assert saved == sorted(saved)
        for width, value in zip((2, 4, 6), saved, strict=True):
            assert 0 < value < 100 * (width - 1) / width, "one copy of everything is the most that sharing leaves"
        if method == "beam":
            assert saved > table[lengths, "parallel"]
    by_stay = [[float(cell) for cell in row] for row in rows(folder, "Figure 15", 1)]
    assert by_stay[0][1:] == table["Alpaca fit", "beam"]
    assert [row[3] for row in by_stay] == sorted((row[3] for row in by_stay), reverse=True)


def test_block_sizes(folder: Path) -> None:
    table = rows(folder, "Figure 18b")
    assert [row[0] for row in table] == ["ShareGPT fit", "Alpaca fit", "recorded"]
    for row in table:
        wasted = [float(cell) for cell in row[1:]]
        assert len(wasted) == 9
        assert wasted[0] == 0
        assert wasted == sorted(wasted)
    sharegpt, alpaca = (float(row[9]) for row in table[:2])
    assert alpaca > sharegpt + 20, "short sequences waste more of a large block"


def test_it_says_which_is_which(folder: Path) -> None:
    text = (folder / "paper.md").read_text()
    assert "This is a quick run" in text
    assert "drawn, not the data sets" in text
    assert f"real lengths**, drawn from {TRACE.name}" in text
    assert str(ROOT) not in text
    assert str(folder) not in text


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    done = run("--quick", "--output", str(tmp_path), "--trace", str(tmp_path / "none.csv"))
    assert done.returncode == 2
    assert done.stderr.startswith("reproduce_paper: the trace ")
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
