"""Line charts as PNG, with nothing but NumPy and zlib (PNG: ISO/IEC 15948, one IDAT, no row filter)."""

import itertools
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pagedjax.config import UserError

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
COLUMNS, HEAD = 2, 76  # panels in a row; pixels above them
PANEL_WIDTH, PANEL_HEIGHT = 480, 300
LEFT, RIGHT, TOP, BOTTOM = 104, 16, 44, 44  # a panel's margins


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


def line_charts(
    path: Path, title: str, groups: Sequence[str], panels: Mapping[str, Mapping[str, Sequence[float | None]]]
) -> None:
    """Write a chart with a panel per entry, two in a row, each with a line per series; None leaves a gap.

    Args:
        path: of the PNG file.
        title: above all panels.
        groups: what stands below the points, from left to right at equal distances.
        panels: by title, the series by name; all panels have series of the same names.

    Raises:
        UserError: the file cannot be written.
    """
    rows = -(-len(panels) // COLUMNS)
    image = np.full((HEAD + rows * PANEL_HEIGHT, COLUMNS * PANEL_WIDTH, 3), 255, np.uint8)
    write_text(image, LEFT, 14, title)
    x = LEFT
    for color, name in zip(COLORS, next(iter(panels.values())), strict=False):
        image[42:56, x : x + 14] = color
        write_text(image, x + 20, 42, name)
        x += text_width(name) + 44
    for index, (name, series) in enumerate(panels.items()):
        row, column = divmod(index, COLUMNS)
        top, left = HEAD + row * PANEL_HEIGHT, column * PANEL_WIDTH
        _panel(image[top : top + PANEL_HEIGHT, left : left + PANEL_WIDTH], name, groups, series)
    try:
        path.write_bytes(png(image))
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None


def _panel(image: Image, title: str, groups: Sequence[str], series: Mapping[str, Sequence[float | None]]) -> None:
    """Draw one panel over all of ``image``, which is a view."""
    write_text(image, LEFT, 10, title)
    floor, right = PANEL_HEIGHT - BOTTOM, PANEL_WIDTH - RIGHT
    top = max((value for values in series.values() for value in values if value is not None), default=0.0) or 1.0
    pixels = (floor - TOP) / top
    step = tick_step(top)
    for index in range(int(top / step) + 1):
        y = floor - round(index * step * pixels)
        image[y, LEFT:right] = GRID
        label = f"{index * step:g}".replace("+", "")
        write_text(image, LEFT - 8 - text_width(label), y - 7, label)
    image[floor, LEFT:right] = INK
    pitch = (right - LEFT) / len(groups)
    centers = [round(LEFT + (index + 0.5) * pitch) for index in range(len(groups))]
    every = max(1, -(-max(map(text_width, groups)) // max(1, int(pitch) - 8)))  # labels must not run into each other
    for center, group in list(zip(centers, groups, strict=True))[::every]:
        write_text(image, max(0, center - text_width(group) // 2), floor + 14, group)
    for color, values in zip(COLORS, series.values(), strict=False):
        points = [None if v is None else (x, floor - round(v * pixels)) for x, v in zip(centers, values, strict=True)]
        for point in filter(None, points):
            _square(image, *point, 4, color)
        for start, end in itertools.pairwise(points):
            if start and end:
                for x, y in np.linspace(start, end, 2 * PANEL_WIDTH).round().astype(int).tolist():
                    _square(image, x, y, 1, color)


def _square(image: Image, x: int, y: int, reach: int, color: Color) -> None:
    image[max(0, y - reach) : y + reach + 1, max(0, x - reach) : x + reach + 1] = color
