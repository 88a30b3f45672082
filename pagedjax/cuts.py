"""min_p, top_k and top_p without a sort: each is one threshold on a row's logits.

A threshold is found by narrowing an interval whose ends are always logits that occur, so that the cut is
exact. All functions take G rows z [G, V] of logits that are over temperature already, -inf for tokens that
are out.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pagedjax.vocab_tiles import TILE, best_tiles, first_past, tile_at, tiled

FINITE = 3.0e38
"""Stands in for infinite logits where arithmetic must not make NaN of them."""

_TINY = 2.0**-126  # smallest normal float32
_CANDIDATE_TILES = 64  # where a cut is looked for before it is looked for in the whole vocabulary


def peak_of(z: jax.Array) -> jax.Array:
    """Largest value of each row [G], finite even where all is -inf."""
    return jnp.maximum(z.max(axis=1), -FINITE)


def keep(z: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """Which tokens [G, V] bool stay after min_p, then top_k, then top_p.

    Args:
        z: [G, V] f32 without NaN.
        top_k: [G] int32, 0 is off. Tokens tied with the k-th best all stay.
        top_p: [G] f32, 1 is off. The smallest set whose mass reaches top_p stays, lower ids first among
            equals.
        min_p: [G] f32, 0 is off. Tokens less likely than min_p times the best go.
    """
    floor = jnp.where(min_p > 0, peak_of(z) + jnp.log(min_p), -jnp.inf)
    unlimited = jnp.full(floor.shape, z.shape[1], jnp.int32)
    floor, last = lax.cond(
        ((top_k > 0) | (top_p < 1)).any(),
        lambda: _cut(z, top_k, top_p, floor),
        lambda: (floor, unlimited),
    )
    ids = jnp.arange(z.shape[1], dtype=jnp.int32)
    return (z > floor[:, None]) | ((z == floor[:, None]) & (ids <= last[:, None]))


def _cut(z: jax.Array, top_k: jax.Array, top_p: jax.Array, floor: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where top_k and top_p cut the tokens of z [G, V] that are not below floor [G].

    Returns the lowest logit kept [G], and the highest id kept [G] of those that have exactly this logit.

    A cut above the best value outside the candidate tiles is settled by the candidates alone, as most are;
    for the others the whole vocabulary is searched.
    """
    peak = peak_of(z)
    total = _mass(z, jnp.exp(z - peak[:, None]), floor)
    candidates, _, outside = best_tiles(z, _CANDIDATE_TILES)
    near = _search(candidates, top_k, top_p, floor, peak, total)
    settled = ((top_k <= 0) & (top_p >= 1)) | (near[0] > outside)

    def everywhere() -> tuple[jax.Array, ...]:
        far = _search(z, top_k, top_p, floor, peak, total)
        return tuple(jnp.where(settled, a, b) for a, b in zip(near, far, strict=True))

    _, cut, mass = lax.cond(settled.all(), lambda: near, everywhere)
    unlimited = jnp.full(cut.shape, z.shape[1], jnp.int32)
    by_mass = top_p < 1
    last = lax.cond(by_mass.any(), lambda: _last_tie(z, cut, peak, mass), lambda: unlimited)
    return cut, jnp.where(by_mass, last, unlimited)


