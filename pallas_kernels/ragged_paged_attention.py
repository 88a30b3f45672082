"""Attention of a packed ragged batch over the paged cache: prompts, chunks of prompts, and single tokens alike."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.kv_tiles import KVTiles, Softmax, attend_tile, empty_softmax, power_of_two
from pallas_kernels.tuning import PrefillTiles


def ragged_paged_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_tables: jax.Array,
    cu_q_lens: jax.Array,
    kv_lens: jax.Array,
    num_decodes: jax.Array,
    *,
    scale: float,
    window: jax.Array | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
    tiles: PrefillTiles,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention of each query over its sequence's cached context; `reference.ragged_paged_attention` in Pallas.

    Args:
        q: ``[T, heads, head_dim]`` float32, bfloat16 or float16. Sequence ``s`` has rows ``cu_q_lens[s]`` to
            ``cu_q_lens[s + 1]``, the last of them at position ``kv_lens[s] - 1``.
        k_cache, v_cache: ``[num_blocks, kv_heads, block_size, head_dim]``, q's dtype, int8 or float8_e4m3fn, this
            step's tokens already written; fewer than 2^31 elements.
        block_tables: ``[S, max_blocks]`` int32.
        cu_q_lens: ``[S + 1]`` int32.
        kv_lens: ``[S]`` int32 tokens of context, this step's included; 0 for padding.
        num_decodes: int32 scalar; the sequences before it are left to `paged_decode`, and their rows unspecified.
        scale: factor of the scores, above zero.
        window: int32 scalar; a query sees this many tokens, itself included. None for all.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        sinks: ``[heads]`` float32 logits that take a share of the softmax and give nothing.
        k_scales, v_scales: ``[num_blocks, kv_heads, block_size]`` float32, of a quantised cache.
        tiles: sizes, see `tuning`.
        interpret: run on any device, slowly.

    Returns:
        ``[T, heads, head_dim]`` in q's dtype; rows past the last sequence are 0.
    """
    kv_heads = k_cache.shape[1]
    num_tiles = q.shape[0] // tiles.queries + kv_lens.shape[0] + 1
    inputs = {
        "q": q, "k": k_cache, "v": v_cache, "block_tables": block_tables, "cu_q_lens": cu_q_lens, "kv_lens": kv_lens,
        "num_decodes": num_decodes.reshape(1), "window": None if window is None else window.reshape(1),
        "sinks": sinks, "k_scales": k_scales, "v_scales": v_scales,
    }  # fmt: skip
    call = pl.pallas_call(
        partial(_kernel, tiles=tiles, scale=scale, softcap=softcap),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid=(num_tiles, kv_heads),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="ragged_paged_attention",
    )
    return call(inputs)


def _kernel(ref: dict[str, Any], out_ref: Any, *, tiles: PrefillTiles, scale: float, softcap: float | None) -> None:
    """One tile of queries, with all the heads that share one KV head."""
    num_tokens = ref["q"].shape[0]
    num_sequences = ref["kv_lens"].shape[0]
    # The last tiles of a long prompt have most to do, so they begin first.
    tile = pl.num_programs(0) - 1 - pl.program_id(0)
    kv_head = pl.program_id(1)
    # Sequence s owns the tiles from cu_q_lens[s] // queries + s on: never too few, and at most one too many. What
    # follows the last sequence is one more, which sees nothing.
    index = lax.iota(jnp.int32, power_of_two(num_sequences + 1))
    starts = plgpu.load(ref["cu_q_lens"].at[index], mask=index <= num_sequences, other=2**30)
    sequence = jnp.sum((lax.div(starts, tiles.queries) + index <= tile).astype(jnp.int32)) - 1
    begin = ref["cu_q_lens"][sequence]
    is_padding = sequence == num_sequences
    following = ref["cu_q_lens"][jnp.minimum(sequence + 1, num_sequences)]
    end = jnp.where(is_padding, num_tokens, following)
    kv_len = ref["kv_lens"][jnp.minimum(sequence, num_sequences - 1)]
    kv_len = jnp.where(is_padding, 0, kv_len)
    first = begin + (tile - lax.div(begin, tiles.queries) - sequence) * tiles.queries

    @pl.when((first < end) & (sequence >= ref["num_decodes"][0]))
    def _() -> None:
        _query_tile(
            ref, out_ref, jnp.minimum(sequence, num_sequences - 1), kv_head, first, end, kv_len,
            tiles=tiles, scale=scale, softcap=softcap,
        )  # fmt: skip


