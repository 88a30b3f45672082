"""RMS norm."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from pagedjax.linear import param
from pagedjax.ordered_sum import sum_in_order


class RMSNorm(nnx.Module):
    """``x / rms(x) * (offset + scale)`` over the last axis, in float32 (arXiv 1910.07467; Gemma's offset is 1)."""

    def __init__(self, size: int, eps: float, offset: float, dtype: jnp.dtype):
        self.scale = param((size,), (None,), dtype)
        self.eps, self.offset = eps, offset

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., size]`` float32 to the same."""
        return self.apply(x, self.scale[...])

    def apply(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        """The norm with another ``scale [size]``."""
        rms = lax.rsqrt(sum_in_order(x * x) / x.shape[-1] + self.eps)
        return x * rms * (self.offset + scale.astype(jnp.float32))
