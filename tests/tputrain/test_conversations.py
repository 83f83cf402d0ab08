"""Conversations: what of them is learned, by hand-written tokens; and any Hugging Face tokenizer."""

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tputrain.data import (
    DataConfig,
    DataError,
    PretrainedTokenizer,
    Tokenizer,
    check_vocabulary,
    load_tokenizer,
)
from tputrain.data.conversations import beginning, encode_conversations

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "Schön, and 3 + 3?"},
    {"role": "assistant", "content": "six 🙂"},
]


def byte_level(template: str | None = None, **special) -> PreTrainedTokenizerFast:
    """As GPT-2's: byte-level BPE, without merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    backend = Backend(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    given = {"bos_token": "<s>", "eos_token": "</s>", **special}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **given)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[2:]})
    return tokenizer


def pieces() -> PreTrainedTokenizerFast:
    """As Llama 2's: pieces with "▁" for a space, and bytes for what is no piece."""
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    tokens += ["▁", "h", "e", "he", "▁he", "y", "▁hey", "é"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Backend(
        models.BPE(
            vocabulary,
            [("h", "e"), ("▁", "he"), ("▁he", "y")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """A directory to be in, with tokenizers and conversations."""
    monkeypatch.chdir(tmp_path)
    byte_level(TEMPLATE).save_pretrained("templated")
    byte_level().save_pretrained("plain")
    pieces().save_pretrained("pieces")
    byte_level(eos_token=None).save_pretrained("endless")
    with open("chats.jsonl", "w") as file:
        for number in range(40):
            messages = [
                {"role": "user", "content": f"What is {number} + {number}?"},
                {"role": "assistant", "content": f"It is {2 * number}."},
            ]
            row = {"messages": messages, "q": messages[0]["content"], "a": messages[1]["content"]}
            file.write(json.dumps(row) + "\n")
    return tmp_path


def build(**changes):
    settings = {"source": "jsonl", "files": "chats.jsonl", "format": "messages", "sequence_length": 32}
    cfg = DataConfig(**{**settings, "cache_dir": "cache", "vocab_size": 300, **changes})
    return cfg.build(0, announce=lambda line: None)


def learned_text(tokenizer, ids, learned) -> list[str]:
    """The runs of learned tokens, as text with special tokens in it."""
    runs: list[list[int]] = []
    for place, index in enumerate(ids):
        if learned[place]:
            if place == 0 or not learned[place - 1]:
                runs.append([])
            runs[-1].append(index)
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


def test_of_a_templated_conversation_the_answers_and_their_ends_are_learned_and_nothing_else():
    tokenizer = PretrainedTokenizer.load("templated")
    (ids,), (learned,) = encode_conversations([json.dumps(CONVERSATION)], tokenizer)
    plain = AutoTokenizer.from_pretrained("templated")
    assert ids == plain.apply_chat_template(CONVERSATION, return_dict=False)
    assert [text.rstrip("\n") for text in learned_text(plain, ids, learned)] == [
        "four<|end|>",
        "six 🙂<|end|>",
    ]


@pytest.mark.parametrize("kind", ["plain", "trained"])
def test_without_a_template_a_message_is_a_line_and_an_answer_ends_with_end_of_text(kind):
    tokenizer = PretrainedTokenizer.load("plain")
    if kind == "trained":
        tokenizer = Tokenizer.train(["What is four?"], 260)
    (ids,), (learned,) = encode_conversations([json.dumps(CONVERSATION[1:])], tokenizer)
    assert ids[0] == tokenizer.start_of_text_id
    assert tokenizer.decode(ids) == (
        "user: What is 2 + 2?\nassistant: fouruser: Schön, and 3 + 3?\nassistant: six 🙂"
    )
    runs = np.split(np.flatnonzero(learned), np.flatnonzero(np.diff(np.flatnonzero(learned)) > 1) + 1)
    assert [tokenizer.decode([ids[place] for place in run]) for run in runs] == [" four", " six 🙂"]
    assert [ids[run[-1]] for run in runs] == [tokenizer.end_of_text_id] * 2


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("columns", [{}, {"format": "prompt", "prompt_column": "q", "answer_column": "a"}])
def test_labels_are_the_answers_tokens_alone(layout, columns):
    data = build(tokenizer="templated", layout=layout, sequence_length=64, validation_fraction=0.2, **columns)
    end = data.tokenizer.encode_rendered("<|end|>").ids[0]
    answers = set()
    for step in range(8):
        batch = data.train.batch_at(step, 0, 4)
        labels, following = batch["labels"], batch["input_ids"].roll(-1, dims=1)
        inside = (labels != -100) & (torch.arange(labels.shape[1]) < labels.shape[1] - 1)
        assert torch.equal(labels[inside], following[inside])
        for row in labels.tolist():
            text = [index for index in row if index != -100]
            cut = [place for place, index in enumerate(text) if index == end]
            for first, last in zip([0, *[place + 1 for place in cut]], cut):
                answers.add(data.tokenizer.decode(text[first:last]).strip("\n"))
    whole = {f"It is {2 * number}." for number in range(40)}
    assert len(answers & whole) >= 10
    assert all(any(one.endswith(answer) for one in whole) for answer in answers)


def test_a_template_that_rewrites_earlier_messages_is_one_clear_line():
    last_only = "{% for m in messages %}{% if loop.last %}{{ m.content }}{% else %}-{% endif %}{% endfor %}"
    byte_level(last_only).save_pretrained("rewriting")
    with pytest.raises(DataError, match="writes earlier messages differently") as caught:
        encode_conversations([json.dumps(CONVERSATION)], PretrainedTokenizer.load("rewriting"))
    assert "\n" not in str(caught.value)


def test_a_template_that_refuses_a_role_is_one_clear_line():
    byte_level("{{ raise_exception('no system messages') }}").save_pretrained("refusing")
    with pytest.raises(DataError, match=r"refuses messages of the roles system, user, .*no system"):
        encode_conversations([json.dumps(CONVERSATION)], PretrainedTokenizer.load("refusing"))


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", r"/bad.jsonl, line 1, column messages: 'hello': expected a list of \{role, content\}"),
        ([{"role": "user"}], r"line 1, .*expected a list of \{role, content\}, both text"),
        ([{"role": "user", "content": "hi"}], "line 1, .*expected a message of role assistant to learn"),
    ],
)
def test_a_malformed_conversation_is_one_clear_line(directory, messages, message):
    (directory / "bad.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    with pytest.raises(DataError, match=message):
        build(files="bad.jsonl")


def test_a_malformed_conversation_is_named_by_its_file_and_line(directory):
    good, bad = (
        json.dumps({"messages": [{"role": role, "content": "hi"}]}) for role in ("assistant", "user")
    )
    (directory / "many-a.jsonl").write_text(f"{good}\n\n{good}\n")
    (directory / "many-b.jsonl").write_text(f"{good}\n\n{bad}\n")
    for streaming in (False, True):
        with pytest.raises(
            DataError, match=r"/many-b.jsonl, line 3, column messages: .*role assistant to lea"
        ):
            build(files="many-?.jsonl", streaming=streaming)


@pytest.mark.parametrize("name", ["templated", "plain", "pieces"])
def test_a_saved_pretrained_tokenizer_is_the_same_and_loads_elsewhere(name, directory):
    tokenizer = PretrainedTokenizer.load(name)
    (directory / "again").mkdir()
    tokenizer.save("again")
    again = load_tokenizer("again")
    assert again.digest() == tokenizer.digest()
    assert again.encode_documents(["hey hé"]) == tokenizer.encode_documents(["hey hé"])
    elsewhere = AutoTokenizer.from_pretrained("again")
    assert elsewhere.get_vocab() == AutoTokenizer.from_pretrained(name).get_vocab()
    assert elsewhere.chat_template == AutoTokenizer.from_pretrained(name).chat_template


@pytest.mark.parametrize("name", ["plain", "pieces"])
def test_documents_are_opened_and_closed_and_a_spelled_special_token_stays_text(name):
    tokenizer = PretrainedTokenizer.load(name)
    (ids,) = tokenizer.encode_documents(["hey </s> hé"])
    assert (ids[0], ids[-1]) == (tokenizer.start_of_text_id, tokenizer.end_of_text_id)
    assert ids.count(tokenizer.end_of_text_id) == 1
    assert tokenizer.decode(ids) == "hey </s> hé"


@pytest.mark.parametrize("name", ["plain", "pieces"])
def test_the_bytes_of_tokens_add_up_to_the_bytes_of_the_text(name):
    tokenizer = PretrainedTokenizer.load(name)
    text = "hey hé 🙂"
    (ids,) = tokenizer.encode_documents([text])
    # A tokenizer of pieces begins with a space that is not in the text.
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode()) + (name == "pieces")


def test_a_named_tokenizer_is_used_and_its_tokens_are_cached(monkeypatch):
    first = build(tokenizer="templated")
    assert isinstance(first.tokenizer, PretrainedTokenizer)
    assert "Hugging Face's" in first.describe()[1]
    monkeypatch.setattr("tputrain.data.token_cache._build", None)
    assert build(tokenizer="templated").fingerprint == first.fingerprint
    cfg = DataConfig(
        source="jsonl",
        files="chats.jsonl",
        format="messages",
        sequence_length=32,
        cache_dir="cache",
        vocab_size=300,
        tokenizer="templated",
    )
    again = cfg.build(0, tokenizer=first.tokenizer, expected=first.fingerprint)
    assert again.fingerprint == first.fingerprint


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("templatd", "data.tokenizer=templatd: no tokenizer there: .*; did you mean templated"),
        ("chats.jsonl", "data.tokenizer=chats.jsonl: no tokenizer there: "),
        ("endless", "data.tokenizer=endless: it has no eos_token"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_one_clear_line(monkeypatch, name, message):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=message) as caught:
        build(tokenizer=name)
    assert "\n" not in str(caught.value)


def test_a_vocabulary_that_the_model_lacks_is_one_clear_line():
    tokenizer = PretrainedTokenizer.load("plain")
    assert tokenizer.vocab_size == 262
    check_vocabulary(tokenizer, 262)
    with pytest.raises(
        DataError, match=r"model.vocab_size=200: expected at least the tokenizer's 262 entries"
    ):
        check_vocabulary(tokenizer, 200)


def test_a_prompt_of_a_chat_model_begins_as_its_conversations_do() -> None:
    tokenizer = PretrainedTokenizer(byte_level(TEMPLATE))
    asked = {"role": "user", "content": "2 + 2?"}
    (whole,), _ = encode_conversations(
        [json.dumps([asked, {"role": "assistant", "content": "4"}])], tokenizer
    )
    ids, shown, ends = beginning("2 + 2?", tokenizer, in_conversation=True)
    assert ids == whole[: len(ids)]
    assert whole[len(ids) :][:1] == tokenizer.encode("4")
    assert shown == "2 + 2?\n"
    spelled = "<s><|user|>2 + 2?<|end|>\n<|assistant|>"
    assert beginning(spelled, tokenizer, in_conversation=True) == (ids, spelled, ends)
    assert ends == {tokenizer.encode_rendered("<|end|>").ids[0]}


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_a_prompt_of_any_other_model_is_the_beginning_of_a_document(template: str | None) -> None:
    tokenizer = PretrainedTokenizer(byte_level(template))
    begins = [tokenizer.start_of_text_id, *tokenizer.encode("<s>a")]
    assert beginning("<s>a", tokenizer, in_conversation=template is None) == (begins, "<s>a", set())