def _query_tile(
    ref: dict[str, Any],
    out_ref: Any,
    sequence: jax.Array,
    kv_head: jax.Array,
    first: jax.Array,
    end: jax.Array,
    kv_len: jax.Array,
    *,
    tiles: PrefillTiles,
    scale: float,
    softcap: float | None,
) -> None:
    _, heads, head_dim = ref["q"].shape
    group, width = heads // ref["k"].shape[1], power_of_two(head_dim)
    padded_group = power_of_two(group)
    num_rows = tiles.queries * padded_group
    row = lax.iota(jnp.int32, num_rows)
    token, member = first + lax.div(row, padded_group), lax.rem(row, padded_group)
    channel = lax.iota(jnp.int32, width)[None, :]
    is_row = (token < end) & (member < group)
    at = (
        jnp.where(is_row, token, ref["q"].shape[0])[:, None],  # in interpret mode a masked store needs an index outside
        (kv_head * group + member)[:, None],
        channel,
    )
    mask = is_row[:, None] & (channel < head_dim)
    q = plgpu.load(ref["q"].at[at], mask=mask, other=jnp.zeros((), ref["q"].dtype))
    position = kv_len - end + token
    first_position = kv_len - end + first
    past = jnp.minimum(first_position + tiles.queries, kv_len)  # the last query's position, and one

    kv = KVTiles(
        ref["k"], ref["v"], ref["k_scales"], ref["v_scales"], ref["block_tables"], sequence, kv_head, tiles.tokens
    )
    window = None if ref["window"] is None else ref["window"][0]
    # Tiles from `low` to `whole` lack their older tokens for some query, those from `causal` to `high` their newer.
    high = pl.cdiv(past, tiles.tokens)
    causal = lax.div(first_position + 1, tiles.tokens)
    if window is None:
        low = whole = jnp.zeros((), jnp.int32)
    else:
        low = lax.div(jnp.maximum(first_position - window + 1, 0), tiles.tokens)
        whole = jnp.clip(pl.cdiv(past - window, tiles.tokens), low, high)
    causal = jnp.clip(causal, whole, high)

    def step(number: jax.Array, carry: tuple[Softmax, jax.Array], *, masked: bool) -> tuple[Softmax, jax.Array]:
        softmax, blocks = carry
        seen = loaded = None
        if masked:
            at = kv.tokens(number)
            loaded = at < kv_len
            seen = at[None, :] <= position[:, None]
            if window is not None:
                seen &= at[None, :] > position[:, None] - window
        following = kv.blocks(number + 1)
        softmax = attend_tile(softmax, q, kv, blocks, number, mask=seen, loaded=loaded, scale=scale, softcap=softcap)
        return softmax, following

    sinks = None
    if ref["sinks"] is not None:
        sinks = plgpu.load(ref["sinks"].at[kv_head * group + member], mask=member < group, other=0.0)
    carry = (empty_softmax(num_rows, width, sinks), kv.blocks(low))
    if window is not None:
        carry = lax.fori_loop(low, whole, partial(step, masked=True), carry)
    carry = lax.fori_loop(whole, causal, partial(step, masked=False), carry)
    softmax, _ = lax.fori_loop(causal, high, partial(step, masked=True), carry)
    out = softmax.acc * (1.0 / jnp.where(softmax.l > 0, softmax.l, 1.0))[:, None]
    plgpu.store(out_ref.at[at], out.astype(out_ref.dtype), mask=mask)
