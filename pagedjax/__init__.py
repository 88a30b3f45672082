"""pagedjax: serve decoder-only language models with JAX, from a paged KV cache.

A public name is imported when it is first used (PEP 562), so that ``pagedjax --help``, or whoever needs
settings alone, does not wait seconds for JAX. What type checkers see stands in ``__init__.pyi``.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

_HOMES = {
    "AttentionBatch": "attention_batch",
    "BeamSearchParams": "config",
    "PackedRow": "pack",
    "RowInput": "step",
    "SamplingInput": "sampling",
    "StepPacker": "pack",
    "StepShapes": "pack",
    "TokenInput": "step",
    "LLM": "llm",
    "AsyncLLM": "async_engine",
    "CompletionOutput": "request",
    "KVCache": "kv_cache",
    "Logprob": "request",
    "QueueFull": "async_engine",
    "RequestError": "async_engine",
    "RequestMetrics": "request",
    "OutputCollector": "request",
    "RequestOutput": "request",
    "SamplingParams": "config",
    "StepInput": "step",
    "StepOutput": "step",
    "StructuredOutputsParams": "structured",
    "Tokenizer": "tokenizer",
    "UserError": "config",
    "init_kv_cache": "kv_cache",
    "load_model": "weights",
    "step": "step",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


class _Package(ModuleType):
    """Keeps ``pagedjax.step`` the function, although importing the module of that name would bind it here."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, ModuleType) and name in _HOMES):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
