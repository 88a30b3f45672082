"""Token ids to text while they arrive: whole characters only, and nothing past a stop string.

The text comes from each token's bytes through an incremental UTF-8 decoder, not from decoding a window of ids
again and again as ``tokenizers.DecodeStream`` does: that one repeats the whole prompt when it ends in half a
character, raises "Invalid prefix" on invalid byte-fallback runs, and its window grows without limit while
tokens add no text. Bytes cost the same for every token, whatever came before.
"""

import codecs
import re
from collections import deque
from collections.abc import Sequence
from itertools import islice

from pagedjax.tokenizer import Tokenizer

_ESCAPED_BYTE = re.compile("[\udc80-\udcff]")


class StopFinder:
    """Finds the first stop string in a text that arrives in parts (Aho and Corasick, 1975).

    First is the one that is complete first when the text is read character by character; of those that end at
    the same character, the one listed first (as vLLM decides). So the answer does not depend on how the text
    was cut into tokens. ``found`` is that stop string, or None.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self.found: str | None = None
        self.held = ""  # the longest end of the text so far that may be the beginning of a stop string
        self._stops = tuple(stops)
        self._include_stop = include_stop
        # A state is a beginning of a stop string, 0 the empty one.
        self._state = 0
        self._next: list[dict[str, int]] = [{}]
        self._fallback: list[int] = [0]  # the longest proper end of this state that is a state too
        self._length: list[int] = [0]
        self._match: list[int] = [len(self._stops)]  # index of the stop string that ends here, or past the end
        for index, stop in enumerate(self._stops):
            self._add(stop, index)
        self._link()

    def _add(self, stop: str, index: int) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._fallback.append(0)
                self._length.append(self._length[state] + 1)
                self._match.append(len(self._stops))
            state = self._next[state][char]
        self._match[state] = min(self._match[state], index)

    def _link(self) -> None:
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                self._fallback[child] = self._step(self._fallback[state], char)
                self._match[child] = min(self._match[child], self._match[self._fallback[child]])
                queue.append(child)

    def _step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(char, 0)

    def push(self, text: str, allowed: bool = True) -> str:
        """The text that is safe to show after ``text`` arrived; sets ``found`` where ``allowed``.

        With ``include_stop`` nothing needs to be held back: the text is shown up to and with the stop string.
        """
        if not self._state and self._next[0].keys().isdisjoint(text):
            return text
        for position, char in enumerate(text, start=1):
            self._state = self._step(self._state, char)
            if allowed and self._match[self._state] < len(self._stops):
                self.found = self._stops[self._match[self._state]]
                known, self.held = self.held + text[:position], ""
                return known if self._include_stop else known[: len(known) - len(self.found)]
        while self._state and not self._next[self._state]:  # a whole stop string that was not allowed to stop
            self._state = self._fallback[self._state]
        if self._include_stop:
            return text
        known = self.held + text
        safe = len(known) - self._length[self._state]
        self.held = known[safe:]
        return known[:safe]


class TextStream:
    """The text of one sequence while its tokens arrive; without a tokenizer it stays empty.

    The text is what ``decode(prompt + output)`` adds after the prompt's complete characters: the space
    between prompt and output is kept, and a character that the prompt leaves unfinished is shown when the
    output ends it. One exception: in an invalid run of byte-fallback tokens Hugging Face turns complete
    characters into U+FFFD afterwards; here a complete character is shown at once and stays, and only the
    other bytes become one U+FFFD each.

    Push every output token, except the token that ended the sequence where it is not to be shown. ``stop`` is
    looked for as `StopFinder` says.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_token_ids: Sequence[int],
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_token_ids if tokenizer and skip_special_tokens else frozenset()
        self._finder = StopFinder(stop, include_stop)
        self._parts: list[str] = []
        self._ended = False
        # Byte fallback gives one U+FFFD for each invalid byte, byte-level decoding one for each broken
        # character. surrogateescape makes a surrogate of each invalid byte; valid UTF-8 holds none.
        self._escapes = tokenizer is not None and tokenizer.byte_fallback
        errors = "surrogateescape" if self._escapes else "replace"
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors)
        # Three tokens hold every unfinished character: it has three bytes at most.
        shown = (data for token_id in reversed(prompt_token_ids) if (data := self._bytes(token_id)))
        last = list(islice(shown, 3))
        self._first = not last  # nothing shown yet: some tokenizers strip the space that begins a text
        self._decoder.decode(b"".join(reversed(last)))
        self._carried = self._decoder.getstate()[0]
        self._decoder.reset()

    @property
    def stop_reason(self) -> str | None:
        """The stop string that was found; the text ends before it, or with it where ``include_stop``."""
        return self._finder.found

    @property
    def text(self) -> str:
        """Everything shown so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def push(self, token_id: int, *, stops_allowed: bool = True) -> str:
        """The text that became safe to show with this token; empty once a stop string was found.

        ``stops_allowed`` is False for the first ``min_tokens`` tokens. As in vLLM a stop string counts when
        its last character comes from a token that may stop: one that begins earlier and ends later stops; one
        that is complete earlier is shown as text and does not.
        """
        if self._ended or self._finder.found is not None:
            return ""
        data = self._bytes(token_id)
        if not data or self._tokenizer is None:
            return ""
        if self._first:
            data = self._tokenizer.first_bytes(token_id)
            self._first = False
        if self._carried:
            data, self._carried = self._carried + data, b""
        return self._show(self._finder.push(self._characters(data), stops_allowed))

    def finish(self) -> str:
        """What was held back, at the end of the sequence: nothing after a stop string.

        Unfinished characters become U+FFFD, which complete no stop string: the sequence has ended already.
        """
        if self._ended or self._finder.found is not None:
            return ""
        self._ended = True
        return self._show(self._finder.held + self._characters(b"", final=True))

    def _bytes(self, token_id: int) -> bytes:
        if self._tokenizer is None or token_id in self._hidden:
            return b""
        return self._tokenizer.token_bytes(token_id)

    def _characters(self, data: bytes, final: bool = False) -> str:
        text = self._decoder.decode(data, final)
        return text if text.isascii() or not self._escapes else _ESCAPED_BYTE.sub("\ufffd", text)

    def _show(self, text: str) -> str:
        if text:
            self._parts.append(text)
        return text
