"""Chat or tool dialogues -> samples, with the mask on what the assistant said, exact about token boundaries.

Where an assistant message carries `token_ids` (what the sampler returned), those ids are trained on, and no text is
tokenised again; `prompt_ids`, if there, is what the sampler was shown. Otherwise the template is rendered prefix by
prefix: everything up to the assistant's turn, then with the turn. Each render must extend the ids so far token by
token. Where the template rewrites history (drops earlier reasoning, say) it cannot, and the dialogue is refused, or
forked into several samples in which each assistant token is trained exactly once (`rewrite="fork"`; forks share the
group, so the "token", "sum" and "constant" denominators stay; under "sample" each fork counts as one).

Masks come from these lengths, never from ids: a pad or end id inside a turn is a token like others. An end token that
the template adds behind a turn cut short is not trained on. Special tokens come from the template alone (no second
BOS), and no padding side matters. The shift is made here, once, on the whole trajectory. Placeholders of images stay
unexpanded, one
id an item: `longspan.expand(sample, model)`.

Keys of a message that this file reads itself: `token_ids`, `prompt_ids`, `logprobs` (one a token of token_ids: they
become the field old_logprob), `train` (False: not trained on). Everything else goes to the template as it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from longspan.data.media import Image, Video
from longspan.data.sample import Media, Sample
from longspan.errors import UserError

Message = Mapping[str, object]
OWN_KEYS = ("token_ids", "prompt_ids", "logprobs", "train")
PROBES = ("yes", "no")  # two contents whose renders end in what the template puts behind a turn


# Any: transformers types these methods by long unions that differ between tokenizers and processors.
class ChatTemplate(Protocol):
    """A Hugging Face tokenizer or processor, as far as it renders dialogues."""

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, **settings: Any
    ) -> Any: ...


class Tokenizer(ChatTemplate, Protocol):
    """A Hugging Face tokenizer."""

    @property
    def eos_token_id(self) -> Any: ...

    def __call__(self, text: Any, *, add_special_tokens: bool, padding: bool, truncation: bool) -> Any: ...

    def decode(self, token_ids: Any) -> Any: ...


@dataclass(slots=True)
class _Trajectory:
    """Ids so far, and which of them the assistant said."""

    ids: list[int]
    said: list[bool]
    logprobs: list[float] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)  # what the template puts behind the last turn and nobody said
    trained: bool = False

    def add(self, ids: Sequence[int], *, said: bool, logprobs: Sequence[float] | None = None) -> None:
        self.ids += ids
        self.said += [said] * len(ids)
        self.logprobs += logprobs if logprobs is not None else [0.0] * len(ids)
        self.trained |= said and len(ids) > 0


@dataclass(frozen=True, slots=True)
class _Renderer:
    """Messages -> ids."""

    template: ChatTemplate
    tokenizer: Tokenizer
    tools: Sequence[object] | None
    settings: Mapping[str, object]

    def __call__(self, messages: Sequence[Message], *, prompt: bool) -> list[int]:
        plain = [{key: value for key, value in message.items() if key not in OWN_KEYS} for message in messages]
        settings = dict(self.settings) | ({"tools": list(self.tools)} if self.tools is not None else {})
        text = self.template.apply_chat_template(plain, tokenize=False, add_generation_prompt=prompt, **settings)
        # The template wrote every special token already: encoding with defaults would add a second BOS.
        encoded = self.tokenizer(text, add_special_tokens=False, padding=False, truncation=False)
        return list(encoded["input_ids"])

    def show(self, ids: Sequence[int]) -> str:
        return repr(self.tokenizer.decode(list(ids)))


def chat_samples(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    *,
    processor: ChatTemplate | None = None,
    tools: Sequence[object] | None = None,
    rewrite: Literal["refuse", "fork"] = "refuse",
    template_settings: Mapping[str, object] | None = None,
    group: str | int | None = None,
) -> list[Sample]:
    """The samples of one dialogue: one, or one a fork. A VLM's `processor` renders and its tokenizer encodes.

    `template_settings` go to the chat template (enable_thinking=...).
    """
    if rewrite not in ("refuse", "fork"):
        raise UserError(f"rewrite={rewrite!r} is unknown. Use 'refuse' or 'fork'.")
    _check_roles(messages)
    render = _Renderer(processor or tokenizer, tokenizer, tools, template_settings or {})
    rows: list[tuple[_Trajectory, int]] = []  # and how many messages it covers
    current: _Trajectory | None = None
    base: list[int] | None = None  # the render of the messages so far, the last assistant turn included
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        shown = _recorded(message, "prompt_ids", number)
        prompt = render(messages[:number], prompt=True) if shown is None else shown
        if current is not None:
            current = _extend(current, prompt, base, exact=shown is not None)
            if current is None and rewrite == "refuse":
                raise _rewritten(render, rows[-1][0], base, prompt, number)
        if current is None:
            current = _Trajectory([], [])
            current.add(prompt, said=False)
            rows.append((current, number))
        base = _say(current, render, messages, number, prompt)
        rows[-1] = (current, number + 1)
    samples = [
        _sample(row, _media(messages[:count]), group, _with_logprobs(messages)) for row, count in rows if row.trained
    ]
    if not samples:
        raise UserError(
            f"a dialogue of {len(messages)} messages has no assistant token to train on. Check roles and 'train'."
        )
    return samples


def _check_roles(messages: Sequence[Message]) -> None:
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UserError(f"message {number} is {message!r}: a message is an object with a 'role' and a 'content'.")


def _extend(current: _Trajectory, prompt: list[int], base: list[int] | None, *, exact: bool) -> _Trajectory | None:
    """The trajectory with what stands between two turns; None where the prompt is no extension of it."""
    if prompt[: len(current.ids)] == current.ids:
        current.add(prompt[len(current.ids) :], said=False)
        return current
    # Recorded ids may spell a turn in other tokens than its text: what counts is what the template adds behind it.
    if exact or base is None or prompt[: len(base)] != base:
        return None
    current.add([*current.pending, *prompt[len(base) :]], said=False)
    return current


def _say(
    current: _Trajectory, render: _Renderer, messages: Sequence[Message], number: int, prompt: list[int]
) -> list[int]:
    """Adds an assistant turn; gives the render up to and with it."""
    message = messages[number]
    trained = message.get("train", True) is not False
    spoken = _recorded(message, "token_ids", number)
    whole = render(messages[: number + 1], prompt=False)
    closing = _closing(render, messages[:number])
    if spoken is None:
        if whole[: len(prompt)] != prompt:
            raise _no_extension(render, prompt, whole, number)
        turn = whole[len(prompt) :]
        end = len(turn) - len(closing) if closing and turn[len(turn) - len(closing) :] == closing else len(turn)
        stop = _stop(render, closing) if end < len(turn) else 0
        current.add(turn[: end + stop], said=trained)
        current.pending = turn[end + stop :]
        return whole
    logprobs = message.get("logprobs")
    if logprobs is not None and (not isinstance(logprobs, Sequence) or len(logprobs) != len(spoken)):
        raise UserError(f"message {number}: 'logprobs' must have one number for each of its {len(spoken)} token_ids.")
    current.add(spoken, said=trained, logprobs=logprobs)
    said = max(k for k in range(len(closing) + 1) if k <= len(spoken) and spoken[len(spoken) - k :] == closing[:k])
    current.pending = closing[said:]
    return whole


def _closing(render: _Renderer, before: Sequence[Message]) -> list[int]:
    """Ids that the template puts behind an assistant's text: end of turn, newline."""
    first, second = (render([*before, {"role": "assistant", "content": probe}], prompt=False) for probe in PROBES)
    shared = 0
    while shared < min(len(first), len(second)) and first[-1 - shared] == second[-1 - shared]:
        shared += 1
    return first[len(first) - shared :]


