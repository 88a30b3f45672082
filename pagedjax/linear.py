"""The linear layer: the one seam behind which products, and how weights lie for them, can be exchanged."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax


def param(shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: jnp.dtype) -> nnx.Param:
    """A parameter with its sharding names (logical axes, one per dimension) beside it."""
    return nnx.Param(jnp.zeros(shape, dtype), out_sharding=axes, eager_sharding=False)


def dot(x: jax.Array, kernel: jax.Array, *, transposed: bool = False) -> jax.Array:
    """``x [T, in]`` times ``kernel [in, out]`` (or ``[out, in]``, transposed), products in the kernel's dtype.

    Returns:
        ``[T, out]`` float32, accumulated in float32. T must be at least 8 in bfloat16 and 64 in float32 for a row's
        bits not to depend on T (ADR 2); a one-row bfloat16 product is also six times slower than a two-row one.
    """
    axis = 1 if transposed else 0
    precision = lax.Precision.HIGHEST if kernel.dtype == jnp.float32 else None
    return lax.dot_general(
        x.astype(kernel.dtype),
        kernel,
        (((1,), (axis,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


class Linear(nnx.Module):
    """``x @ kernel + bias`` in float32 over a kernel ``[in, out]``."""

    def __init__(
        self,
        size_in: int,
        size_out: int,
        axes: tuple[str | None, str | None],
        *,
        bias: bool,
        dtype: jnp.dtype,
    ):
        self.kernel = param((size_in, size_out), axes, dtype)
        self.bias = param((size_out,), (axes[1],), dtype) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[T, in]`` to ``[T, out]`` float32."""
        y = dot(x, self.kernel[...])
        return y if self.bias is None else y + self.bias[...].astype(jnp.float32)
