"""Grouped bar charts as PNG, with nothing but NumPy and zlib (PNG: ISO/IEC 15948, one IDAT, no row filter)."""

import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

Image = npt.NDArray[np.uint8]
Color = tuple[int, int, int]

INK: Color = (40, 40, 40)
GRID: Color = (225, 225, 225)
# Told apart in every common kind of colour blindness (Okabe and Ito).
COLORS: tuple[Color, ...] = ((0, 114, 178), (230, 159, 0), (0, 158, 115), (204, 121, 167))

# A glyph is seven rows of five pixels; each row is a digit in base 32, the leftmost pixel its highest bit.
GLYPHS = dict(
    line.split()
    for line in """0 ehjlphe\n1 4c4444e\n2 eh1248v\n3 v2421he\n4 26aiv22\n5 vgu11he\n6 68guhhe\n7 v124888\n8 ehhehhe
9 ehhf12c\nA ehhvhhh\nB uhhuhhu\nC ehggghe\nD sihhhis\nE vgguggv\nF vgguggg\nG ehgnhhf\nH hhhvhhh\nI e44444e\nJ 72222ic
K hikokih\nL ggggggv\nM hrllhhh\nN hhpljhh\nO ehhhhhe\nP uhhuggg\nQ ehhhlid\nR uhhukih\nS fgge11u\nT v444444\nU hhhhhhe
V hhhhha4\nW hhhllla\nX hha4ahh\nY hhha444\nZ v1248gv\n. 00000cc\n, 0000c48\n% op248j3\n( 2488842\n) 8422248\n- 000v000
: 0cc0cc0\n/ 01248g0""".splitlines()
)
ADVANCE, SCALE = 6, 2  # pixels from glyph to glyph before scaling; pixels on a side of a glyph's pixel
HEIGHT, TOP, BOTTOM, LEFT = 360, 90, 44, 64


def text_width(text: str) -> int:
    """Pixels across a line of text."""
    return ADVANCE * SCALE * len(text)


def write_text(image: Image, x: int, y: int, text: str) -> None:
    """Draw a line of text, in capitals, with its upper left corner at ``x``, ``y``."""
    for index, char in enumerate(text.upper()):
        if char == " ":
            continue
        rows = [[int(row, 32) >> bit & 1 for bit in (4, 3, 2, 1, 0)] for row in GLYPHS[char]]
        glyph = np.kron(np.array(rows, bool), np.ones((SCALE, SCALE), bool))
        left = x + index * ADVANCE * SCALE
        image[y : y + 7 * SCALE, left : left + 5 * SCALE][glyph] = INK


def png(image: Image) -> bytes:
    """A PNG file of ``[height, width, 3]`` uint8."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width, _ = image.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def tick_step(top: float) -> float:
    """A round distance between grid lines, so that at most six lie below ``top``."""
    power = 10.0 ** np.floor(np.log10(top))
    return float(next(step for step in power * np.array([0.1, 0.2, 0.5, 1, 2]) if top / step <= 6))


def bar_chart(path: Path, title: str, groups: Sequence[str], series: Mapping[str, Sequence[float | None]]) -> None:
    """Write a chart with a bar per group and series, its number above it; None leaves a bar out.

    Raises:
        ValueError: there are more series than colours, or none of the values is above 0.
    """
    top = max((value for values in series.values() for value in values if value is not None), default=0.0)
    if len(series) > len(COLORS) or top <= 0:
        raise ValueError(f"series must be 1 to {len(COLORS)} with a value above 0, got {len(series)} up to {top}")
    bar = 2 + text_width("00.0")  # a number fits over its bar
    pitch = max(bar * len(series), *(text_width(group) for group in groups)) + 24
    legend = sum(text_width(name) + 44 for name in series)
    width = LEFT + 16 + max(pitch * len(groups), text_width(title), legend)
    image = np.full((HEIGHT, width, 3), 255, np.uint8)
    write_text(image, LEFT, 14, title)
    floor, pixels = HEIGHT - BOTTOM, (HEIGHT - BOTTOM - TOP) / top
    step = tick_step(top)
    for index in range(int(top / step) + 1):
        y = floor - round(index * step * pixels)
        image[y, LEFT:] = GRID
        label = f"{index * step:g}"
        write_text(image, LEFT - 8 - text_width(label), y - 7, label)
    x = LEFT
    for number, (name, values) in enumerate(series.items()):
        image[42:56, x : x + 14] = COLORS[number]
        write_text(image, x + 20, 42, name)
        x += text_width(name) + 44
        for index, value in enumerate(values):
            if value is None:
                continue
            left = LEFT + index * pitch + (pitch - bar * len(series)) // 2 + number * bar
            y = floor - round(value * pixels)
            image[y:floor, left + 1 : left + bar - 1] = COLORS[number]
            label = f"{value:.1f}" if value < 99.95 else f"{value:.0f}"
            write_text(image, left + (bar - text_width(label)) // 2 + 1, y - 18, label)
    image[floor, LEFT:] = INK
    for index, group in enumerate(groups):
        write_text(image, LEFT + index * pitch + (pitch - text_width(group)) // 2, floor + 14, group)
    path.write_bytes(png(image))
