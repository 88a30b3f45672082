"""How layers lie in blocks, for models as they are, and how many blocks a window needs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedjax.block_tables import BlockTables
from pagedjax.blocks import BlockPool
from pagedjax.cache_layout import CacheLayout, cache_layout, window_blocks
from pagedjax.request import NO_BLOCK, Sequence


def five_to_one(num_layers: int, window: int) -> tuple[int | None, ...]:
    """Gemma 3: every sixth layer sees all."""
    return tuple(None if layer % 6 == 5 else window for layer in range(num_layers))


# Layers and windows as the models' config.json has them.
MODELS = {
    "Gemma 3 270M": (five_to_one(18, 512), 3, (None, *[512] * 5)),
    "Gemma 3 1B": (five_to_one(26, 512), 4, (None, *[512] * 6)),
    "Gemma 3 4B": (five_to_one(34, 1024), 5, (None, *[1024] * 6)),
    "Gemma 3 27B": (five_to_one(62, 1024), 11, (None, *[1024] * 5)),
    "gpt-oss 20B": ((128, None) * 12, 12, (None, 128)),
    "Mistral 7B v0.1": ((4096,) * 32, 32, (4096,)),
    "Llama 3.1 8B": ((None,) * 32, 32, (None,)),
    "Qwen2 7B, windows from layer 21": ((None,) * 21 + (131072,) * 7, 7, (None, None, None, 131072)),
}


def check(layout: CacheLayout, windows: tuple[int | None, ...]) -> None:
    places = list(zip(layout.group_of, layout.place_of, strict=True))
    assert len(places) == len(windows) == len(set(places)), "two layers in one place"
    assert [layout.windows[group] for group in layout.group_of] == list(windows)
    assert all(0 <= place < layout.depth for place in layout.place_of)
    assert set(layout.group_of) == set(range(layout.num_groups)), "a group without a layer"
    assert None not in layout.windows[layout.windows.count(None) :], "who sees all comes first"
    for window in set(windows):
        room = layout.windows.count(window) * layout.depth
        assert room <= windows.count(window) * (1.1 if window is None else 1.25)


@pytest.mark.parametrize("name", MODELS)
def test_models_as_they_are(name: str) -> None:
    windows, depth, groups = MODELS[name]
    layout = cache_layout(windows)
    check(layout, windows)
    assert (layout.depth, layout.windows) == (depth, groups)


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith(("Gemma", "gpt"))])
def test_places_follow_a_regular_pattern_of_windows(name: str) -> None:
    """The decoder's loop goes from place to place: a layer's blocks are never behind those of the layer before."""
    layout = cache_layout(MODELS[name][0])
    assert list(layout.place_of) == sorted(layout.place_of)


def test_gemma_at_8192_tokens_holds_a_third_of_full_tables() -> None:
    """The windows' share of the memory ends with the windows (chunks of 512 tokens, blocks of 16)."""
    windows = five_to_one(26, 512)
    layout = cache_layout(windows)
    slots_of_a_layer = layout.most_blocks(8192, 16, 512) * layout.depth * 16
    assert 3 * slots_of_a_layer < 8192 * len(windows)


@given(st.lists(st.sampled_from([None, None, 4, 512]), min_size=1, max_size=70).map(tuple))
def test_any_windows(windows: tuple[int | None, ...]) -> None:
    layout = cache_layout(windows)
    check(layout, windows)
    counts = {window: windows.count(window) for window in windows}
    for depth in range(layout.depth + 1, max(counts.values()) + 1):
        rooms = {window: -(-count // depth) * depth for window, count in counts.items()}
        assert any(rooms[w] > counts[w] * (1.1 if w is None else 1.25) for w in counts), "deeper blocks would do"


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 7])
def test_a_window_holds_so_many_blocks_and_no_fewer(window: int, block_size: int, chunk: int) -> None:
    """Counted on tables that grow by a chunk from every place."""
    most = 0
    for start in range(2 * (window + block_size), 2 * (window + block_size) + block_size):
        pool = BlockPool(100)
        tables = BlockTables(pool, block_size=block_size, windows=(window,), chunk=chunk)
        sequence = Sequence("a", 0, [0] * (start + chunk), start + chunk, 1)
        tables.grow(sequence, start)
        sequence.num_computed = sequence.num_stored = start
        tables.slide(sequence)
        tables.grow(sequence, start + chunk)
        assert sequence.block_tables[0].count(NO_BLOCK) == sequence.num_slid[0]
        assert sequence.num_slid[0] * block_size <= start - window + 1, "a block is gone that is still seen"
        most = max(most, pool.num_held)
    assert most == window_blocks(window, block_size, chunk)


def test_no_window_no_limit() -> None:
    assert window_blocks(None, 16, 512) is None
    layout = cache_layout((None, 8))
    assert layout.most_blocks(100, 1, 4) == 100 + (8 - 1) + 4
    assert layout.most_blocks(3, 1, 4) == 3 + 3
