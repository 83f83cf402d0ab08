"""Text from a model."""

import copy
from collections import Counter
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from tputrain import sampling
from tputrain.callbacks.sample_text import SampleConfig, SampleText
from tputrain.data import Tokenizer
from tputrain.errors import UserError
from tputrain.models.llama import Llama, LlamaConfig
from tputrain.sampling import Speed, generate, printable, why_silent

TEXT = "abcdefghijklmnopqrstuvwxyz" * 4


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([TEXT], 257)


class NextLetter(nn.Module):
    """After each token, a preference for the one with the next id; notes the shapes it is called with."""

    def __init__(self, strength: float):
        super().__init__()
        self.strength = nn.Parameter(torch.tensor(strength))
        self.shapes = set()

    def forward(self, ids):
        self.shapes.add(tuple(ids.shape))
        return self.strength * nn.functional.one_hot((ids + 1) % 300, 300).float()


def test_the_prompt_is_continued(tokenizer):
    assert generate(NextLetter(20.0), tokenizer, "abc", max_new_tokens=5, temperature=0) == "abcdefgh"


def test_every_call_of_the_model_has_one_shape_also_past_the_window(tokenizer):
    model = NextLetter(20.0)
    text = generate(model, tokenizer, "a", max_new_tokens=20, temperature=0, window=8)
    assert text == TEXT[:21]
    assert model.shapes == {(1, 8)}


def test_the_same_seed_gives_the_same_text(tokenizer):
    texts = [generate(NextLetter(0.0), tokenizer, "a", 30, seed=seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_top_k_leaves_only_the_likeliest(tokenizer):
    assert generate(NextLetter(0.5), tokenizer, "abc", 5, temperature=5.0, top_k=1) == "abcdefgh"


def test_ids_that_the_tokenizer_lacks_are_never_drawn(tokenizer):
    generate(NextLetter(0.0), tokenizer, "a", 200, temperature=1.0, top_k=None)


def test_generation_ends_with_the_document_and_leaves_the_mode_as_it_was(tokenizer):
    class Ends(NextLetter):
        def forward(self, ids):
            assert not self.training
            return 20.0 * nn.functional.one_hot(torch.full_like(ids, tokenizer.end_of_text_id), 300).float()

    model = Ends(0.0).train()
    assert generate(model, tokenizer, "abc", 5) == "abc"
    assert model.training


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"temperature": -1}, "temperature=-1"), ({"top_k": 0}, "top_k=0: expected at least 1")],
)
def test_impossible_arguments_are_one_clear_line(arguments, message, tokenizer):
    with pytest.raises(UserError, match=message):
        generate(NextLetter(0.0), tokenizer, "a", 1, **arguments)


@pytest.fixture(scope="module")
def llama():
    config = LlamaConfig(300, 32, 64, 2, 4, 2, 8, 256, tie_word_embeddings=True)
    torch.manual_seed(0)
    model = Llama(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("temperature", [0, 0.9])
@pytest.mark.parametrize("window", [128, 40])
def test_with_a_cache_the_text_is_that_of_whole_windows(llama, tokenizer, window, temperature, monkeypatch):
    def written() -> str:
        return generate(llama, tokenizer, "abc", 64, temperature, top_k=None, window=window)

    cached = written()
    monkeypatch.delattr(Llama, "new_cache")
    assert written() == cached


def test_on_tpu_a_token_is_one_program_however_long_the_text_is(llama, tokenizer):
    expected = generate(llama, tokenizer, "abc", 70, temperature=0)
    model = copy.deepcopy(llama).to("tpu")
    before = torch.tpu.compile_stats()["compilations"]
    assert generate(model, tokenizer, "abc", 70, temperature=0) == expected
    assert torch.tpu.compile_stats()["compilations"] - before <= 3


PROMPTS = {3: "abc", 60: TEXT[:60], 100: TEXT[:100]}  # with the token before a text: 4, 61 and 101


@pytest.mark.parametrize("max_new_tokens", [8, 70])
@pytest.mark.parametrize("length", PROMPTS)
def test_a_short_text_in_a_long_window_is_that_of_the_whole_window(
    llama, tokenizer, length, max_new_tokens, monkeypatch
):
    sizes: Counter[int] = Counter()
    llama.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.update([args[0].shape[1]]), with_kwargs=True
    )

    def written() -> str:
        sizes.clear()
        return generate(llama, tokenizer, PROMPTS[length], max_new_tokens, 0.9, top_k=None, window=256)

    short = written()
    if max_new_tokens == 8:  # without a cache
        assert set(sizes) == {128 if length > 50 else 64}
    else:
        assert {size for size in sizes if size != 1} == {128 if length > 63 else 64}
    monkeypatch.setattr(sampling, "_SMALLEST", 256)
    assert written() == short
    assert {size for size in sizes if size != 1} == {256}


