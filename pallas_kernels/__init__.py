"""GPU kernels for paged attention, in Pallas. They import jax only; `pagedjax.attention` is their one caller."""
