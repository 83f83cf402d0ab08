"""Conversations as tokens, and which of them are learned: the answers."""

import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tputrain.data.config import DataError
from tputrain.data.pretrained_tokenizer import PretrainedTokenizer
from tputrain.data.rows import ANSWERS
from tputrain.data.tokenizer import Tokenizer

Message = dict[str, str]


def encode_conversations(
    texts: Sequence[str], tokenizer: Tokenizer
) -> tuple[list[list[int]], list[np.ndarray]]:
    """Token ids of each conversation (JSON, as `rows.read_documents` gives them), and which are learned
    (bool).

    By the tokenizer's chat template where it has one: what it writes from where an answer begins up to the
    end of that message is learned, the sign to stop included. Else a message is a line `role: content`, and
    an answer ends with the end-of-text token, which is learned too.
    """
    encoded = [_encode(json.loads(text), tokenizer) for text in texts]
    return [ids for ids, _ in encoded], [learned for _, learned in encoded]


class Beginning(NamedTuple):
    """How a text begins that a model is to go on with."""

    ids: list[int]
    shown: str
    """What people read of it."""
    ends: frozenset[int]
    """Tokens that end what the model writes, beside the end-of-text token."""


def beginning(prompt: str, tokenizer: Tokenizer, in_conversation: bool) -> Beginning:
    """A text that begins with `prompt`, as training has it.

    In conversations that a chat template writes, `prompt` is what a user says and the model answers; if it
    spells out special tokens, it is the conversation up to where the model goes on.
    """
    if not (in_conversation and isinstance(tokenizer, PretrainedTokenizer) and tokenizer.has_chat_template):
        return Beginning([tokenizer.start_of_text_id, *tokenizer.encode(prompt)], prompt, frozenset())
    ends = _ends_of_answers(tokenizer)
    ids = tokenizer.encode_rendered(prompt).ids
    if ids != tokenizer.encode(prompt):
        return Beginning(ids, prompt, ends)
    asked = tokenizer.render([{"role": "user", "content": prompt}], asks=True)
    return Beginning(tokenizer.encode_rendered(asked).ids, f"{prompt}\n", ends)


def _ends_of_answers(tokenizer: PretrainedTokenizer) -> frozenset[int]:
    """The special token that the chat template writes behind an answer; none where that cannot be told."""
    question, answer = ({"role": role, "content": "a"} for role in ("user", ANSWERS))
    asked, whole = tokenizer.render([question], asks=True), tokenizer.render([question, answer])
    behind = whole[len(asked) :] if whole.startswith(asked) else ""
    special = [each for each in tokenizer.encode_rendered(behind).ids if tokenizer.is_special(each)]
    return frozenset(special[:1])


def spoken(text: str) -> str:
    """What a conversation (JSON) is made of, without its form: the text that a vocabulary is learned from."""
    return "\n".join(f"{message['role']}: {message['content']}" for message in json.loads(text))


def _encode(messages: list[Message], tokenizer: Tokenizer) -> tuple[list[int], np.ndarray]:
    if isinstance(tokenizer, PretrainedTokenizer) and tokenizer.has_chat_template:
        return _by_template(messages, tokenizer)
    return _by_line(messages, tokenizer)


def _by_line(messages: list[Message], tokenizer: Tokenizer) -> tuple[list[int], np.ndarray]:
    ids, learned = [tokenizer.start_of_text_id], [False]
    for message in messages:
        is_answer = message["role"] == ANSWERS
        # The space belongs to the answer: a prompt that ends in one would be other tokens.
        opening = tokenizer.encode(f"{message['role']}:")
        content = tokenizer.encode(f" {message['content']}")
        closing = [tokenizer.end_of_text_id] if is_answer else tokenizer.encode("\n")
        ids += opening + content + closing
        learned += [False] * len(opening) + [is_answer] * (len(content) + len(closing))
    return ids, np.array(learned)


def _by_template(messages: list[Message], tokenizer: PretrainedTokenizer) -> tuple[list[int], np.ndarray]:
    whole = tokenizer.render(messages)
    encoding = tokenizer.encode_rendered(whole)
    starts = np.array([start for start, _ in encoding.offsets], dtype=np.int64)
    learned = np.zeros(len(starts), dtype=bool)
    for number, message in enumerate(messages):
        if message["role"] != ANSWERS:
            continue
        begins = _length_of_prefix(tokenizer.render(messages[:number], asks=True), whole)
        ends = _length_of_prefix(tokenizer.render(messages[: number + 1]), whole)
        learned |= (starts >= begins) & (starts < ends)
    return encoding.ids, learned


def _length_of_prefix(part: str, whole: str) -> int:
    if not whole.startswith(part):
        raise DataError(
            "data.tokenizer: its chat template writes earlier messages differently once later ones follow, "
            "so where answers begin cannot be told: give conversations of one answer, or another template"
        )
    return len(part)
