"""A directory with our config, weights and tokenizer is one that `transformers` reads, with equal results."""

import dataclasses

import pytest
import torch
from safetensors.torch import save_file

from tputrain.data import Tokenizer
from tputrain.models import Llama, LlamaConfig, initialize
from tputrain.models.llama import RopeScaling

TEXT = "def train(model, data):\n    for batch in data:\n        model(batch)\n" * 3

SMALL = LlamaConfig(
    vocab_size=300,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,  # not hidden_size / num_attention_heads, on purpose
    max_position_embeddings=128,
)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False, "rope_theta": 500_000.0, "rms_norm_eps": 1e-6},
        # A short original context, so that stretched, blended and kept rotations all occur.
        {"rope_scaling": RopeScaling(factor=8.0, original_max_position_embeddings=64)},
    ],
    ids=["tied", "untied", "stretched"],
)
def test_transformers_gives_equal_logits(changes, tmp_path):
    from transformers import AutoModelForCausalLM

    model = Llama(dataclasses.replace(SMALL, **changes)).eval()
    initialize(model, seed=0)
    model.save_config(tmp_path)
    save_file(model.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})

    theirs, loading = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading.values()), loading
    ids = torch.randint(0, 300, (2, 100), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), theirs.eval()(ids).logits, atol=1e-5, rtol=0)
    assert theirs.generation_config.eos_token_id == 0


@pytest.mark.parametrize("rope", [None, RopeScaling(factor=32.0)])
def test_saved_configs_say_what_transformers_understands(rope, tmp_path):
    from transformers import AutoConfig

    with torch.device("meta"):
        Llama(dataclasses.replace(SMALL, rope_scaling=rope, rope_theta=5e5)).save_config(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.model_type == "llama"
    assert config.rope_parameters["rope_theta"] == 5e5
    assert config.rope_parameters["rope_type"] == ("llama3" if rope else "default")
    assert (config.head_dim, config.num_key_value_heads, config.eos_token_id) == (16, 2, 0)


def test_transformers_tokenizes_as_we_do(tmp_path):
    from transformers import AutoTokenizer

    ours = Tokenizer.train([TEXT], 300)
    ours.save(tmp_path)
    initialize(model := Llama(SMALL), seed=0)
    model.save_config(tmp_path)  # model_type must not lure AutoTokenizer away from our files
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in (TEXT, "naïve 🙂\t\r\n  x ,.y", " lead"):
        assert theirs(text).input_ids == [ours.end_of_text_id, *ours.encode(text)]
        assert theirs.decode(theirs(text).input_ids, skip_special_tokens=True) == text
    assert theirs.bos_token == theirs.eos_token == "<|endoftext|>"
    assert theirs.eos_token_id == ours.end_of_text_id
    assert len(theirs) == ours.vocab_size


def test_a_saved_tokenizer_loads_back(tmp_path):
    ours = Tokenizer.train([TEXT], 300)
    ours.save(tmp_path)
    assert Tokenizer.load(tmp_path).encode(TEXT) == ours.encode(TEXT)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.load(tmp_path)
