"""The decoder that every family is an instance of: embedding, attention and MLP blocks, norms, head.

Shapes: T packed tokens, H hidden, F MLP width, V vocabulary. Activations between layers are float32; products run in
the weights' dtype and accumulate in float32.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from pagedjax.attention import AttentionBatch, attention_backend
from pagedjax.config import LayerConfig, ModelConfig, RopeConfig
from pagedjax.kv_cache import KVCache, write_kv
from pagedjax.linear import Linear, dot, param
from pagedjax.models.norm import RMSNorm
from pagedjax.models.rope import apply_rope, rope_angles

_ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True)}


@dataclass(frozen=True)
class TokenContext:
    """What a step's tokens share in every layer.

    ``slots [T]`` int32 are their places in the cache; ``rope`` holds cosine and sine per kind of rotary.
    """

    slots: jax.Array
    batch: AttentionBatch
    rope: dict[RopeConfig, tuple[jax.Array, jax.Array]]


class Attention(nnx.Module):
    """Grouped-query attention over the paged cache, query, key and value in one product."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, backend: str, dtype: jnp.dtype):
        heads = config.num_heads + 2 * config.num_kv_heads
        self.qkv = Linear(
            config.hidden_size, heads * config.head_dim, (None, "heads"), bias=config.qkv_bias, dtype=dtype
        )
        self.out = Linear(
            config.num_heads * config.head_dim,
            config.hidden_size,
            ("heads", None),
            bias=config.out_bias,
            dtype=dtype,
        )
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps, config.norm_offset, dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps, config.norm_offset, dtype) if config.qk_norm else None
        self.config, self.layer, self.backend = config, layer, backend

    def __call__(
        self, x: jax.Array, k_layer: jax.Array, v_layer: jax.Array, context: TokenContext
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """``x [T, H]`` to attention's output ``[T, H]``, and the layer's cache with this step's tokens in it."""
        config = self.config
        heads = self.qkv(x).reshape(x.shape[0], -1, config.head_dim)
        q, k, v = jnp.split(heads, [config.num_heads, config.num_heads + config.num_kv_heads], axis=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = context.rope[self.layer.rope]
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        k_layer, v_layer = write_kv(k_layer, v_layer, k, v, context.slots)
        attended = attention_backend(self.backend)(
            q,
            k_layer,
            v_layer,
            context.batch,
            scale=config.attention_scale,
            window=self.layer.window,
            softcap=config.attention_softcap,
        )
        return self.out(attended.reshape(x.shape[0], -1)), k_layer, v_layer


class MLP(nnx.Module):
    """Gated MLP, gate and up in one product."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype):
        size = config.intermediate_size
        self.gate_up = Linear(config.hidden_size, 2 * size, (None, "mlp"), bias=config.mlp_bias, dtype=dtype)
        self.down = Linear(size, config.hidden_size, ("mlp", None), bias=config.mlp_bias, dtype=dtype)
        self.activation = config.activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[T, H]`` to ``[T, H]``."""
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(_ACTIVATIONS[self.activation](gate) * up)


class DecoderLayer(nnx.Module):
    """Attention and MLP, each added to what comes in; Gemma also norms what they give back."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, backend: str, dtype: jnp.dtype):
        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset, dtype)

        self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention = Attention(config, layer, backend, dtype)
        self.mlp = MLP(config, dtype)
        self.attention_out_norm = norm() if config.sandwich_norms else None
        self.mlp_out_norm = norm() if config.sandwich_norms else None

    def __call__(
        self, x: jax.Array, k_layer: jax.Array, v_layer: jax.Array, context: TokenContext
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """``x [T, H]`` through the layer, and the layer's cache with this step's tokens in it."""
        attended, k_layer, v_layer = self.attention(self.attention_norm(x), k_layer, v_layer, context)
        x = x + (attended if self.attention_out_norm is None else self.attention_out_norm(attended))
        widened = self.mlp(self.mlp_norm(x))
        x = x + (widened if self.mlp_out_norm is None else self.mlp_out_norm(widened))
        return x, k_layer, v_layer


class Decoder(nnx.Module):
    """A decoder-only language model over the paged cache.

    Parameters are made as zeros of the right shape: weights come from a checkpoint, or from ``weights.random_params``.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, attention_backend: str = "xla"):
        self.embedding = param((config.vocab_size, config.hidden_size), ("vocab", None), dtype)
        self.layers = nnx.List([DecoderLayer(config, layer, attention_backend, dtype) for layer in config.layers])
        self.final_norm = RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset, dtype)
        self.head = (
            None if config.tied_embeddings else param((config.hidden_size, config.vocab_size), (None, "vocab"), dtype)
        )
        self.config = config

    def __call__(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        slots: jax.Array,
        kv_cache: KVCache,
        batch: AttentionBatch,
    ) -> tuple[jax.Array, KVCache]:
        """Hidden states ``[T, H]`` after the last norm, and the cache with the step's tokens in it.

        Args:
            token_ids, positions, slots: ``[T]`` int32; a slot past the end marks padding.
            kv_cache: the cache; donate it.
            batch: which tokens belong to which sequence.
        """
        config = self.config
        x = self.embedding[...][token_ids].astype(jnp.float32) * config.embedding_scale
        # No set: its order would change the compiled program, and its key in the compilation cache, from run to run.
        kinds = dict.fromkeys(layer.rope for layer in config.layers)
        rope = {kind: rope_angles(kind, config.head_dim, positions) for kind in kinds}
        context = TokenContext(slots, batch, rope)
        keys, values = [], []
        for layer, k_layer, v_layer in zip(self.layers, kv_cache.k, kv_cache.v, strict=True):
            x, k_layer, v_layer = layer(x, k_layer, v_layer, context)
            keys.append(k_layer)
            values.append(v_layer)
        block, offset = slots // kv_cache.block_size, slots % kv_cache.block_size
        stored = kv_cache.token_ids.at[block, offset].set(token_ids, mode="drop")
        return self.final_norm(x), KVCache(tuple(keys), tuple(values), stored)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """``[N, V]`` float32 from hidden states ``[N, H]`` after the last norm."""
        weights = self.embedding if self.head is None else self.head
        logits = dot(hidden, weights[...], transposed=self.head is None)
        cap = self.config.final_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)
