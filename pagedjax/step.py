"""One step on the device: a packed ragged batch of tokens through the model, and one sampled token per sequence.

``step`` is a pure function of graph definition, parameters, cache and input. Its shapes are fixed by the token
bucket alone: which option a request uses, how long its context is and how the batch is cut change values only.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from pagedjax.attention import AttentionBatch
from pagedjax.kv_cache import KVCache
from pagedjax.models import Decoder
from pagedjax.sampling import TOP_LOGPROBS, SampleOutput, SamplingInput, sample, token_logprobs

# Rows of logits that are made at once for prompt logprobs, which bounds their memory.
PROMPT_ROWS = 32


def min_rows(dtype: jnp.dtype | str) -> int:
    """Rows from which a row's product has the same bits whatever the number of rows (measured; ADR 2)."""
    return 8 if jnp.dtype(dtype) == jnp.bfloat16 else 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepInput:
    """A step's tokens, T of them with padding, of at most S sequences; R rows of logits; L lanes.

    A lane is a running sequence's place in ``last_tokens``, through which a step takes the tokens that the step
    before it sampled, without a round trip to the host.

    Attributes:
        token_ids: ``[T]`` int32.
        feedback: ``[T]`` int32; the lane whose last sampled token stands in for ``token_ids``, or -1.
        positions: ``[T]`` int32, counted from the sequence's first token.
        slots: ``[T]`` int32 place in the cache, ``block * block_size + offset``; past the last slot for padding.
        batch: which tokens and blocks belong to which sequence.
        logit_rows: ``[R]`` int32, the tokens after which one is sampled.
        logit_seqs: ``[R]`` int32, the sequence each of them belongs to.
        lanes: ``[R]`` int32 lane that takes the sampled token; L for padding.
        num_logit_rows: int32 scalar.
        sampling: what each of the R rows asks for.
        prompt_rows: ``[T]`` int32 tokens whose successor's log-probability is wanted.
        prompt_targets: ``[T]`` int32, that successor.
        num_prompt_rows: int32 scalar.
        last_tokens: ``[L]`` int32, from the step before.
    """

    token_ids: jax.Array
    feedback: jax.Array
    positions: jax.Array
    slots: jax.Array
    batch: AttentionBatch
    logit_rows: jax.Array
    logit_seqs: jax.Array
    lanes: jax.Array
    num_logit_rows: jax.Array
    sampling: SamplingInput
    prompt_rows: jax.Array
    prompt_targets: jax.Array
    num_prompt_rows: jax.Array
    last_tokens: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens, in the order of ``StepInput.prompt_rows``.

    Attributes:
        logprobs, ranks: ``[T]`` float32, int32.
        top_ids, top_logprobs: ``[T, 20]`` int32, float32.
    """

    logprobs: jax.Array
    ranks: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """What a step gives back.

    Attributes:
        samples: the sampled token of each of the R rows, and its log-probabilities where asked for.
        prompt: log-probabilities of prompt tokens, where asked for.
        last_tokens: ``[L]`` int32, each lane's last sampled token, for the next step.
    """

    samples: SampleOutput
    prompt: PromptLogprobs
    last_tokens: jax.Array


def step(graphdef: Any, params: Any, kv_cache: KVCache, step_input: StepInput) -> tuple[KVCache, StepOutput]:
    """Compute a step's tokens and sample the next ones.

    Pure. The engine compiles it with ``kv_cache`` donated; jit, vmap over ``params`` and scan work as for any
    function.

    Args:
        graphdef, params: of ``load_model``.
        kv_cache: its content is written to; donate it.
        step_input: see its attributes for shapes.
    """
    model: Decoder = nnx.merge(graphdef, params)
    tokens = jnp.where(
        step_input.feedback >= 0,
        step_input.last_tokens[jnp.maximum(step_input.feedback, 0)],
        step_input.token_ids,
    )
    hidden, kv_cache = model(tokens, step_input.positions, step_input.slots, kv_cache, step_input.batch)
    samples = _sample_rows(model, hidden, kv_cache, step_input)
    last_tokens = step_input.last_tokens.at[step_input.lanes].set(samples.tokens, mode="drop")
    return kv_cache, StepOutput(samples, _prompt_logprobs(model, hidden, step_input), last_tokens)


def _sample_rows(model: Decoder, hidden: jax.Array, kv_cache: KVCache, step_input: StepInput) -> SampleOutput:
    """Sample the R rows. The head is the widest product: where few rows are asked for, only few are computed."""
    rows = step_input.logit_rows.shape[0]
    few = min_rows(model.embedding[...].dtype)

    def history(row: jax.Array) -> jax.Array:
        table = step_input.batch.block_tables[step_input.logit_seqs[row]]
        return kv_cache.token_ids[table].reshape(-1)

    def logits(count: int) -> jax.Array:
        wanted = jnp.pad(step_input.logit_rows[:count], (0, max(0, few - count)))
        return jnp.pad(model.logits(hidden[wanted])[:count], ((0, rows - count), (0, 0)))

    if rows <= few:
        return sample(logits(rows), step_input.sampling, history)
    enough = step_input.num_logit_rows <= few
    return sample(lax.cond(enough, lambda: logits(few), lambda: logits(rows)), step_input.sampling, history)


def _prompt_logprobs(model: Decoder, hidden: jax.Array, step_input: StepInput) -> PromptLogprobs:
    """In chunks of rows, as many as are asked for."""
    num_tokens = hidden.shape[0]
    chunk = max(PROMPT_ROWS, min_rows(model.embedding[...].dtype))
    padded = -(-num_tokens // chunk) * chunk
    rows = jnp.pad(step_input.prompt_rows, (0, padded - num_tokens))
    targets = jnp.pad(step_input.prompt_targets, (0, padded - num_tokens))
    out = PromptLogprobs(
        logprobs=jnp.zeros(padded, jnp.float32),
        ranks=jnp.zeros(padded, jnp.int32),
        top_ids=jnp.zeros((padded, TOP_LOGPROBS), jnp.int32),
        top_logprobs=jnp.zeros((padded, TOP_LOGPROBS), jnp.float32),
    )

    def body(i: jax.Array, out: PromptLogprobs) -> PromptLogprobs:
        at = i * chunk
        logits = model.logits(hidden[lax.dynamic_slice_in_dim(rows, at, chunk)])
        found = PromptLogprobs(*token_logprobs(logits, lax.dynamic_slice_in_dim(targets, at, chunk)))
        return jax.tree.map(lambda whole, part: lax.dynamic_update_slice_in_dim(whole, part, at, 0), out, found)

    out = lax.fori_loop(0, -(-step_input.num_prompt_rows // chunk), body, out)
    return jax.tree.map(lambda a: a[:num_tokens], out)
