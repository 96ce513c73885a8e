"""Dialogues -> samples: recorded ids, prefix checks, forks, one BOS, masks from lengths.

Bugs M1, M3, M4, L6, L7, L10, G17, E2, E5.
"""

import pytest
from tokenizers import Tokenizer, decoders, models, processors
from transformers import PreTrainedTokenizerFast

from longspan.data import Image
from longspan.data.chat import chat_samples
from longspan.errors import UserError

TEXT = (
    "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}"
)
TURNS = (
    "{{ '<bos>' if bos else '' }}"
    "{% if tools %}<tools>{% for t in tools %}{{ t.name }}{% endfor %}\n{% endif %}"
    "{% for m in messages %}<start>{{ m.role }}\n" + TEXT + "{% if m.tool_calls %}<call>{{ "
    "m.tool_calls[0].function.name }}"
    "{% endif %}<end>\n{% endfor %}{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)
# Drops <think>...</think> of every assistant turn but the last message.
STRIPS = TURNS.replace(
    "{{ m.content }}", "{{ m.content.split('</think>')[-1] if not loop.last and m.role == 'assistant' else m.content }}"
)


def tokenizer(template: str = TURNS, *, merges=(), **changes) -> PreTrainedTokenizerFast:
    """Characters (and a few merges) with special tokens; its post-processor adds a BOS, as Llama's does."""
    special = ["<bos>", "<start>", "<end>", "<call>", "<image>", "<tools>"]
    letters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {
        token: number for number, token in enumerate([*special, *letters, *("".join(pair) for pair in merges)])
    }
    raw = Tokenizer(models.BPE(vocabulary, list(merges)))
    raw.decoder = decoders.Fuse()
    raw.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<bos>", eos_token="<end>", **changes)
    made.add_special_tokens({"additional_special_tokens": special[1:]})
    made.chat_template = template
    return made


def told(sample, coder) -> str:
    """The text of the trained targets."""
    return coder.decode(sample.target_ids[sample.mask > 0].tolist())


def whole(sample, coder) -> str:
    return coder.decode([*sample.input_ids.tolist(), int(sample.target_ids[-1])])


DIALOGUE = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "ciao"},
]


def test_the_mask_covers_what_the_assistant_said_and_its_end_token():
    coder = tokenizer()
    (sample,) = chat_samples(DIALOGUE, coder, group="g")
    assert whole(sample, coder).startswith(
        "<start>system\nbe brief<end>\n<start>user\nhi<end>\n<start>assistant\nyo<end>\n"
    )
    assert told(sample, coder) == "yo<end>ciao<end>"
    assert (sample.target_ids[:-1] == sample.input_ids[1:]).all() and sample.group == "g"
    assert sample.mask[-1] == 1 and sample.target_ids[-1] == coder.eos_token_id  # E2: nothing behind, nothing wraps


def test_untrained_messages_are_context():
    coder = tokenizer()
    (sample,) = chat_samples([*DIALOGUE[:2], DIALOGUE[2] | {"train": False}, *DIALOGUE[3:]], coder)
    assert told(sample, coder) == "ciao<end>"
    with pytest.raises(UserError, match="no assistant token to train on"):
        chat_samples(DIALOGUE[:2], coder)


def test_m4_one_begin_token():
    coder = tokenizer()
    assert coder("x")["input_ids"][0] == 0  # the control: encoding with defaults adds one
    (sample,) = chat_samples(DIALOGUE, coder, template_settings={"bos": True})
    assert (sample.input_ids == 0).sum() == 1 and sample.input_ids[0] == 0


