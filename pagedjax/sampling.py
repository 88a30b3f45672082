"""From logits to tokens, on the device: the logit pipeline, the draw, and log-probabilities.

The order is vLLM's: logit_bias and masks, penalties, temperature, min_p, top_k, top_p; log-probabilities are
of the raw distribution. Three decisions shape the file:

* Every option is a row's own data and no option is a shape. `lax.cond` on "does a row here ask for it" keeps
  what nobody asked for from being paid.
* On a CPU, rows go through one after the other: one row fits the cache, pays for its own options only, and
  its sums run in the same order whatever the row count and the neighbours. An accelerator takes all rows at
  once.
* Nothing is sorted over the vocabulary: `cuts` and `vocab_tiles` say how.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.cuts import FINITE, keep, peak_of
from pagedjax.vocab_tiles import TILE, argmax, first_past, tile_at, tiled, top_tokens

TOP_LOGPROBS = 20
"""How many best tokens are reported beside the sampled one: the most that a request may ask for."""

GREEDY_BELOW = 1e-5
"""Temperatures below this mean greedy, as in vLLM."""

HistoryFn = Callable[[jax.Array], jax.Array]
"""Row index (int32 scalar) -> that row's token ids [H] int32, H static; garbage from history_len on."""

Logprobs = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""Logprob, rank, ids of the best tokens, their logprobs: the last four fields of SampleOutput."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingInput:
    """What each of R rows asks for. The values in brackets ask for nothing."""

    temperature: jax.Array  # [R] f32 (0: greedy)
    top_k: jax.Array  # [R] int32 (0)
    top_p: jax.Array  # [R] f32 (1)
    min_p: jax.Array  # [R] f32 (0)
    presence_penalty: jax.Array  # [R] f32 (0)
    frequency_penalty: jax.Array  # [R] f32 (0)
    repetition_penalty: jax.Array  # [R] f32 (1)
    prompt_len: jax.Array  # [R] int32: history before this index is prompt, from it on output
    history_len: jax.Array  # [R] int32: tokens known, the one whose logits these are included
    key: jax.Array  # [R, 2] uint32: the request's own key
    position: jax.Array  # [R] int32: position of the token being drawn; folded into the key
    bias_ids: jax.Array  # [R, B] int32 (-1, or >= V: unused)
    bias_values: jax.Array  # [R, B] f32
    allowed: jax.Array  # [R, ceil(V / 32)] uint32: bit i % 32 of word i // 32 set where token i may come
    use_mask: jax.Array  # [R] bool (False): whether `allowed` counts
    num_logprobs: jax.Array  # [R] int32 (-1): 0..20, how many best tokens beside the sampled one's own


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SampleOutput:
    """One token per row. Rows that asked for no logprobs hold 0, rank 0, ids -1 and -inf."""

    tokens: jax.Array  # [R] int32
    logprobs: jax.Array  # [R] f32, natural logarithm, raw distribution, of the token in `tokens`
    rank: jax.Array  # [R] int32: how many tokens are at least as likely; 1 is the best
    top_ids: jax.Array  # [R, 20] int32, best first, lower id first among equals; -1 past the vocabulary
    top_logprobs: jax.Array  # [R, 20] f32


def sample(logits: jax.Array, s: SamplingInput, history_fn: HistoryFn) -> SampleOutput:
    """Draw one token per row.

    Args:
        logits: [R, V] f32, as the model gave them.
        s: what each row asks for, R rows.
        history_fn: a row's tokens; called only for rows with a penalty.
    """

    def choose(logits: jax.Array, s: SamplingInput, rows: jax.Array) -> jax.Array:
        asks = _asks(s, logits.shape[1]).any()
        return lax.cond(asks, lambda: _choose(logits, s, rows, history_fn), lambda: argmax(logits))

    tokens = lax.cond(
        _asks(s, logits.shape[1]).any(),
        lambda: _by_group(choose, logits, s, _row_numbers(logits)),
        lambda: argmax(logits),
    )
    logprobs = lax.cond(
        (s.num_logprobs >= 0).any(),
        lambda: _by_group(_logprobs, logits, tokens, s.num_logprobs),
        lambda: _no_logprobs(logits.shape[0]),
    )
    return SampleOutput(tokens, *logprobs)


