"""One step on the device: a packed ragged batch of tokens through the model, and one sampled token per sequence.

``step`` is a pure function of graph definition, parameters, cache and input. Its shapes are fixed by the numbers of
tokens and of sampled rows alone: which option a request uses, how long its context is and how the batch is cut change
values only.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from pagedjax.attention_batch import AttentionBatch
from pagedjax.kv_cache import KVCache, copy_blocks
from pagedjax.models import Decoder
from pagedjax.sampling import TOP_LOGPROBS, SampleOutput, SamplingInput, sample, token_logprobs

# Rows of logits that are made at once for prompt logprobs, which bounds their memory.
PROMPT_ROWS = 32


def min_rows(dtype: jnp.dtype | str) -> int:
    """Rows from which a row's product has the same bits whatever the number of rows (measured; ADR 2)."""
    return 8 if jnp.dtype(dtype) == jnp.bfloat16 else 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenInput:
    """A step's tokens: T of them with padding, of at most S sequences.

    Attributes:
        token_ids: ``[T]`` int32.
        feedback: ``[T]`` int32; the lane whose last sampled token stands in for ``token_ids``, or -1.
        positions: ``[T]`` int32, counted from the sequence's first token.
        slots: ``[G, T]`` int32 place in each cache group's blocks, ``block * block_size + offset``; past the last slot
            for padding, and for a token whose keys and values are there already.
        batch: which tokens and blocks belong to which sequence.
        copies: ``[C, 2]`` int32 blocks to copy, from and to, one after the other before anything is written.
        num_copies: int32 scalar, how many of them count.
        sampled: ``[L]`` int32, the tokens after which one is sampled; 0 for padding.
        prompt_rows: ``[T]`` int32 tokens whose successor's log-probability is wanted.
        prompt_targets: ``[T]`` int32, that successor.
        num_prompt_rows: int32 scalar.
    """

    token_ids: jax.Array
    feedback: jax.Array
    positions: jax.Array
    slots: jax.Array
    batch: AttentionBatch
    copies: jax.Array
    num_copies: jax.Array
    sampled: jax.Array
    prompt_rows: jax.Array
    prompt_targets: jax.Array
    num_prompt_rows: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowInput:
    """The R rows of logits that a step samples from, in the order of ``TokenInput.sampled``; R may be 0.

    Attributes:
        lanes: ``[R]`` int32 lane that takes the sampled token; L for padding.
        block_tables: ``[R, max_blocks]`` int32, the first table of each row's sequence: its history is read there.
        sampling: what each row asks for.
    """

    lanes: jax.Array
    block_tables: jax.Array
    sampling: SamplingInput


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepInput:
    """Everything that a step needs beside the model and the cache.

    A lane is a running sequence's place, one of L, in ``last_tokens [L]`` int32, through which a step takes the
    tokens that the step before it sampled, without a round trip to the host.
    """

    tokens: TokenInput
    rows: RowInput
    last_tokens: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens, in the order of ``TokenInput.prompt_rows``.

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
        samples: the sampled token of each of the R rows, and its log-probabilities where asked for; None for R = 0.
        prompt: log-probabilities of prompt tokens, where asked for.
        last_tokens: ``[L]`` int32, each lane's last sampled token, for the next step.
    """

    samples: SampleOutput | None
    prompt: PromptLogprobs
    last_tokens: jax.Array


def step(graphdef: Any, params: Any, kv_cache: KVCache, step_input: StepInput) -> tuple[KVCache, StepOutput]:
    """Compute a step's tokens and sample the next ones.

    Pure: jit, vmap over ``params`` and scan work as for any function. It is ``forward`` and then ``sample_rows``;
    the engine compiles the two apart, since the shapes of one do not matter to the other (ADR 6).

    Args:
        graphdef, params: of ``load_model``.
        kv_cache: donate it.
        step_input: see its attributes for shapes.
    """
    step_input = jax.tree.map(jnp.asarray, step_input)  # a packer's are NumPy's, which no traced index can look into
    kv_cache, hidden, prompt = forward(graphdef, params, kv_cache, step_input.tokens, step_input.last_tokens)
    if not step_input.rows.lanes.size:
        return kv_cache, StepOutput(None, prompt, step_input.last_tokens)
    samples, last_tokens = sample_rows(
        graphdef, params, kv_cache.token_ids, hidden, step_input.rows, step_input.last_tokens
    )
    return kv_cache, StepOutput(samples, prompt, last_tokens)


def forward(
    graphdef: Any, params: Any, kv_cache: KVCache, tokens: TokenInput, last_tokens: jax.Array
) -> tuple[KVCache, jax.Array, PromptLogprobs]:
    """The model over a step's tokens.

    Returns:
        The cache with the tokens in it, the hidden states ``[L, H]`` of the tokens after which one is sampled, and
        the prompt's log-probabilities.
    """
    model: Decoder = nnx.merge(graphdef, params)
    fed_back = last_tokens[jnp.maximum(tokens.feedback, 0)]
    token_ids = jnp.where(tokens.feedback >= 0, fed_back, tokens.token_ids)
    kv_cache = copy_blocks(kv_cache, tokens.copies, tokens.num_copies)
    hidden, kv_cache = model(token_ids, tokens.positions, tokens.slots, kv_cache, tokens.batch)
    prompt = _prompt_logprobs(
        graphdef, params, hidden, tokens.prompt_rows, tokens.prompt_targets, tokens.num_prompt_rows
    )
    return kv_cache, hidden[tokens.sampled], prompt


def sample_rows(
    graphdef: Any, params: Any, token_ids: jax.Array, hidden: jax.Array, rows: RowInput, last_tokens: jax.Array
) -> tuple[SampleOutput, jax.Array]:
    """Logits and a sampled token for each of the R rows.

    Args:
        graphdef, params: of the model.
        token_ids: ``[num_blocks, block_size]``, the cache's.
        hidden: ``[L, H]``, of ``forward``.
        rows: what the rows ask for.
        last_tokens: ``[L]``.

    Returns:
        The samples, and ``last_tokens`` with them in their lanes.
    """
    model: Decoder = nnx.merge(graphdef, params)
    count = rows.lanes.shape[0]
    few = min_rows(model.embedding[...].dtype)
    padded = jnp.pad(hidden[:count], ((0, max(0, few - count)), (0, 0)))
    samples = sample(
        model.logits(padded)[:count], rows.sampling, lambda row: token_ids[rows.block_tables[row]].reshape(-1)
    )
    return samples, last_tokens.at[rows.lanes].set(samples.tokens, mode="drop")


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _prompt_logprobs(
    graphdef: Any, params: Any, hidden: jax.Array, rows: jax.Array, targets: jax.Array, count: jax.Array
) -> PromptLogprobs:
    """In chunks of rows, as many as are asked for."""
    model: Decoder = nnx.merge(graphdef, params)
    num_tokens, chunk = hidden.shape[0], _prompt_chunk(model)
    rows, targets = (jnp.pad(x, (0, -num_tokens % chunk)) for x in (rows, targets))
    out = PromptLogprobs(
        logprobs=jnp.zeros(rows.shape, jnp.float32),
        ranks=jnp.zeros(rows.shape, jnp.int32),
        top_ids=jnp.zeros((*rows.shape, TOP_LOGPROBS), jnp.int32),
        top_logprobs=jnp.zeros((*rows.shape, TOP_LOGPROBS), jnp.float32),
    )

    def body(i: jax.Array, out: PromptLogprobs) -> PromptLogprobs:
        at = i * chunk
        logits = model.logits(hidden[lax.dynamic_slice_in_dim(rows, at, chunk)])
        found = PromptLogprobs(*token_logprobs(logits, lax.dynamic_slice_in_dim(targets, at, chunk)))
        return jax.tree.map(lambda whole, part: lax.dynamic_update_slice_in_dim(whole, part, at, 0), out, found)

    out = lax.fori_loop(0, -(-count // chunk), body, out)
    return jax.tree.map(lambda a: a[:num_tokens], out)


@_prompt_logprobs.defjvp
def _prompt_logprobs_jvp(
    graphdef: Any, primals: tuple[Any, ...], tangents: tuple[Any, ...]
) -> tuple[PromptLogprobs, PromptLogprobs]:
    """The derivative, by a loop that runs as often as a shape says: only such a one can be differentiated backwards."""
    params, hidden, rows, targets, count = primals
    out = _prompt_logprobs(graphdef, *primals)
    wanted = jnp.concatenate([targets[:, None], out.top_ids], axis=1)

    def again(params: Any, hidden: jax.Array) -> jax.Array:
        model: Decoder = nnx.merge(graphdef, params)

        def logprobs(row: jax.Array, ids: jax.Array) -> jax.Array:
            logits = model.logits(hidden[row])
            return jnp.take_along_axis(jax.nn.log_softmax(logits), ids, axis=1)

        chunk = _prompt_chunk(model)
        num_chunks = -(-rows.shape[0] // chunk)
        padding = num_chunks * chunk - rows.shape[0]
        chunks = jnp.pad(rows, (0, padding)).reshape(num_chunks, chunk)
        ids = jnp.pad(wanted, ((0, padding), (0, 0))).reshape(num_chunks, chunk, -1)
        found = lax.map(jax.checkpoint(lambda both: logprobs(*both)), (chunks, ids)).reshape(-1, ids.shape[-1])
        is_wanted = jnp.arange(rows.shape[0]) < count
        return jnp.where(is_wanted[:, None], found[: rows.shape[0]], 0.0)

    _, moved = jax.jvp(again, (params, hidden), tangents[:2])
    none: list[Any] = [np.zeros(x.shape, jax.dtypes.float0) for x in (out.ranks, out.top_ids)]
    return out, PromptLogprobs(moved[:, 0], none[0], none[1], moved[:, 1:])


def _prompt_chunk(model: Decoder) -> int:
    return max(PROMPT_ROWS, min_rows(model.embedding[...].dtype))
