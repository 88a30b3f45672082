"""``pagedjax generate``: prompts in, text on standard output."""

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tqdm import tqdm

from pagedjax.config import EngineConfig, SamplingParams, UserError
from pagedjax.engine import Engine
from pagedjax.loading import load_engine
from pagedjax.prompts import Prompt
from pagedjax.request import OutputCollector, RequestOutput
from pagedjax.tokenizer import Tokenizer


def generate(
    config: EngineConfig,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    chat: bool = False,
    chat_template: str | None = None,
    streams: bool = False,
) -> int:
    """Load a model, continue the prompts, and print what comes; the exit status, 1 where a request failed.

    Args:
        config: of the engine.
        prompts: all of them are checked before the first runs.
        params: for all of them.
        chat: each prompt is a user's message, put through the chat template.
        chat_template: takes the place of the model's own.
        streams: print the text alone, as it comes; otherwise a JSON object for each sample, in the prompts'
            order.

    Raises:
        UserError: the model can't be loaded, or a prompt can't be served.
    """
    engine = load_engine(config, chat_template)
    for index, prompt in enumerate(prompts):
        try:
            text, token_ids = _encode(engine.tokenizer, prompt.content, chat)
            engine.add_request(str(index), token_ids, params, text)
        except ValueError as error:
            for other in range(index):
                engine.abort(str(other))
            raise UserError(f"{prompt.where}: {error}") from None
    failed = _print_text(engine) if streams else _print_json(engine, prompts)
    for index, reason in failed:
        print(f"pagedjax: error: {prompts[index].where}: {reason}", file=sys.stderr)
    return 1 if failed else 0


def _encode(tokenizer: Tokenizer | None, content: str | list[int], chat: bool) -> tuple[str | None, list[int]]:
    if isinstance(content, list):
        if chat:
            raise ValueError("a message is text, not token ids")
        return None, content
    if tokenizer is None:
        raise ValueError("this model has no tokenizer: give token ids in a .jsonl file, or --tokenizer")
    try:
        content.encode()
    except UnicodeEncodeError:
        raise ValueError("it is not UTF-8 text") from None
    if not chat:
        return content, tokenizer.encode(content)
    text = tokenizer.apply_chat_template([{"role": "user", "content": content}])
    return text, tokenizer.encode(text, add_special_tokens=False)


def _steps(engine: Engine) -> Iterator[RequestOutput]:
    while engine.has_work:
        yield from engine.step()


def _print_text(engine: Engine) -> list[tuple[int, str]]:
    errors = []
    for delta in _steps(engine):
        for sample in delta.outputs:
            sys.stdout.write(sample.text)
        if delta.error:
            errors.append((int(delta.request_id), delta.error))
        sys.stdout.flush()
    print(flush=True)
    return errors


def _print_json(engine: Engine, prompts: Sequence[Prompt]) -> list[tuple[int, str]]:
    """A line per sample as soon as it and all before it are there."""
    collectors = [OutputCollector() for _ in prompts]
    done: dict[int, RequestOutput] = {}
    errors, printed = [], 0
    with tqdm(total=len(prompts), desc="generating", unit="request") as bar:
        for delta in _steps(engine):
            index = int(delta.request_id)
            collectors[index].add(delta)
            if not delta.finished:
                continue
            done[index] = collectors[index].snapshot()
            bar.update()
            if delta.error:
                errors.append((index, delta.error))
            while printed in done:
                _print_samples(prompts[printed], done.pop(printed))
                printed += 1
    return errors


def _print_samples(prompt: Prompt, output: RequestOutput) -> None:
    for sample in output.outputs:
        line: dict[str, Any] = {"prompt": prompt.content}
        if len(output.outputs) > 1:
            line["index"] = sample.index
        line |= {"text": sample.text, "token_ids": sample.token_ids, "finish_reason": sample.finish_reason}
        print(json.dumps(line, ensure_ascii=False), flush=True)
