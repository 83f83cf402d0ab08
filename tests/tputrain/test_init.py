"""Initial values: pinned, because everything that was ever trained starts from them."""

import math

import numpy as np
import pytest
import torch

from tputrain.models import Llama, ModelConfig, initialize
from tputrain.models.init import initial_value, standard_normal
from tputrain.models.llama import LLAMA_CONFIGS


def hexes(values) -> list[str]:
    return [float(value.item()).hex() for value in values]


def test_values_are_pinned_to_the_bit():
    assert hexes(standard_normal(0, "model.norm.weight", 0, 3)) == [
        "-0x1.0cea0c3748246p+1",
        "-0x1.8cb9b926665bap-1",
        "-0x1.73d5a80df1b43p-1",
    ]
    weight = initial_value(1234, "model.layers.0.mlp.up_proj.weight", (4, 3), 0.02)
    assert weight.dtype == torch.float32
    assert hexes(weight.flatten()[[0, 5, 11]]) == [
        "-0x1.cb7b380000000p-7",
        "0x1.aa96340000000p-8",
        "0x1.3943a00000000p-5",
    ]


@pytest.mark.parametrize(
    ("tied", "embedding"), [(True, "0x1.4544060000000p-8"), (False, "0x1.fc3a480000000p-3")]
)
def test_a_model_s_values_are_pinned(tied, embedding):
    model = ModelConfig(num_hidden_layers=5, tie_word_embeddings=tied).build_empty()
    initialize(model, seed=7)
    values = dict(model.named_parameters())
    found = [
        values["model.embed_tokens.weight"][4095, 255],
        values["model.layers.0.self_attn.o_proj.weight"][0, 0],
    ]
    assert hexes(found) == [embedding, "0x1.44533c0000000p-9"]


@pytest.mark.parametrize("shape", [(10, 7), (10, 8), (10, 3, 5), (10,)])
@pytest.mark.parametrize("rows", [slice(0, 4), slice(3, 4), slice(5, 10), slice(9, 10), slice(4, 4)])
def test_rows_alone_equal_rows_of_the_whole(shape, rows):
    whole = initial_value(3, "name", shape, 0.02)
    assert torch.equal(initial_value(3, "name", shape, 0.02, rows), whole[rows])


def test_any_stretch_of_the_stream_is_reached_alone():
    stream = standard_normal(5, "name", 0, 100)
    for start in (0, 1, 2, 51, 98):
        assert np.array_equal(standard_normal(5, "name", start, 100 - start), stream[start:])


def test_chunks_do_not_show(monkeypatch):
    whole = initial_value(3, "name", (50, 3), 0.02)
    monkeypatch.setattr("tputrain.models.init._CHUNK", 7)
    assert torch.equal(initial_value(3, "name", (50, 3), 0.02), whole)


def test_values_depend_on_the_seed_and_the_name_and_on_nothing_else():
    value = initial_value(0, "a", (5, 5), 1.0)
    torch.manual_seed(1)
    np.random.seed(1)
    assert torch.equal(initial_value(0, "a", (5, 5), 1.0), value)
    assert not torch.equal(initial_value(1, "a", (5, 5), 1.0), value)
    assert not torch.equal(initial_value(0, "b", (5, 5), 1.0), value)
    assert torch.equal(initial_value(-1, "a", (5, 5), 1.0), initial_value(2**64 - 1, "a", (5, 5), 1.0))


def test_the_distribution_is_normal():
    values = standard_normal(0, "w", 0, 1_000_000)
    assert abs(values.mean()) < 4e-3
    assert values.std() == pytest.approx(1, abs=4e-3)
    assert (values**4).mean() == pytest.approx(2.98, abs=0.03)
    ordered = np.sort(values)
    probabilities = (np.arange(len(ordered)) + 0.5) / len(ordered)
    expected = 0.5 * (1 + torch.erf(torch.from_numpy(ordered) / math.sqrt(2)).numpy())
    assert np.abs(expected - probabilities).max() < 2.5e-3


@pytest.mark.parametrize("tied", [True, False])
def test_norms_start_as_ones_and_what_writes_to_the_stream_starts_smaller(tied):
    model = ModelConfig(tie_word_embeddings=tied).build_empty()
    initialize(model, seed=0)
    layers = model.config.num_hidden_layers
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:
            residual = "o_proj" in name or "down_proj" in name
            expected = 0.02 / math.sqrt(2 * layers) if residual else 0.02
            if "embed" in name and not tied:
                expected = 1.0
            assert parameter.std().item() == pytest.approx(expected, rel=0.02)


def test_rounding_to_the_parameter_s_dtype_comes_last():
    full, half = (
        ModelConfig(num_hidden_layers=1).build_empty(),
        ModelConfig(num_hidden_layers=1).build_empty(),
    )
    half.to(torch.bfloat16)
    initialize(full, seed=0)
    initialize(half, seed=0)
    for wide, narrow in zip(full.parameters(), half.parameters()):
        assert torch.equal(wide.to(torch.bfloat16), narrow)


def test_a_model_without_memory_is_refused():
    with torch.device("meta"):
        model = Llama(LLAMA_CONFIGS["llama-5m"])
    with pytest.raises(
        ValueError, match=r"model\.embed_tokens\.weight is on the meta device: call model\.to_empty"
    ):
        initialize(model, seed=0)
