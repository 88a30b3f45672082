"""Checkpoints on disk: find, convert, check and read a model's files. Knows no model code and no JAX."""

from pagedjax.checkpoint.cache import cache_root
from pagedjax.checkpoint.checkpoint import Checkpoint
from pagedjax.checkpoint.conversion import Progress
from pagedjax.checkpoint.source import LOAD_FORMATS, open_checkpoint

__all__ = ["LOAD_FORMATS", "Checkpoint", "Progress", "cache_root", "open_checkpoint"]
