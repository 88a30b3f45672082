"""pagedjax: serve decoder-only language models with JAX, from a paged KV cache."""

from pagedjax.async_engine import AsyncLLM, QueueFull, RequestError
from pagedjax.attention_batch import AttentionBatch
from pagedjax.config import BeamSearchParams, SamplingParams, UserError
from pagedjax.kv_cache import KVCache, init_kv_cache
from pagedjax.llm import LLM
from pagedjax.pack import PackedRow, StepPacker, StepShapes
from pagedjax.request import CompletionOutput, Logprob, OutputCollector, RequestMetrics, RequestOutput
from pagedjax.sampling import SamplingInput
from pagedjax.step import RowInput, StepInput, StepOutput, TokenInput, step
from pagedjax.structured import StructuredOutputsParams
from pagedjax.tokenizer import Tokenizer
from pagedjax.weights import load_model

__all__ = [
    "LLM",
    "AsyncLLM",
    "AttentionBatch",
    "BeamSearchParams",
    "CompletionOutput",
    "KVCache",
    "Logprob",
    "OutputCollector",
    "PackedRow",
    "QueueFull",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "RowInput",
    "SamplingInput",
    "SamplingParams",
    "StepInput",
    "StepOutput",
    "StepPacker",
    "StepShapes",
    "StructuredOutputsParams",
    "TokenInput",
    "Tokenizer",
    "UserError",
    "init_kv_cache",
    "load_model",
    "step",
]
