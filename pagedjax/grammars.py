"""From what an output must look like to masks of the tokens that may come next, by ``llguidance``.

llguidance (Guidance's library in Rust, the extra ``structured``) runs a lexer of regex derivatives and an Earley parser
over the trie of the vocabulary. Its limits bound the work of compiling and of each mask, so that no grammar can hold up
the engine.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedjax.structured import StructuredOutputsParams
from pagedjax.tokenizer import Tokenizer

try:
    import llguidance
    from llguidance.gbnf_to_lark import any_to_lark
except ImportError:  # the extra is not installed: `Grammars.compile` says so
    llguidance = None  # type: ignore[assignment]

Mask = npt.NDArray[np.uint32]

_CACHED = 256  # compiled grammars
# Between JSON's tokens: nothing, a space, or a new line and its indentation. Without a bound, a model could go on with
# white space for ever.
_WHITESPACE = r"( |\n[ \t]{0,32})"
# A state of the lexer takes some 2 KB: the default of 250,000 would let one request take half a GB.
_MAX_LEXER_STATES = 20_000
_MOST_SAID = 300  # characters of llguidance's own words


class GrammarError(ValueError):
    """A grammar that is wrong, or that has come to be too complex; the message begins with ``structured_outputs``."""


class GrammarState:
    """How far one sequence has come in its grammar. It belongs to one thread at a time."""

    def __init__(self, matcher: Any):
        self.matcher = matcher

    def accept(self, token_id: int) -> None:
        """The next token has come.

        Raises:
            GrammarError: it was none of the mask's.
        """
        if not self.matcher.consume_token(token_id):
            raise GrammarError(f"structured_outputs: token {token_id} does not fit: {_said(self.matcher)}")

    @property
    def is_finished(self) -> bool:
        """Whether the output is complete, and nothing could be added to it."""
        return self.matcher.is_stopped()


class Grammar:
    """A compiled grammar, for any number of sequences."""

    def __init__(self, matcher: Any):
        self._matcher = matcher

    def start(self) -> GrammarState:
        """The state of a sequence that has no output yet."""
        return GrammarState(self._matcher.deep_copy())


class Grammars:
    """Compiles grammars for one vocabulary, and keeps those that were used last.

    Args:
        tokenizer: None for a model without one.
        vocab_size: V, the model's; it may be larger than the tokenizer's.
        eos_token_ids: tokens that end a sequence: they are allowed where the output is complete.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]):
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, tuple(eos_token_ids)
        self._lock = threading.Lock()
        self._vocabulary: Any = None  # made when it is needed: a second, for 262,144 tokens
        self._executor: Any = None
        self._compiled: OrderedDict[tuple[str, str], Grammar] = OrderedDict()

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """The grammar of ``params``; may be called from any thread, and takes some milliseconds.

        Raises:
            ValueError: the extra is missing, the model has no tokenizer, or the grammar is wrong, uses what is not
                supported (the message names it), or is over a limit.
        """
        key = params.key
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return self._compiled[key]
            vocabulary = self._make_vocabulary()
        grammar = _compile(vocabulary, *key)
        with self._lock:
            self._compiled[key] = grammar
            if len(self._compiled) > _CACHED:
                self._compiled.popitem(last=False)
        return grammar

    def masks(self, states: Sequence[GrammarState]) -> list[Mask | GrammarError]:
        """The tokens that may come next in each sequence, made in parallel and without Python's lock.

        Returns:
            Of each, bit i % 32 of word i // 32 is token i's: ``[ceil(V / 32)]`` uint32; or why there is no mask.
        """
        out = np.zeros((len(states), -(-self._vocab_size // 32)), np.int32)
        if len(states) > 1 and self._executor is None:
            self._executor = llguidance.LLExecutor()
        if len(states) > 1:
            jobs = [(state.matcher, row) for row, state in enumerate(states)]
            self._executor.unsafe_compute_mask_ptr(jobs, out.ctypes.data, 4 * out.shape[1], len(states))
        else:
            for state in states:
                state.matcher.unsafe_compute_mask_ptr(out.ctypes.data, out.nbytes)
        return [
            GrammarError(f"structured_outputs has come to be too complex: {_said(state.matcher)}")
            if state.matcher.is_error()
            else mask
            for state, mask in zip(states, out.view(np.uint32), strict=True)
        ]

    def _make_vocabulary(self) -> Any:
        if llguidance is None:
            raise ValueError("structured_outputs needs a package that is missing: pip install 'pagedjax[structured]'")
        if self._tokenizer is None:
            raise ValueError("structured_outputs needs a tokenizer, and this model has none")
        if not self._eos:
            raise ValueError("structured_outputs needs a token that ends a sequence, and this model has none")
        if self._vocabulary is None:
            words = llguidance.TokenizerWrapper(_Words(self._tokenizer, self._vocab_size, self._eos[0]))
            self._vocabulary = llguidance.LLTokenizer(words, n_vocab=self._vocab_size, eos_token=list(self._eos))
        return self._vocabulary


class _Words:
    """A tokenizer as llguidance asks for one. Tokens that stand for nothing have no bytes, and never fit."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int):
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = eos_token_id, tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = [i for i in sorted(tokenizer.special_token_ids) if i < vocab_size]

    def __call__(self, text: str | bytes) -> list[int]:
        whole = text if isinstance(text, str) else text.decode()
        return self._tokenizer.encode(whole, add_special_tokens=False)


def _compile(vocabulary: Any, kind: str, text: str) -> Grammar:
    matcher = llguidance.LLMatcher(
        vocabulary,
        _source(kind, text),
        log_level=0,
        limits=llguidance.LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False),
    )
    if not matcher.is_error():
        matcher.compute_bitmask()  # here, and not in the engine, the first use's work is done
    if matcher.is_error():
        raise GrammarError(f"structured_outputs: {_said(matcher)}")
    if matcher.is_stopped():
        raise GrammarError("structured_outputs allows no output but the empty one")
    return Grammar(matcher)


def _source(kind: str, text: str) -> str:
    """The grammar in llguidance's own form."""
    matcher = llguidance.LLMatcher
    try:
        match kind:
            case "json":
                return matcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": _WHITESPACE})
            case "regex":
                return matcher.grammar_from_regex(text)
            case "choice":
                return llguidance.grammar_from("choice", text)
            case _:
                return matcher.grammar_from_lark(any_to_lark(text))
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"structured_outputs: {str(error)[:_MOST_SAID]}") from None


def _said(matcher: Any) -> str:
    return " ".join(matcher.get_error().split())[:_MOST_SAID]
