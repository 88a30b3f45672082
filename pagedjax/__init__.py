"""pagedjax: serve decoder-only language models with JAX, from a paged KV cache."""

from pagedjax.config import SamplingParams, UserError
from pagedjax.kv_cache import KVCache, init_kv_cache
from pagedjax.llm import LLM
from pagedjax.request import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from pagedjax.step import StepInput, StepOutput, step
from pagedjax.weights import load_model

__all__ = [
    "LLM",
    "CompletionOutput",
    "KVCache",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StepInput",
    "StepOutput",
    "UserError",
    "init_kv_cache",
    "load_model",
    "step",
]
