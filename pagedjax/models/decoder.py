"""The decoder that every family is an instance of: embedding, attention and MLP blocks, norms, head.

Shapes: T packed tokens, H hidden, V vocabulary. Activations between layers are float32; products run in the weights'
dtype and accumulate in float32.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from pagedjax.attention import attention_backend
from pagedjax.attention_batch import AttentionBatch
from pagedjax.cache_layout import CacheLayout
from pagedjax.config import ModelConfig
from pagedjax.kv_cache import KVCache
from pagedjax.linear import Linear, dot, param
from pagedjax.models.norm import RMSNorm
from pagedjax.models.rope import apply_rope, rope_angles

_ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True)}
_EVERYTHING = 2**30  # a window that nothing falls out of

Carry = tuple[jax.Array, jax.Array, jax.Array]  # hidden states [T, H], and the stacks of keys and values


class Attention(nnx.Module):
    """Parameters of grouped-query attention: query, key and value in one product, the way out, norms of heads."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        width, hidden = config.num_heads * config.head_dim, config.hidden_size
        both = width + 2 * config.num_kv_heads * config.head_dim
        self.qkv = Linear(hidden, both, (None, "heads"), bias=config.qkv_bias, dtype=dtype)
        self.out = Linear(width, hidden, ("heads", None), bias=config.out_bias, dtype=dtype)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps, config.norm_offset, dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps, config.norm_offset, dtype) if config.qk_norm else None


class MLP(nnx.Module):
    """Parameters of a gated MLP: gate and up in one product, and down."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        size, hidden = config.intermediate_size, config.hidden_size
        self.gate_up = Linear(hidden, 2 * size, (None, "mlp"), bias=config.mlp_bias, dtype=dtype)
        self.down = Linear(size, hidden, ("mlp", None), bias=config.mlp_bias, dtype=dtype)


class DecoderLayer(nnx.Module):
    """Parameters of a layer. Gemma also norms what attention and MLP give back."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset, dtype)

        self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention, self.mlp = Attention(config, dtype), MLP(config, dtype)
        self.attention_out_norm = norm() if config.sandwich_norms else None
        self.mlp_out_norm = norm() if config.sandwich_norms else None