def _stop(render: _Renderer, closing: list[int]) -> int:
    """How much of the closing the policy says itself: up to the end token, or its first id."""
    end = render.tokenizer.eos_token_id
    return closing.index(end) + 1 if end in closing else min(1, len(closing))


def _recorded(message: Message, key: str, number: int) -> list[int] | None:
    ids = message.get(key)
    if ids is None:
        return None
    if not isinstance(ids, Sequence) or isinstance(ids, str) or not all(isinstance(i, int) for i in ids):
        raise UserError(f"message {number}: {key!r} is a list of token ids, got {type(ids).__name__}.")
    return list(ids)


def _with_logprobs(messages: Sequence[Message]) -> bool:
    said = [
        message for message in messages if message["role"] == "assistant" and message.get("train", True) is not False
    ]
    given = [message.get("logprobs") is not None for message in said]
    if any(given) and not all(given):
        raise UserError(
            f"{sum(given)} of {len(given)} trained assistant messages carry 'logprobs'. Give them for all or for none."
        )
    return any(given)


def _sample(row: _Trajectory, media: list[Media], group: str | int | None, with_logprobs: bool) -> Sample:
    last = max(position for position, said in enumerate(row.said) if said) + 1  # nothing behind it is trained on
    ids, said = row.ids[:last], row.said[:last]
    fields = {"old_logprob": torch.tensor(row.logprobs[1:last], dtype=torch.float64)} if with_logprobs else {}
    return Sample(ids[:-1], ids[1:], [int(value) for value in said[1:]], fields=fields, media=media, group=group)


def _media(messages: Sequence[Message]) -> list[Media]:
    found: list[Media] = []
    for number, message in enumerate(messages):
        content = message.get("content")
        for part in content if isinstance(content, list) else []:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind in ("image", "video"):
                source = part.get(kind, part.get("path"))
                if source is None:
                    raise UserError(
                        f"message {number}: a part of type {kind!r} has no {kind!r}: give a path or pixels."
                    )
                if isinstance(source, Image | Video):
                    found.append(source)
                else:
                    found.append(Image(source) if kind == "image" else Video(source, part.get("timestamps")))
            elif kind == "image_url":
                raise UserError(
                    f"message {number}: 'image_url' parts are not fetched. Save the picture and give 'image': PATH."
                )
    return found


def _rewritten(
    render: _Renderer, row: _Trajectory, base: list[int] | None, prompt: list[int], number: int
) -> UserError:
    before = base or row.ids
    where = _first_difference(before, prompt)
    return UserError(
        f"message {number}: the prompt of this turn does not extend the turns before it: at token {where} it has "
        f"{render.show(prompt[where : where + 8])} where they had {render.show(before[where : where + 8])}. The chat "
        "template "
        "rewrites history (many drop earlier reasoning). Use rewrite='fork' for one sample a rewrite, or a template "
        "that keeps it."
    )


def _no_extension(render: _Renderer, prompt: list[int], whole: list[int], number: int) -> UserError:
    where = _first_difference(prompt, whole)
    return UserError(
        f"message {number}: rendered with its assistant turn, the dialogue does not begin with the prompt that the "
        "assistant "
        f"saw: at token {where} {render.show(whole[where : where + 8])} against "
        f"{render.show(prompt[where : where + 8])}. "
        "Pass the sampler's template_settings (enable_thinking, ...), or recorded 'token_ids' with the message."
    )


def _first_difference(first: Sequence[int], second: Sequence[int]) -> int:
    return next(
        (k for k, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
