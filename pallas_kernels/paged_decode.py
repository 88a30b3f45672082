"""Attention of one query per sequence over the paged cache, with long contexts split among several programs."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.kv_tiles import MASKED, KVTiles, Softmax, attend_tile, empty_softmax, power_of_two
from pallas_kernels.tuning import DecodeTiles

_MIN_ROWS = 16  # of a tensor core's tile


def paged_decode(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_tables: jax.Array,
    kv_lens: jax.Array,
    *,
    scale: float,
    window: jax.Array | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    k_scales: jax.Array | None = None,
    v_scales: jax.Array | None = None,
    out: jax.Array | None = None,
    tiles: DecodeTiles,
    interpret: bool = False,
) -> jax.Array:
    """Attention of each sequence's last token over its cached context; `reference.paged_decode` in Pallas.

    Each key and value is read once, for all heads that share it. Where sequences and KV heads are too few to fill the
    chip, ``tiles.segments`` programs share a context, and `reduce_segments` puts their results together.

    Args:
        q: ``[N, heads, head_dim]`` float32, bfloat16 or float16; row ``s`` is at position ``kv_lens[s] - 1``. N is the
            number of sequences, or more: further rows are not looked at.
        k_cache, v_cache: ``[num_blocks, kv_heads, block_size, head_dim]``, q's dtype, int8 or float8_e4m3fn, this
            step's tokens already written; fewer than 2^31 elements.
        block_tables: ``[S, max_blocks]`` int32.
        kv_lens: ``[S]`` int32 tokens of context; 0 for a row that is none.
        scale: factor of the scores, above zero.
        window: int32 scalar; a query sees this many tokens, itself included. None for all.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        sinks: ``[heads]`` float32 logits that take a share of the softmax and give nothing.
        k_scales, v_scales: ``[num_blocks, kv_heads, block_size]`` float32, of a quantised cache.
        out: as q; takes the rows of sequences that are not empty, and its other rows stay. Donated.
        tiles: sizes, see `tuning`.
        interpret: run on any device, slowly.

    Returns:
        As q; rows of no sequence are those of ``out``, or 0.
    """
    heads, head_dim = q.shape[1:]
    sequences, kv_heads = kv_lens.shape[0], k_cache.shape[1]
    out = jnp.zeros_like(q) if out is None else out
    inputs = {
        "q": q, "k": k_cache, "v": v_cache, "block_tables": block_tables, "kv_lens": kv_lens,
        "window": None if window is None else window.reshape(1), "sinks": sinks,
        "k_scales": k_scales, "v_scales": v_scales,
    }  # fmt: skip
    parameters = plgpu.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages)
    call = partial(
        pl.pallas_call,
        partial(_kernel, tiles=tiles, scale=scale, softcap=softcap),
        grid=(sequences, kv_heads, tiles.segments),
        compiler_params=parameters,
        interpret=interpret,
        name="paged_decode",
    )
    if tiles.segments == 1:
        aliases = {len(jax.tree.leaves(inputs)): 0}
        return call(out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype), input_output_aliases=aliases)(inputs, out)
    shape = (sequences, heads, tiles.segments)
    partials = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (shape, shape, (*shape, head_dim))]
    return reduce_segments(Softmax(*call(out_shape=partials)(inputs)), kv_lens, out, interpret=interpret)


def _kernel(ref: dict[str, Any], *out: Any, tiles: DecodeTiles, scale: float, softcap: float | None) -> None:
    """One segment of one sequence's context, with all the heads that share one KV head."""
    sequence, kv_head, segment = (pl.program_id(axis) for axis in range(3))
    kv_len = ref["kv_lens"][sequence]

    @pl.when(kv_len > 0)
    def _() -> None:
        _segment(ref, out, sequence, kv_head, segment, kv_len, tiles=tiles, scale=scale, softcap=softcap)


