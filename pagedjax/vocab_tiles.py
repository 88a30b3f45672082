"""Searches over a vocabulary in two levels: which tile of 128 tokens, then which token inside it.

XLA's argmax, top-k and running sums are slow over a row of V values and fast over V / 128 of them. All
functions take G rows at once, and pad the last tile where V is no multiple of 128.
"""

import jax
import jax.numpy as jnp
from jax import lax

TILE = 128
"""Tokens in a tile."""


def tiled(z: jax.Array, padding: float) -> jax.Array:
    """z [G, V] as [G, ceil(V / 128), 128], filled up with `padding`."""
    missing = -z.shape[1] % TILE
    if missing:
        z = jnp.pad(z, ((0, 0), (0, missing)), constant_values=padding)
    return z.reshape(z.shape[0], -1, TILE)


def tile_at(tiles: jax.Array, index: jax.Array) -> jax.Array:
    """Tile number index [G] of each row of tiles [G, N, 128]: [G, 128]."""
    return jnp.take_along_axis(tiles, index[:, None, None], axis=1)[:, 0]


def argmax(z: jax.Array) -> jax.Array:
    """The best token [G] int32 of z [G, V], the lowest id among equals; of a row with NaN, some valid id."""
    tiles = tiled(z, -jnp.inf)
    tile = jnp.argmax(tiles.max(axis=2), axis=1)
    inside = jnp.argmax(tile_at(tiles, tile), axis=1)
    return jnp.minimum(tile * TILE + inside, z.shape[1] - 1).astype(jnp.int32)


def best_tiles(z: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The `count` tiles of z [G, V] with the best maxima (all, where there are no more), in order of id.

    Returns the values in them [G, C * 128], their numbers [G, C] int32, and the best value outside [G], which
    is -inf where nothing is. Every value above that is inside; so is each of the `count` best tokens, lower
    ids first among equals: were one of them in another tile, each of the `count` tiles would hold a better
    one.
    """
    tiles = tiled(z, -jnp.inf)
    best = _without_sign_of_zero(tiles.max(axis=2))
    outside = jnp.full(z.shape[:1], -jnp.inf, z.dtype)
    if count < tiles.shape[1]:
        values, order = lax.top_k(best, count + 1)
        outside, numbers = values[:, count], order[:, :count]
    else:
        numbers = jnp.broadcast_to(jnp.arange(tiles.shape[1], dtype=jnp.int32), best.shape)
    numbers = jnp.sort(numbers, axis=1)
    inside = jnp.take_along_axis(tiles, numbers[:, :, None], axis=1)
    return inside.reshape(z.shape[0], -1), numbers, outside


def top_tokens(z: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Ids and values [G, count] of the best tokens of z [G, V], best first, lower id first among equals.

    Where V < count, the ids past the vocabulary are -1 and their values -inf. count is at most 128.
    """
    inside, numbers, _ = best_tiles(z, count)
    values, place = lax.top_k(_without_sign_of_zero(inside), count)
    ids = jnp.take_along_axis(numbers, place // TILE, axis=1) * TILE + place % TILE
    return jnp.where(ids < z.shape[1], ids, -1), values


def _without_sign_of_zero(z: jax.Array) -> jax.Array:
    """-0.0 as 0.0: top_k would rank them, where equal values must tie."""
    return jnp.where(z == 0, 0.0, z)


def first_past(weights: jax.Array, target: jax.Array) -> jax.Array:
    """First index [G] int32 at which the running sum of weights [G, N] >= 0 passes target [G].

    Only an index of positive weight is ever given: where rounding leaves the whole sum short of the target,
    it is the last such index, and -1 where there is none.
    """
    count = weights.shape[1]
    index = jnp.arange(count, dtype=jnp.int32)
    positive = weights > 0
    past = positive & (jnp.cumsum(weights, axis=1) > target[:, None])
    first = jnp.where(past, index, count).min(axis=1)
    last = jnp.where(positive, index, -1).max(axis=1)
    return jnp.where(first < count, first, last)
