"""Grouped bar charts as PNG, drawn as the package's own charts are."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pagedjax.bench_plot import COLORS, GRID, INK, png, text_width, tick_step, write_text

HEIGHT, TOP, BOTTOM, LEFT = 360, 90, 44, 64


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