def process_logits(logits: jax.Array, s: SamplingInput, history: HistoryFn | jax.Array) -> jax.Array:
    """The logits whose softmax is the distribution that `sample` draws from: [R, V] f32, -inf where cut.

    A greedy row keeps its best token alone. `history` may be given whole, as [R, H] int32.
    """
    history_fn = history if callable(history) else lambda row: history[row]

    def group(logits: jax.Array, s: SamplingInput, rows: jax.Array) -> jax.Array:
        z = _adjust(logits, s, rows, history_fn)
        best = jnp.arange(z.shape[1]) == argmax(z)[:, None]
        scaled = _scale(z, s)
        return jnp.where(jnp.where(_random(s)[:, None], _kept(scaled, s), best), scaled, -jnp.inf)

    return _by_group(group, logits, s, _row_numbers(logits))


def token_logprobs(logits: jax.Array, targets: jax.Array) -> Logprobs:
    """Log-probabilities of given tokens (prompt logprobs), all four kinds for every row.

    Args:
        logits: [N, V] f32.
        targets: [N] int32.
    Returns:
        logprob [N] f32, rank [N] int32, top_ids [N, 20] int32, top_logprobs [N, 20] f32, as in SampleOutput.
    """
    return _by_group(_logprobs, logits, targets, jnp.full(targets.shape, TOP_LOGPROBS, jnp.int32))


# ---- who asks for what -----------------------------------------------------------------------------------


def _asks(s: SamplingInput, vocab: int) -> jax.Array:
    """Rows [R] that ask for more than the best raw logit."""
    return _random(s) | _biased(s, vocab) | s.use_mask | _penalised(s)


def _random(s: SamplingInput) -> jax.Array:
    return s.temperature >= GREEDY_BELOW


def _biased(s: SamplingInput, vocab: int) -> jax.Array:
    return ((s.bias_ids >= 0) & (s.bias_ids < vocab)).any(axis=1)


def _penalised(s: SamplingInput) -> jax.Array:
    return (s.repetition_penalty != 1) | (s.frequency_penalty != 0) | (s.presence_penalty != 0)


# ---- the pipeline, for one group -------------------------------------------------------------------------


def _choose(logits: jax.Array, s: SamplingInput, rows: jax.Array, history_fn: HistoryFn) -> jax.Array:
    """Tokens [G] of a group in which some row asks for more than the best raw logit."""
    z = _adjust(logits, s, rows, history_fn)
    best = argmax(z)

    def drawn() -> jax.Array:
        scaled = _scale(z, s)
        weights = jnp.where(_kept(scaled, s), jnp.exp(scaled - peak_of(scaled)[:, None]), 0.0)
        token = _draw(weights, _uniforms(s.key, s.position))
        return jnp.where(_random(s) & (token >= 0), token, best)

    return lax.cond(_random(s).any(), drawn, lambda: best)