def _search(
    z: jax.Array, top_k: jax.Array, top_p: jax.Array, floor: jax.Array, peak: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """top_k, then top_p, among the values z [G, N] of some tokens or all.

    peak [G] and total [G] are the largest logit, and the weight at or above floor [G], in the whole
    vocabulary. Returns the lower of the two cuts [G], the final one [G], and the weight [G] that top_p keeps.
    """
    weights = jnp.exp(z - peak[:, None])

    def stage(
        state: tuple[jax.Array, jax.Array], by_mass: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
        cut, total = state
        asked = jnp.where(by_mass, top_p < 1, top_k > 0)
        wanted = jnp.where(asked, jnp.where(by_mass, top_p * total, top_k.astype(z.dtype)), 0.0)

        def narrow() -> tuple[jax.Array, jax.Array]:
            found = _threshold(z, jnp.where(by_mass, weights, 1.0), cut, peak, wanted)
            return found, jnp.where(asked, _mass(z, weights, found), total)

        cut, total = lax.cond(asked.any(), narrow, lambda: state)
        return (cut, total), (cut, wanted)

    # A loop of two, so that the search is compiled once.
    _, (cuts, wanted) = lax.scan(stage, (floor, total), jnp.array([False, True]))
    return jnp.where(top_k > 0, cuts[0], cuts[1]), cuts[1], wanted[1]


def _mass(z: jax.Array, weights: jax.Array, floor: jax.Array) -> jax.Array:
    """Weight [G] at and above a floor [G]."""
    return jnp.where(z >= floor[:, None], weights, 0.0).sum(axis=1)


def _threshold(z: jax.Array, weights: jax.Array, floor: jax.Array, peak: jax.Array, wanted: jax.Array) -> jax.Array:
    """The largest threshold [G], not below `floor`, at or above which lies at least the weight `wanted` [G].

    Rows whose `wanted` is 0 or more than there is keep their floor. The answer lies in [low, high], both of
    them values of z; each pass weighs what lies at and above one point between them and moves an end to the
    next value that occurs, so that a tie of many tokens ends the search as a single one does.
    """
    low = jnp.where(z >= jnp.maximum(floor, -FINITE)[:, None], z, jnp.inf).min(axis=1)
    low = jnp.minimum(low, peak)
    active = (wanted > 0) & (_mass(z, weights, low) >= wanted)
    high = jnp.where(active, peak, low)

    def narrow(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        low, high, turn = state
        middle = jnp.where(turn % 4 < 3, low / 2 + high / 2, _ordinal_middle(low, high))
        middle = jnp.where(middle > low, middle, high)
        above = z >= middle[:, None]
        enough = jnp.where(above, weights, 0.0).sum(axis=1) >= wanted
        next_up = jnp.where(above, z, jnp.inf).min(axis=1)
        next_down = jnp.where(above, -jnp.inf, z).max(axis=1)
        unsettled = low < high
        return (
            jnp.where(unsettled & enough, next_up, low),
            jnp.where(unsettled & ~enough, next_down, high),
            turn + 1,
        )

    low, _, _ = lax.while_loop(lambda state: (state[0] < state[1]).any(), narrow, (low, high, jnp.int32(0)))
    return jnp.where(active, low, floor)


def _ordinal_middle(low: jax.Array, high: jax.Array) -> jax.Array:
    """The float32 half-way in the order of floats: some 32 such steps end any search at all."""

    def flip(i: jax.Array) -> jax.Array:  # its own inverse; makes the integer image monotone
        return jnp.where(i < 0, i ^ 0x7FFFFFFF, i)

    a = flip(lax.bitcast_convert_type(low, jnp.int32))
    b = flip(lax.bitcast_convert_type(high, jnp.int32))
    return lax.bitcast_convert_type(flip((a & b) + ((a ^ b) >> 1)), jnp.float32)


def _last_tie(z: jax.Array, cut: jax.Array, peak: jax.Array, mass: jax.Array) -> jax.Array:
    """Highest id [G] kept of those at a top_p cut [G]: just enough for `mass` [G], lower ids first."""
    tied = z == cut[:, None]
    count = tied.sum(axis=1)
    above = jnp.where(z > cut[:, None], jnp.exp(z - peak[:, None]), 0.0).sum(axis=1)
    each = jnp.maximum(jnp.exp(cut - peak), _TINY)
    needed = jnp.minimum(jnp.maximum(jnp.ceil((mass - above) / each), 1), count)

    def find() -> jax.Array:
        tiles = tiled(tied.astype(jnp.float32), 0.0)
        sums = tiles.sum(axis=2)
        tile = first_past(sums, needed - 0.5)
        before = jnp.where(jnp.arange(sums.shape[1]) < tile[:, None], sums, 0.0).sum(axis=1)
        return tile * TILE + first_past(tile_at(tiles, tile), needed - 0.5 - before)

    unlimited = jnp.full(cut.shape, z.shape[1], jnp.int32)
    last: jax.Array = lax.cond((needed < count).any(), find, lambda: unlimited)
    return last