def test_on_tpu_prompts_share_few_programs(llama, tokenizer):
    model = copy.deepcopy(llama).to("tpu")

    def compilations(prompt: str) -> int:
        before = torch.tpu.compile_stats()["compilations"]
        generate(model, tokenizer, prompt, 64, temperature=0, window=256)
        return torch.tpu.compile_stats()["compilations"] - before

    compilations("abc")
    assert compilations("xyzabc") == 0
    assert compilations(TEXT[:60]) == 0
    assert compilations(TEXT[:100]) <= 1  # another prefill, and the same program for each further token


@pytest.mark.parametrize("max_new_tokens", [8, 64])
def test_the_speed_of_a_text_has_no_compilation(llama, tokenizer, max_new_tokens):
    model = copy.deepcopy(llama).to("tpu")
    expected = generate(llama, tokenizer, "abc", max_new_tokens, temperature=0)
    speed = Speed()
    assert generate(model, tokenizer, "abc", max_new_tokens, temperature=0, speed=speed) == expected
    assert speed.num_given == len(tokenizer.encode("abc")) + 1
    (size,) = speed.seconds
    assert size == (1 if max_new_tokens >= 64 else 64)
    seconds = speed.seconds[size]
    assert len(seconds) == max_new_tokens - 1
    assert f" tokens/s (by {len(seconds) - 1} tokens whose calls compiled nothing)" in speed.said
    assert speed.said.startswith(f"prefill {speed.num_given} tokens, ")


def test_a_text_too_short_to_measure_says_so(tokenizer):
    generate(NextLetter(20.0), tokenizer, "a", 1, speed=(speed := Speed()))
    assert speed.said.endswith("; decoding not measured, as each call may have compiled")


def test_control_characters_of_a_sample_do_not_reach_the_terminal():
    assert printable("a\tb\nc\x08\x1b[2Jé\x85") == "a\tb\nc\\x08\\x1b[2Jé\\x85"


class NeedsLabels(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, input_ids, labels, **others):
        raise AssertionError("not called")


class GivesLoss(NeedsLabels):
    def forward(self, input_ids, labels=None, **others):
        return self.weight.sum()


class GivesDict(NextLetter):
    def forward(self, input_ids, labels=None, **others):
        return {"logits": super().forward(input_ids)}


def test_a_model_that_does_not_give_logits_of_token_ids_is_told_what_is_expected(tokenizer):
    assert generate(GivesDict(20.0), tokenizer, "abc", 3, temperature=0) == "abcdef"
    needs = "NeedsLabels.forward cannot be called with token ids alone: .*'labels'; expected logits of shape"
    with pytest.raises(UserError, match=needs):
        generate(NeedsLabels(), tokenizer, "abc", 3)
    with pytest.raises(
        UserError, match=r"GivesLoss gave a tensor of \[\] for token ids alone: expected logits"
    ):
        generate(GivesLoss(), tokenizer, "abc", 3)
    assert why_silent(NextLetter(1.0)) is None


def test_a_run_whose_model_gives_no_logits_goes_on_without_samples(tokenizer, capsys):
    trainer = MagicMock()
    trainer.execution.model = GivesLoss()
    sample = SampleText(tokenizer, SampleConfig(), window=8)
    for _ in range(2):
        sample.on_evaluate(trainer, {})
    assert capsys.readouterr().out.count("no samples: GivesLoss gave a tensor of []") == 1
