"""pagedjax: serve decoder-only language models with JAX, from a paged KV cache."""

from pagedjax.async_engine import AsyncLLM, QueueFull, RequestError
from pagedjax.config import SamplingParams, UserError
from pagedjax.kv_cache import KVCache, init_kv_cache
from pagedjax.llm import LLM
from pagedjax.request import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from pagedjax.step import StepInput, StepOutput, step
from pagedjax.tokenizer import Tokenizer
from pagedjax.weights import load_model

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "KVCache",
    "Logprob",
    "QueueFull",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StepInput",
    "StepOutput",
    "Tokenizer",
    "UserError",
    "init_kv_cache",
    "load_model",
    "step",
]
