"""What a model thinks before it answers: ``<think>...</think>``, parted from the answer as the text arrives."""

BEGIN, END = "<think>", "</think>"


class ReasoningReader:
    """Parts a text into reasoning and answer; however it is cut, the same comes of it.

    Args:
        inside: the prompt has begun the reasoning already, as many chat templates do.
    """

    def __init__(self, *, inside: bool):
        self._held = ""
        self._inside = inside
        self._answers = False  # what comes now is the answer
        self._skips_space = inside  # the mark's own line break is no part of what it begins

    def feed(self, text: str) -> tuple[str, str]:
        """Reasoning and answer that are known once this text has come."""
        self._held += text
        reasoning = ""
        if not self._inside and not self._answers:
            begun = self._held.lstrip()
            if begun.startswith(BEGIN):
                self._held, self._inside, self._skips_space = begun.removeprefix(BEGIN), True, True
            elif not BEGIN.startswith(begun):
                self._answers = True
        if self._inside:
            reasoning = self._take(END)
            if self._held.startswith(END):
                self._held = self._held.removeprefix(END)
                self._inside, self._answers, self._skips_space = False, True, True
        return reasoning, self._take(None) if self._answers else ""

    def finish(self) -> tuple[str, str]:
        """What is left when the text has ended."""
        held, self._held = self._held, ""
        return (held, "") if self._inside else ("", held)

    def _take(self, mark: str | None) -> str:
        """The held text up to a mark, or to what may become one."""
        if self._skips_space:
            self._held = self._held.lstrip("\n")
            self._skips_space = not self._held
        end = len(self._held)
        if mark is not None:
            found = self._held.find(mark)
            partial = (n for n in range(min(len(mark) - 1, end), 0, -1) if self._held.endswith(mark[:n]))
            end = found if found >= 0 else end - next(partial, 0)
        text, self._held = self._held[:end], self._held[end:]
        return text


def begins_inside(prompt: str) -> bool:
    """Whether a chat's prompt ends with reasoning that has begun."""
    return prompt.rstrip().endswith(BEGIN)