class Decoder(nnx.Module):
    """A decoder-only language model over the paged cache.

    Parameters are made as zeros of the right shape: weights come from a checkpoint, or are drawn at random.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, attention_backend: str = "xla"):
        self.embedding = param((config.vocab_size, config.hidden_size), ("vocab", None), dtype)
        self.layers = nnx.List([DecoderLayer(config, dtype) for _ in config.layers])
        self.final_norm = RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset, dtype)
        head = (config.hidden_size, config.vocab_size)
        self.head = None if config.tied_embeddings else param(head, (None, "vocab"), dtype)
        self.config, self.attention_backend = config, attention_backend

    def __call__(
        self, token_ids: jax.Array, positions: jax.Array, slots: jax.Array, kv_cache: KVCache, batch: AttentionBatch
    ) -> tuple[jax.Array, KVCache]:
        """Hidden states ``[T, H]`` after the last norm, and the cache with the step's tokens in it.

        Args:
            token_ids, positions: ``[T]`` int32.
            slots: ``[G, T]`` int32, one row per cache group; a slot past the end is not written.
            kv_cache: the cache; donate it.
            batch: which tokens belong to which sequence.
        """
        x = self.embedding[...][token_ids].astype(jnp.float32) * self.config.embedding_scale
        run = self._layer_function(positions, slots, kv_cache, batch)
        keys, values = list(kv_cache.k), list(kv_cache.v)
        for stack, first_place, layers in self._runs([k.shape[0] for k in kv_cache.k]):
            # A loop instead of a copy of the layer's program for each layer: compiling takes half as long, and loading
            # what is compiled less than half (ADR 7).
            x, keys[stack], values[stack] = lax.fori_loop(
                layers.start, layers.stop, partial(run, first_place), (x, keys[stack], values[stack])
            )
        block, offset = slots[0] // kv_cache.block_size, slots[0] % kv_cache.block_size
        stored = kv_cache.token_ids.at[block, offset].set(token_ids, mode="drop")
        return self.final_norm(x), KVCache(tuple(keys), tuple(values), stored)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """``[N, V]`` float32 from hidden states ``[N, H]`` after the last norm."""
        weights = self.embedding if self.head is None else self.head
        logits = dot(hidden, weights[...], transposed=self.head is None)
        cap = self.config.final_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def _runs(self, stack_places: list[int]) -> Iterator[tuple[int, int, range]]:
        """Layers that follow each other and lie in the same stack: its number, its first place, and the layers."""
        ends = list(itertools.accumulate(stack_places))
        stacks = [next(i for i, end in enumerate(ends) if place < end) for place in self.config.cache_layout.place_of]
        first = 0
        for stack, run in itertools.groupby(stacks):
            last = first + len(list(run))
            yield stack, ends[stack] - stack_places[stack], range(first, last)
            first = last

    def _layer_function(
        self, positions: jax.Array, slots: jax.Array, kv_cache: KVCache, batch: AttentionBatch
    ) -> Callable[[int, jax.Array, Carry], Carry]:
        """The function of one layer: its stack's first place, its number, and what it works on."""
        config, layers = self.config, list(self.layers)
        select = _Selection(layers)
        # No set: its order would change the compiled program, and its key in the compilation cache, from run to run.
        kinds = list(dict.fromkeys(layer.rope for layer in config.layers))
        angles = [rope_angles(kind, config.head_dim, positions) for kind in kinds]
        cosines, sines = (jnp.stack(part) for part in zip(*angles, strict=True))
        kind_of = jnp.asarray([kinds.index(layer.rope) for layer in config.layers])
        window_of = jnp.asarray([layer.window or _EVERYTHING for layer in config.layers], jnp.int32)
        windowed = any(layer.window for layer in config.layers)
        activation, backend = _ACTIVATIONS[config.activation], attention_backend(self.attention_backend)
        placed = _Placement(config.cache_layout, slots, batch, kv_cache.num_blocks, kv_cache.block_size)

        def attend(first: int, number: jax.Array, x: jax.Array, k_stack: jax.Array, v_stack: jax.Array) -> Carry:
            heads = select(number, lambda m: m.attention.qkv, x).reshape(x.shape[0], -1, config.head_dim)
            q, k, v = jnp.split(heads, [config.num_heads, config.num_heads + config.num_kv_heads], axis=1)
            if config.qk_norm:
                q = select(number, lambda m: m.attention.q_norm, q)
                k = select(number, lambda m: m.attention.k_norm, k)
            cos, sin = cosines[kind_of[number]], sines[kind_of[number]]
            q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
            flat_k, flat_v = (stack.reshape(-1, *stack.shape[2:]) for stack in (k_stack, v_stack))
            flat_k, flat_v = backend.write(flat_k, flat_v, k, v, placed.slots(number, first, flat_k.shape[0]))
            attended = backend(
                q, flat_k, flat_v, placed.batch(number, first), scale=config.attention_scale,
                window=window_of[number] if windowed else None, softcap=config.attention_softcap,
            )  # fmt: skip
            out = select(number, lambda m: m.attention.out, attended.reshape(x.shape[0], -1))
            return out, flat_k.reshape(k_stack.shape), flat_v.reshape(v_stack.shape)

        def layer(first: int, number: jax.Array, carry: Carry) -> Carry:
            x, k, v = carry
            out, k, v = attend(first, number, select(number, lambda m: m.attention_norm, x), k, v)
            if config.sandwich_norms:
                out = select(number, lambda m: m.attention_out_norm, out)
            x = x + out
            gate, up = jnp.split(
                select(number, lambda m: m.mlp.gate_up, select(number, lambda m: m.mlp_norm, x)), 2, axis=-1
            )
            out = select(number, lambda m: m.mlp.down, activation(gate) * up)
            if config.sandwich_norms:
                out = select(number, lambda m: m.mlp_out_norm, out)
            return x + out, k, v

        return layer


@dataclass(frozen=True)
class _Selection:
    """Applies the module of a layer whose number is known on the device only.

    A product is chosen among all layers' products, so that no weight is ever copied; a norm's scale is looked up.
    """

    layers: list[DecoderLayer]

    def __call__(self, number: jax.Array, part: Callable[[DecoderLayer], Any], x: jax.Array) -> jax.Array:
        parts = [part(layer) for layer in self.layers]
        first = parts[0]
        if isinstance(first, RMSNorm):
            scales = jnp.stack([norm.scale[...] for norm in parts])
            return first.apply(x, scales[number])
        return lax.switch(number, parts, x)


@dataclass(frozen=True)
class _Placement:
    """Where a layer finds its blocks: through its group's table and slots, in its own place.

    A stack seen as one flat pool numbers the blocks of a place on from those of the place before it.
    """

    layout: CacheLayout
    group_slots: jax.Array
    group_batch: AttentionBatch
    num_blocks: int
    block_size: int

    def slots(self, number: jax.Array, first_place: int, stack_blocks: int) -> jax.Array:
        """``[T]`` the slots in the stack that begins with ``first_place``; what is not written stays past its end."""
        slots = self.group_slots[self._group(number)]
        moved = slots + self._first_block(number, first_place) * self.block_size
        return jnp.where(slots < self.num_blocks * self.block_size, moved, stack_blocks * self.block_size)

    def batch(self, number: jax.Array, first_place: int) -> AttentionBatch:
        """The batch with its group's block tables, moved to the layer's place: ``[S, max_blocks]``."""
        tables = self.group_batch.block_tables[self._group(number)]
        return dataclasses.replace(self.group_batch, block_tables=tables + self._first_block(number, first_place))

    def _group(self, number: jax.Array) -> jax.Array | int:
        return 0 if self.layout.num_groups == 1 else jnp.asarray(self.layout.group_of)[number]

    def _first_block(self, number: jax.Array, first_place: int) -> jax.Array:
        return (jnp.asarray(self.layout.place_of)[number] - first_place) * self.num_blocks
