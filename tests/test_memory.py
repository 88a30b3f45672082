"""The memory promises: what is held is filled, an idle engine holds nothing, and the start-up report is true."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from pagedjax.block_tables import BlockTables
from pagedjax.blocks import BlockPool
from pagedjax.cache_layout import cache_layout
from pagedjax.request import Sequence, SequenceState
from pagedjax.scheduler import Scheduler
from pagedjax.traces import read_trace

LENGTHS = Path(__file__).parent / "data" / "azure_conversation_lengths.csv"
BLOCK_SIZE = 16
MAX_WASTE = 0.04


@pytest.mark.parametrize("pool_tokens", [20_000, 60_000, 400_000])
def test_slots_held_are_filled(pool_tokens: int) -> None:
    """All requests of the trace at once, scaled to a mean of 400 tokens, through a step that takes no time."""
    trace = read_trace(LENGTHS)
    mean = sum(r.prompt_tokens + r.output_tokens for r in trace) / len(trace)
    scale = 400 / mean
    pool = BlockPool(pool_tokens // BLOCK_SIZE)
    scheduler = Scheduler(BlockTables(pool, block_size=BLOCK_SIZE, chunk=512), max_num_seqs=64, token_budget=512)
    for index, request in enumerate(trace):
        prompt = max(1, round(request.prompt_tokens * scale))
        output = max(1, round(request.output_tokens * scale))
        scheduler.add(Sequence(str(index), 0, [0] * prompt, prompt, output))
    held = filled = 0
    for _ in itertools.count():
        plan = scheduler.schedule()
        held += pool.num_held * BLOCK_SIZE
        filled += sum(sequence.num_computed for sequence in scheduler.running)
        if not plan.num_tokens:
            break
        for share in plan:
            if share.samples:
                share.sequence.num_pending -= 1
                share.sequence.token_ids.append(0)
            if share.sequence.num_known_output == share.sequence.max_tokens:
                scheduler.finish(share.sequence)
                assert share.sequence.state is SequenceState.FINISHED
    assert not scheduler.waiting
    assert not scheduler.running
    assert pool.num_held == 0
    assert 1 - filled / held < MAX_WASTE


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("270M", ((512,) * 5 + (None,)) * 3),
        ("4B", ((1024,) * 5 + (None,)) * 5 + (1024,) * 4),
        ("12B", ((1024,) * 5 + (None,)) * 8),
    ],
)
def test_layers_with_a_window_hold_what_they_see(name: str, windows: tuple[int | None, ...]) -> None:
    """Gemma 3 at 8,192 tokens, prefill and decode, against full-length blocks in every layer."""
    layout = cache_layout(windows)
    pool = BlockPool(4000, layout.num_groups)
    tables = BlockTables(pool, block_size=BLOCK_SIZE, windows=layout.windows, chunk=512)
    scheduler = Scheduler(tables, max_num_seqs=1, token_budget=512)
    sequence = Sequence(name, 0, [0] * 8192, 8192, 100)
    scheduler.add(sequence)
    held = []
    while sequence.num_output < 100:
        for share in scheduler.schedule():
            if share.samples:
                sequence.num_pending -= 1
                sequence.token_ids.append(0)
        held.append(pool.num_held * layout.depth)
    full = len(windows) * 8192 // BLOCK_SIZE
    assert max(held) <= full / 3
    assert held[-1] <= full / 3.6


def test_peak_memory_is_what_the_report_said(tmp_path: Path, step_cache: Path) -> None:
    """Within 15%, over a run that fills the largest steps, in a process of its own."""
    config = {
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32000, "max_position_embeddings": 1024,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = {
        "load-format": "dummy",
        "dtype": "float32",
        "kv-cache-memory": "256MiB",
        "input-len": 300,
        "output-len": 16,
    }
    listed = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "pagedjax.cli", "bench", "throughput", str(tmp_path), *listed]
    ballast = bytearray(2 * 2**30)  # what this process holds is none of that one's
    ballast[:: 2**12] = b"x" * len(ballast[:: 2**12])
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    line = next(line for line in done.stderr.splitlines() if "memory: " in line)
    announced = int(line.rsplit("; ", 1)[1].split()[0].replace(",", ""))
    assert json.loads(done.stdout)["peak_rss_mib"] == pytest.approx(announced, rel=0.15)
