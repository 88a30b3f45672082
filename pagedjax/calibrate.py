"""Measure how long this machine's steps take with a model, for a simulation of a server that runs it."""

import itertools

import numpy as np

from pagedjax.bench import clip, measure, random_prompts
from pagedjax.checkpoint import open_checkpoint
from pagedjax.config import EngineConfig
from pagedjax.loading import Say, load_engine, say_on_stderr
from pagedjax.models import parse_config
from pagedjax.step_time import StepRecorder, StepTimeModel, fit_step_time_model

_OUTPUT = 24  # tokens of each request
_LONGEST_PROMPT = 1024
_PROMPT_TOKENS = 4096  # in each workload, about


def cache_windows(model: str) -> tuple[int | None, ...]:
    """The windows of a model's cache groups, from its config.json alone.

    Raises:
        UserError: the model cannot be found or read.
    """
    return parse_config(open_checkpoint(model, "dummy").config).cache_layout.windows


def calibrate(config: EngineConfig, say: Say = say_on_stderr) -> StepTimeModel:
    """Load a model, run random requests of many lengths, 1, 2, 4 and more at once, and fit a model of a step's time.

    Raises:
        UserError: the model can't be loaded.
    """
    engine = load_engine(config, say=say)
    recorder = engine.on_step = StepRecorder(engine.shapes.buckets)
    random = np.random.default_rng(config.seed)
    longest = min(_LONGEST_PROMPT, engine.sizes.max_model_len - _OUTPUT)
    for at_once in itertools.takewhile(lambda n: n <= engine.sizes.max_num_seqs, (2**i for i in itertools.count())):
        most = min(longest, 2 * _PROMPT_TOKENS // at_once)
        drawn = [(int(prompt), _OUTPUT) for prompt in random.integers(1, max(2, most), size=at_once)]
        lengths, _ = clip(drawn, engine.sizes.max_model_len)
        prompts = random_prompts(lengths, engine.vocab_size, seed=config.seed + at_once)
        measure(engine, prompts, [output for _, output in lengths])
    say(f"{len(recorder.records)} steps measured")
    return fit_step_time_model(recorder.records, recorder.token_buckets)