def _adjust(logits: jax.Array, s: SamplingInput, rows: jax.Array, history_fn: HistoryFn) -> jax.Array:
    """Bias, mask, penalties: what also changes a greedy choice."""
    vocab = logits.shape[1]

    def bias(z: jax.Array) -> jax.Array:
        ids = jnp.where(s.bias_ids < 0, vocab, s.bias_ids)  # a negative index would count from the end
        return jax.vmap(lambda z, i, v: z.at[i].add(v, mode="drop"))(z, ids, s.bias_values)

    def mask(z: jax.Array) -> jax.Array:
        bits = (s.allowed[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
        may_come = bits.reshape(bits.shape[0], -1)[:, :vocab] == 1
        return jnp.where(may_come | ~s.use_mask[:, None], z, -jnp.inf)

    def penalise(z: jax.Array) -> jax.Array:
        def row(args: tuple[jax.Array, SamplingInput, jax.Array]) -> jax.Array:
            z, s, index = args
            return lax.cond(_penalised(s), lambda: _penalise_row(z, s, history_fn(index)), lambda: z)

        return lax.map(row, (z, s, rows))

    z = lax.cond(_biased(s, vocab).any(), bias, lambda z: z, logits)
    z = lax.cond(s.use_mask.any(), mask, lambda z: z, z)
    return lax.cond(_penalised(s).any(), penalise, lambda z: z, z)


def _penalise_row(z: jax.Array, s: SamplingInput, history: jax.Array) -> jax.Array:
    """On one row, z [V]: repetition (prompt and output), then frequency and presence (output only)."""
    vocab = z.shape[0]
    index = jnp.arange(history.shape[0])
    known = jnp.where((index < s.history_len) & (history >= 0), history, vocab)
    output = jnp.where(index >= s.prompt_len, known, vocab)
    seen = jnp.zeros(vocab, bool).at[known].set(True, mode="drop")
    count = jnp.zeros(vocab, jnp.int32).at[output].add(1, mode="drop").astype(z.dtype)
    repeated = jnp.where(z > 0, z / s.repetition_penalty, z * s.repetition_penalty)
    z = jnp.where(seen, repeated, z)
    return z - s.frequency_penalty * count - jnp.where(count > 0, s.presence_penalty, 0.0)


def _scale(z: jax.Array, s: SamplingInput) -> jax.Array:
    """z over temperature, NaN taken as -inf and +inf as a large number, so that a bad row stays a row."""
    z = jnp.where(jnp.isnan(z), -jnp.inf, z) / jnp.where(_random(s), s.temperature, 1.0)[:, None]
    return jnp.minimum(z, FINITE)


def _kept(z: jax.Array, s: SamplingInput) -> jax.Array:
    """Tokens [G, V] that min_p, top_k and top_p leave; greedy rows ask for no cut."""
    random = _random(s)
    return keep(
        z,
        jnp.where(random, s.top_k, 0),
        jnp.where(random, s.top_p, 1.0),
        jnp.where(random, s.min_p, 0.0),
    )


# ---- the draw --------------------------------------------------------------------------------------------


def _uniforms(key: jax.Array, position: jax.Array) -> jax.Array:
    """Two numbers in [0, 1) per row, [G, 2] f32, that depend on the row's key and position alone."""

    def row(key: jax.Array, position: jax.Array) -> jax.Array:
        folded = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position)
        return jax.random.bits(folded, (2,), jnp.uint32)

    return (jax.vmap(row)(key, position) >> 8).astype(jnp.float32) * 2.0**-24


def _draw(weights: jax.Array, u: jax.Array) -> jax.Array:
    """A token [G] in proportion to weights [G, V] >= 0, by inverse distribution function; -1 where all are 0.

    One uniform number (u [G, 2]) picks a tile of tokens, the other a token inside it: float32 has too few
    digits for one number to give every one of 262,144 tokens its due.
    """
    tiles = tiled(weights, 0.0)
    sums = tiles.sum(axis=2)
    tile = first_past(sums, u[:, 0] * sums.sum(axis=1))
    chosen = tile_at(tiles, jnp.maximum(tile, 0))
    inside = first_past(chosen, u[:, 1] * chosen.sum(axis=1))
    return jnp.where(tile >= 0, tile * TILE + inside, -1)


# ---- log-probabilities -----------------------------------------------------------------------------------


def _logprobs(logits: jax.Array, tokens: jax.Array, wanted: jax.Array) -> Logprobs:
    """For the rows of a group whose `wanted` [G] is 0 or more; the best tokens where it is above 0."""
    nothing = _no_logprobs(tokens.shape[0])

    def compute() -> Logprobs:
        peak = peak_of(logits)[:, None]
        norm = jnp.log(jnp.exp(logits - peak).sum(axis=1, keepdims=True))
        chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
        rank = (logits >= chosen).sum(axis=1, dtype=jnp.int32)

        def top() -> tuple[jax.Array, jax.Array]:
            ids, values = top_tokens(logits, TOP_LOGPROBS)
            return ids, values - peak - norm

        ids, values = lax.cond((wanted > 0).any(), top, lambda: nothing[2:])
        return (chosen - peak - norm)[:, 0], rank, ids, values

    found = lax.cond((wanted >= 0).any(), compute, lambda: nothing)
    asked = (wanted >= 0, wanted >= 0, (wanted > 0)[:, None], (wanted > 0)[:, None])
    logprob, rank, ids, values = map(jnp.where, asked, found, nothing)
    return logprob, rank, ids, values


def _no_logprobs(rows: int) -> Logprobs:
    return (
        jnp.zeros(rows, jnp.float32),
        jnp.zeros(rows, jnp.int32),
        jnp.full((rows, TOP_LOGPROBS), -1, jnp.int32),
        jnp.full((rows, TOP_LOGPROBS), -jnp.inf, jnp.float32),
    )


# ---- groups of rows --------------------------------------------------------------------------------------


def _by_group[T](function: Callable[..., T], *arrays: object) -> T:
    """Apply a function of [G, ...] arrays to [R, ...] arrays: on a CPU G = 1, row by row, else G = R.

    Decided when it is traced: `lax.platform_dependent` would trace both, a third of a warm start's work.
    """
    if jax.default_backend() != "cpu":
        return function(*arrays)

    def one(row: object) -> T:
        result: T = jax.tree.map(lambda a: a[0], function(*jax.tree.map(lambda a: a[None], row)))
        return result

    result: T = lax.map(one, arrays)
    return result


def _row_numbers(logits: jax.Array) -> jax.Array:
    return jnp.arange(logits.shape[0], dtype=jnp.int32)