def _segment(
    ref: dict[str, Any],
    out: tuple[Any, ...],
    sequence: jax.Array,
    kv_head: jax.Array,
    segment: jax.Array,
    kv_len: jax.Array,
    *,
    tiles: DecodeTiles,
    scale: float,
    softcap: float | None,
) -> None:
    heads, head_dim = ref["q"].shape[1:]
    group, width = heads // ref["k"].shape[1], power_of_two(head_dim)
    num_rows = max(_MIN_ROWS, power_of_two(group))
    row = lax.iota(jnp.int32, num_rows)
    channel = lax.iota(jnp.int32, width)[None, :]
    # In interpret mode a masked store needs an index outside, or it would put the old value over a new one.
    head = jnp.where(row < group, kv_head * group + row, heads)
    mask = (row < group)[:, None] & (channel < head_dim)
    q = plgpu.load(ref["q"].at[sequence, head[:, None], channel], mask=mask, other=jnp.zeros((), ref["q"].dtype))

    kv = KVTiles(
        ref["k"], ref["v"], ref["k_scales"], ref["v_scales"], ref["block_tables"], sequence, kv_head, tiles.tokens
    )
    oldest = jnp.zeros((), jnp.int32)
    if ref["window"] is not None:
        oldest = jnp.maximum(kv_len - ref["window"][0], 0)
    begin, end = segment_tiles(oldest, kv_len, segment, tiles)

    def step(number: jax.Array, carry: tuple[Softmax, jax.Array]) -> tuple[Softmax, jax.Array]:
        softmax, blocks = carry
        at = kv.tokens(number)
        seen = at < kv_len
        if ref["window"] is not None:
            seen &= at >= oldest
        following = kv.blocks(number + 1)
        softmax = attend_tile(
            softmax, q, kv, blocks, number, mask=seen[None, :], loaded=seen, scale=scale, softcap=softcap
        )
        return softmax, following

    sinks = None
    if ref["sinks"] is not None:
        sinks = plgpu.load(ref["sinks"].at[head], mask=row < group, other=0.0)
    empty = empty_softmax(num_rows, width, sinks)
    if ref["sinks"] is not None:  # one segment's to count
        is_first = segment == 0
        empty = Softmax(jnp.where(is_first, empty.m, MASKED), jnp.where(is_first, empty.l, 0.0), empty.acc)
    softmax, _ = lax.fori_loop(begin, end, step, (empty, kv.blocks(begin)))
    if tiles.segments == 1:
        _, out_ref = out  # the first is the one that it is an alias of
        result = softmax.acc / jnp.where(softmax.l > 0, softmax.l, 1.0)[:, None]
        plgpu.store(out_ref.at[sequence, head[:, None], channel], result.astype(out_ref.dtype), mask=mask)
        return
    m_ref, l_ref, acc_ref = out
    plgpu.store(m_ref.at[sequence, head, segment], softmax.m, mask=row < group)
    plgpu.store(l_ref.at[sequence, head, segment], softmax.l, mask=row < group)
    # Of a segment past a short context, or before a window, no more than its sum of 0 is written, and read again.
    mask &= (begin < end) | (segment == 0)
    plgpu.store(acc_ref.at[sequence, head[:, None], segment, channel], softmax.acc, mask=mask)


def segment_tiles(
    oldest: jax.Array, kv_len: jax.Array, segment: jax.Array, tiles: DecodeTiles
) -> tuple[jax.Array, jax.Array]:
    """A segment's share of the tiles that hold tokens ``oldest`` to ``kv_len``: the first one, and past the last."""
    low, high = lax.div(oldest, tiles.tokens), pl.cdiv(kv_len, tiles.tokens)
    share = pl.cdiv(high - low, tiles.segments)
    begin = low + segment * share
    return begin, jnp.minimum(begin + share, high)


def reduce_segments(partials: Softmax, kv_lens: jax.Array, out: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Put together what the segments of each context gave; `reference.reduce_segments` in Pallas.

    Args:
        partials: ``m`` and ``l`` ``[S, heads, segments]``, ``acc`` ``[S, heads, segments, head_dim]``, float32.
        kv_lens: ``[S]`` int32; where it is 0 nothing is written.
        out: ``[N, heads, head_dim]``, N at least S. Donated.
        interpret: run on any device, slowly.

    Returns:
        ``out`` with the rows of the sequences in it.
    """
    call = pl.pallas_call(
        _reduce,
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        grid=partials.m.shape[:2],
        input_output_aliases={4: 0},
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="reduce_segments",
    )
    return call(partials, kv_lens, out)


def _reduce(partials: Any, kv_lens: Any, before: Any, out_ref: Any) -> None:
    del before  # the same memory as out_ref
    sequence, head = pl.program_id(0), pl.program_id(1)

    @pl.when(kv_lens[sequence] > 0)
    def _() -> None:
        segments, head_dim = partials.acc.shape[2:]
        at = lax.iota(jnp.int32, power_of_two(segments))
        m = plgpu.load(partials.m.at[sequence, head, at], mask=at < segments, other=MASKED)
        l = plgpu.load(partials.l.at[sequence, head, at], mask=at < segments, other=0.0)
        greatest = jnp.max(m)
        total = jnp.sum(jnp.exp2(m - greatest) * l)
        channel = lax.iota(jnp.int32, power_of_two(head_dim))

        def add(segment: jax.Array, acc: jax.Array) -> jax.Array:
            weight = jnp.exp2(partials.m[sequence, head, segment] - greatest)
            ref = partials.acc.at[sequence, head, segment, channel]
            is_there = (channel < head_dim) & (partials.l[sequence, head, segment] > 0)
            return acc + weight * plgpu.load(ref, mask=is_there, other=0.0)

        acc = lax.fori_loop(0, segments, add, jnp.zeros(channel.shape, jnp.float32))
        result = (acc / jnp.where(total > 0, total, 1.0)).astype(out_ref.dtype)
        plgpu.store(out_ref.at[sequence, head, channel], result, mask=channel < head_dim)
