"""Rotary position embedding, with every scaling that Llama-like configs use.

Formulas: RoFormer (arXiv 2104.09864); linear interpolation (arXiv 2306.15595); dynamic NTK scaling; YaRN
(arXiv 2309.00071); Llama 3's smoothed scaling. Numbers agree with Hugging Face's ``modeling_rope_utils``.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.config import RopeConfig


def rope_angles(config: RopeConfig, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine for each position: two ``[T, head_dim / 2]`` float32 from ``positions [T]`` int32.

    Dynamic scaling takes a token's own position for the sequence's length, so that a token's key does not depend on
    how the prompt was cut into chunks.
    """
    at = positions.astype(jnp.float32)[:, None]
    if config.rope_type == "dynamic":
        inv_freq = _dynamic_frequencies(config, head_dim, at)
        scale = 1.0
    else:
        frequencies, scale = inverse_frequencies(config, head_dim)
        inv_freq = jnp.asarray(frequencies)
    angles = at * inv_freq
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the two halves of each head: ``x [T, heads, head_dim]`` float32."""
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """``[head_dim / 2]`` float32 frequencies and the factor on cosine and sine, for all but dynamic scaling."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    base = (1.0 / np.power(np.float32(config.theta), exponent)).astype(np.float32)
    match config.rope_type:
        case "linear":
            return base / np.float32(config.factor), 1.0
        case "llama3":
            return _llama3(base, config), 1.0
        case "yarn":
            return _yarn(base, config, head_dim), _yarn_attention_factor(config)
    return base, 1.0


def _dynamic_frequencies(config: RopeConfig, head_dim: int, at: jax.Array) -> jax.Array:
    length = jnp.maximum(at + 1, config.original_max_position)
    stretch = config.factor * length / config.original_max_position - (config.factor - 1)
    theta = config.theta * stretch ** (head_dim / (head_dim - 2))
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    return 1.0 / theta**exponent


def _llama3(base: np.ndarray, config: RopeConfig) -> np.ndarray:
    wavelength = 2 * math.pi / base
    longest = config.original_max_position / config.low_freq_factor
    shortest = config.original_max_position / config.high_freq_factor
    smooth = (config.original_max_position / wavelength - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    between = (1 - smooth) * base / config.factor + smooth * base
    scaled = np.where(wavelength > longest, base / config.factor, base)
    return np.where((wavelength <= longest) & (wavelength >= shortest), between, scaled).astype(np.float32)


def _yarn(base: np.ndarray, config: RopeConfig, head_dim: int) -> np.ndarray:
    def dimension(rotations: float) -> float:
        turns = config.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # no division by zero
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    return (base / config.factor * ramp + base * (1 - ramp)).astype(np.float32)


def _yarn_attention_factor(config: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * weight * math.log(config.factor) + 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return mscale(config.mscale) / mscale(config.mscale_all_dim)
    return mscale(1.0)