def test_m1_recorded_ids_of_a_tool_dialogue_are_trained_in_order():
    coder = tokenizer()
    tool_call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    call = {"role": "assistant", "content": "", "tool_calls": [tool_call]}
    messages = [DIALOGUE[1], call, {"role": "tool", "content": "4"}, {"role": "assistant", "content": "four"}]
    tools = [{"name": "add"}]
    spoken = [
        coder("<call>add<end>", add_special_tokens=False)["input_ids"],
        coder("four<end>", add_special_tokens=False)["input_ids"],
    ]
    recorded = [m | {"token_ids": spoken[k // 2]} if k % 2 else m for k, m in enumerate(messages)]
    (sample,) = chat_samples(recorded, coder, tools=tools)
    assert sample.target_ids[sample.mask > 0].tolist() == spoken[0] + spoken[1]
    turns = [
        "<tools>add<start>user\nhi",
        "<start>assistant\n<call>add",
        "<start>tool\n4",
        "<start>assistant\nfour<end>",
    ]
    assert whole(sample, coder) == "<end>\n".join(turns)
    (rendered,) = chat_samples(messages, coder, tools=tools)  # the tool call stays in the history
    assert rendered.input_ids.tolist() == sample.input_ids.tolist() and rendered.mask.tolist() == sample.mask.tolist()


def test_recorded_ids_win_over_the_text():
    """The sampler spelled 'yo' as two tokens where the tokenizer merges them: no re-tokenisation."""
    coder = tokenizer(merges=[("y", "o")])
    assert len(coder("yo", add_special_tokens=False)["input_ids"]) == 1
    letters = [coder.convert_tokens_to_ids(letter) for letter in "yo"]
    spoken = [*letters, coder.eos_token_id]
    (sample,) = chat_samples([*DIALOGUE[:2], DIALOGUE[2] | {"token_ids": spoken}, *DIALOGUE[3:]], coder)
    assert sample.target_ids[sample.mask > 0].tolist()[:3] == spoken
    assert whole(sample, coder) == whole(chat_samples(DIALOGUE, coder)[0], coder)


def test_l6_an_end_token_of_the_template_is_not_trained_on():
    """A turn cut at the limit, then another: the template's end token has mask 0, and log-prob 0 is not trained on."""
    coder = tokenizer()
    cut = coder("yo", add_special_tokens=False)["input_ids"]
    ids = coder("ciao<end>", add_special_tokens=False)["input_ids"]
    messages = [
        *DIALOGUE[:2],
        DIALOGUE[2] | {"token_ids": cut, "logprobs": [-1.0] * len(cut)},
        DIALOGUE[3],
        DIALOGUE[4] | {"token_ids": ids, "logprobs": [-2.0] * len(ids)},
    ]
    (sample,) = chat_samples(messages, coder)
    assert told(sample, coder) == "yociao<end>" and "yo<end>\n" in whole(sample, coder)
    assert (sample.fields["old_logprob"][sample.mask > 0] < 0).all()
    assert (sample.fields["old_logprob"][sample.mask == 0] == 0).all()  # E5: aligned, with a defined filler
    assert len(sample.fields["old_logprob"]) == len(sample)


def test_l7_l10_masks_come_from_lengths():
    """A pad id equal to the end id inside a turn, twice; a turn without an end token: all as recorded."""
    coder = tokenizer(pad_token="<end>")
    assert coder.pad_token_id == coder.eos_token_id
    end = coder.eos_token_id
    letters = coder("a", add_special_tokens=False)["input_ids"]
    spoken = [*letters, end, *letters, end, *letters]
    (sample,) = chat_samples([*DIALOGUE[:2], {"role": "assistant", "content": "?", "token_ids": spoken}], coder)
    assert sample.target_ids[sample.mask > 0].tolist() == spoken
    (plain,) = chat_samples(DIALOGUE[:3], coder)
    assert plain.target_ids[-1] == end and plain.mask[-1] == 1  # L10: the real end token is trained on


def test_m3_a_template_that_drops_reasoning_is_refused_or_forked():
    coder = tokenizer(STRIPS)
    messages = [DIALOGUE[1], {"role": "assistant", "content": "<think>hm</think>yo"}, DIALOGUE[3], DIALOGUE[4]]
    with pytest.raises(UserError, match=r"message 3: the prompt of this turn does not extend.*rewrite='fork'"):
        chat_samples(messages, coder)
    first, second = chat_samples(messages, coder, rewrite="fork", group="g")
    assert told(first, coder) == "<think>hm</think>yo<end>" and told(second, coder) == "ciao<end>"
    assert "hm" not in whole(second, coder) and first.group == second.group == "g"
    assert len(chat_samples(messages, tokenizer(TURNS), rewrite="fork")) == 1  # nothing rewritten, nothing forked


def test_recorded_prompts_decide_whether_a_turn_extends():
    coder = tokenizer()
    prompt = coder("<start>user\nhi<end>\n<start>assistant\n", add_special_tokens=False)["input_ids"]
    said = coder("yo<end>", add_special_tokens=False)["input_ids"]
    between = coder("\n<start>user\nbye<end>\n<start>assistant\n", add_special_tokens=False)["input_ids"]
    first = {"role": "assistant", "content": "yo", "prompt_ids": prompt, "token_ids": said}
    second = {"role": "assistant", "content": "ciao", "prompt_ids": prompt + said + between, "token_ids": said}
    (sample,) = chat_samples([DIALOGUE[1], first, DIALOGUE[3], second], coder)
    assert [*sample.input_ids.tolist(), said[-1]] == prompt + said + between + said
    other = second | {"prompt_ids": [*prompt[1:], *said, *between]}
    with pytest.raises(UserError, match="does not extend"):
        chat_samples([DIALOGUE[1], first, DIALOGUE[3], other], coder)
    assert len(chat_samples([DIALOGUE[1], first, DIALOGUE[3], other], coder, rewrite="fork")) == 2


def test_g17_no_padding_side_matters():
    left, right = (
        chat_samples(DIALOGUE, tokenizer(padding_side=side, pad_token="<end>"))[0] for side in ("left", "right")
    )
    assert left.input_ids.tolist() == right.input_ids.tolist() and left.mask.tolist() == right.mask.tolist()


def test_media_come_in_the_order_of_their_placeholders():
    coder = tokenizer()
    content = [
        {"type": "image", "image": "a.png"},
        {"type": "text", "text": "or"},
        {"type": "image", "image": Image("b.png")},
    ]
    (sample,) = chat_samples([{"role": "user", "content": content}, DIALOGUE[2]], coder, processor=coder)
    assert [str(item.source) for item in sample.media] == ["a.png", "b.png"]
    assert (sample.input_ids == coder.convert_tokens_to_ids("<image>")).sum() == 2
    with pytest.raises(UserError, match="'image_url' parts are not fetched"):
        chat_samples([{"role": "user", "content": [{"type": "image_url", "text": ""}]}, DIALOGUE[2]], coder)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"content": "x"}], "message 0"),
        ([DIALOGUE[1], DIALOGUE[2] | {"token_ids": "yo"}], "list of token ids"),
        (
            [DIALOGUE[1], DIALOGUE[2] | {"token_ids": [1, 2], "logprobs": [0.1]}],
            "one number for each of its 2 token_ids",
        ),
        (
            [DIALOGUE[1], DIALOGUE[2] | {"token_ids": [7], "logprobs": [-0.1]}, DIALOGUE[3], DIALOGUE[4]],
            "1 of 2 trained",
        ),
    ],
)
def test_bad_dialogues_are_refused(messages, words):
    with pytest.raises(UserError) as caught:
        chat_samples(messages, tokenizer())
    assert words in str(caught.value), str(caught.value)


def test_a_generation_prompt_that_the_turn_does_not_follow_is_refused():
    template = TURNS.replace("<start>assistant\n{% endif %}", "<start>assistant\n<think>{% endif %}")
    with pytest.raises(UserError, match=r"message 2: rendered with its assistant turn.*template_settings"):
        chat_samples(DIALOGUE[:3], tokenizer(template))
