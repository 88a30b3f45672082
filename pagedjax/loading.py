"""From engine settings to a running engine: open, load, size, compile, report."""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from pagedjax.block_tables import BlockTables
from pagedjax.checkpoint import cache_root, open_checkpoint
from pagedjax.config import EngineConfig, UserError
from pagedjax.engine import Engine
from pagedjax.metrics import Metrics
from pagedjax.pack import StepShapes
from pagedjax.runner import StepRunner
from pagedjax.sizing import EngineSizes, choose_sizes, startup_report
from pagedjax.tokenizer import Tokenizer
from pagedjax.weights import build_model, resolve_backend, resolve_dtype

Say = Callable[[str], None]


def say_on_stderr(line: str) -> None:
    """A line of progress on standard error."""
    print(f"pagedjax: {line}", file=sys.stderr, flush=True)


def load_engine(
    config: EngineConfig,
    chat_template: str | None = None,
    say: Say = say_on_stderr,
    make_tables: Callable[[EngineSizes], BlockTables] | None = None,
) -> Engine:
    """An engine that has compiled everything it will ever run.

    Args:
        config: its settings.
        chat_template: takes the place of the model's own.
        say: gets the lines of the progress and of the start-up report.
        make_tables: for block tables of another kind than paged ones.

    Raises:
        UserError: the model can't be loaded or does not fit.
    """
    use_compilation_cache()
    dtype = resolve_dtype(config.dtype)
    checkpoint = open_checkpoint(config.model, config.load_format, dtype=dtype, tokenizer=config.tokenizer)
    backend = resolve_backend(config.attention_backend)
    pool = ThreadPoolExecutor(1)  # a large vocabulary takes a second, in code that lets Python go on
    folder = checkpoint.tokenizer_dir
    tokenizing = pool.submit(Tokenizer.load, folder, chat_template) if folder else None
    graphdef, params, model = build_model(checkpoint, dtype, attention_backend=backend, seed=config.seed)
    if model.unread:
        say(f"config.json has fields that nothing here reads: {', '.join(model.unread)}")
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    sizes = choose_sizes(config, model, dtype, weight_bytes)
    shapes = StepShapes.plan(
        model,
        max_num_seqs=sizes.max_num_seqs,
        max_model_len=sizes.max_model_len,
        block_size=sizes.block_size,
        num_blocks=sizes.num_blocks,
        token_budget=sizes.token_budget,
    )
    runner = StepRunner(graphdef, params, model, shapes, dtype, sizes.swap_blocks)
    started = time.perf_counter()
    memory = runner.warm_up(lambda shape, seconds: say(f"compiled the step of {shape} in {seconds:.1f} s"))
    tokenizer = tokenizing.result() if tokenizing else None
    say(f"{runner.num_compiled} shapes compiled in {time.perf_counter() - started:.1f} s")
    for line in startup_report(model, sizes, dtype, weight_bytes, memory.temporaries + memory.outputs, backend):
        say(line)
    metrics = Metrics(checkpoint.name, max_model_len=sizes.max_model_len)
    metrics.set_compiled_shapes(runner.num_compiled)
    metrics.set_cache_config({"block_size": sizes.block_size, "num_blocks": sizes.num_blocks, "dtype": dtype})
    eos = dict.fromkeys((*model.eos_token_ids, *(tokenizer.eos_token_ids if tokenizer else ())))
    return Engine(
        runner,
        sizes,
        tokenizer=tokenizer,
        eos_token_ids=tuple(eos),
        metrics=metrics,
        prefix_caching=config.enable_prefix_caching,
        by_priority=config.scheduling_policy == "priority",
        tables=make_tables(sizes) if make_tables else None,
        seed=config.seed,
    )


def use_compilation_cache() -> None:
    """Let JAX keep compiled steps between starts, unless the user chose a place or turned it off."""
    if jax.config.jax_compilation_cache_dir is None and jax.config.jax_enable_compilation_cache:
        folder: Path = cache_root() / "xla"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot make {folder} ({error.strerror}): set PAGEDJAX_CACHE to a folder you own"
            ) from error
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
