"""The model: sizes, masks, numerics, and that it learns."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, ValidationError

from tputrain.errors import UserError
from tputrain.models import LLAMA_CONFIGS, Llama, LlamaConfig, ModelConfig, initialize

TINY = LlamaConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
)


def tiny(**changes) -> Llama:
    model = Llama(dataclasses.replace(TINY, **changes))
    initialize(model, seed=1)
    return model


def packed_two(first: int, second: int):
    """Random documents of these lengths, side by side in one sequence."""
    ids = torch.randint(0, 96, (1, first + second), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(first), torch.arange(second)])[None]
    documents = torch.cat([torch.zeros(first), torch.ones(second)])[None].long()
    return ids, positions, documents


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-5m", 5_048_576),
        ("llama-20m", 20_356_992),
        ("llama-100m", 100_092_672),
        ("llama-300m", 297_059_328),
        ("llama-1b", 1_235_814_400),  # as published for Llama-3.2-1B
        ("llama-3b", 3_212_749_824),  # Llama-3.2-3B
        ("llama-8b", 8_030_261_248),  # Llama-3.1-8B
        ("llama-70b", 70_553_706_496),  # Llama-3.1-70B
        ("llama-405b", 405_853_388_800),  # Llama-3.1-405B
    ],
)
def test_every_named_model_has_its_parameter_count(name, parameters):
    with torch.device("meta"):
        model = ModelConfig(name=name).build_empty()
        assert sum(parameter.numel() for parameter in model.parameters()) == parameters
        logits = model(torch.zeros(2, 16, dtype=torch.long))
    assert logits.shape == (2, 16, LLAMA_CONFIGS[name].vocab_size)


def test_all_named_models_are_counted_above():
    assert len(LLAMA_CONFIGS) == 9


def test_a_document_packed_behind_another_gets_the_logits_it_gets_alone():
    model = tiny()
    ids, positions, documents = packed_two(7, 9)
    packed = model(ids, position_ids=positions, document_ids=documents)
    torch.testing.assert_close(packed[:, :7], model(ids[:, :7]), atol=1e-5, rtol=0)
    torch.testing.assert_close(packed[:, 7:], model(ids[:, 7:]), atol=1e-5, rtol=0)


def test_without_document_ids_the_second_document_sees_the_first():
    model = tiny()
    ids, positions, _ = packed_two(7, 9)
    assert not torch.allclose(model(ids, position_ids=positions)[:, 7:], model(ids[:, 7:]), atol=1e-3)


def test_no_logit_depends_on_a_later_token():
    model = tiny()
    ids = torch.arange(12)[None]
    changed = ids.clone()
    changed[0, 8:] = 90
    torch.testing.assert_close(model(ids)[:, :8], model(changed)[:, :8], atol=0, rtol=0)


def test_the_loss_is_the_mean_over_labels_that_are_not_ignored():
    model = tiny()
    ids, positions, documents = packed_two(5, 6)
    labels = torch.randint(0, 96, ids.shape)
    labels[0, [4, 10]] = -100
    loss = model(ids, labels, positions, documents)
    logits = model(ids, position_ids=positions, document_ids=documents)
    kept = labels != -100
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(logits[kept], labels[kept]))


def test_a_bfloat16_model_gives_a_float32_loss_near_the_float32_one():
    ids = torch.randint(0, 96, (2, 16))
    exact = tiny()(ids, ids)
    rounded = tiny().to(torch.bfloat16)(ids, ids)
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, atol=0.05, rtol=0)


def test_autocast_gives_a_float32_loss_and_float32_gradients():
    model, ids = tiny(), torch.randint(0, 96, (2, 16))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, ids)
    loss.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, model(ids, ids), atol=0.05, rtol=0)
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


def test_the_rotation_frequencies_survive_casts_and_meta():
    model = tiny()
    expected = model.model.rotary.inverse_frequencies.clone()
    cast = tiny().to(torch.bfloat16)
    with torch.device("meta"):
        materialised = Llama(TINY)
    materialised.to_empty(device="cpu")
    for other in (cast, materialised):
        frequencies = other.model.rotary.inverse_frequencies
        assert frequencies.dtype == torch.float32
        assert torch.equal(frequencies, expected)
    initialize(materialised, seed=1)
    ids = torch.arange(10)[None]
    assert torch.equal(materialised(ids), model(ids))


def test_rotation_depends_only_on_distances():
    model = tiny()
    ids = torch.arange(12)[None]
    shifted = model(ids, position_ids=torch.arange(12)[None] + 20)
    torch.testing.assert_close(shifted, model(ids), atol=1e-5, rtol=0)


def test_tied_embeddings_are_one_parameter_with_one_name():
    assert "lm_head.weight" not in tiny().state_dict()
    untied = tiny(tie_word_embeddings=False)
    assert untied.state_dict()["lm_head.weight"].shape == (96, 32)


def test_a_forward_pass_on_a_device_without_data_works():
    """No value is read back on the way: on meta a read would raise."""
    with torch.device("meta"):
        model = Llama(TINY)
        ids = torch.zeros(2, 16, dtype=torch.long)
        loss = model(ids, ids, ids, ids)
    loss.backward()
    assert loss.shape == ()


def test_a_tiny_model_learns_a_repeated_text_by_heart():
    model = tiny()
    ids = torch.tensor(list(b"to be or not to be, that is it. "))[None] % 96
    labels = ids.roll(-1, dims=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    first = model(ids, labels).item()
    for _ in range(120):
        loss = model(ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert abs(first - 4.56) < 0.3  # ln(96)
    assert loss.item() < 0.1


def test_the_first_loss_of_the_default_model_is_that_of_a_uniform_guess():
    model = ModelConfig().build_empty()
    initialize(model, seed=0)
    ids = torch.randint(0, 4096, (1, 64))
    with torch.no_grad():
        assert model(ids, ids.roll(-1, 1)).item() == pytest.approx(8.318, abs=0.2)  # ln(4096)


def test_fields_of_a_named_model_can_be_replaced():
    config = ModelConfig(name="llama-20m", vocab_size=1000, num_hidden_layers=3).resolve()
    assert (config.vocab_size, config.num_hidden_layers, config.hidden_size) == (1000, 3, 384)


def test_the_configuration_works_in_structured_mode():
    llama = type(ModelConfig(name="llama-20m"))  # the dataclass of this kind of models
    merged = OmegaConf.merge(OmegaConf.structured(llama), {"name": "llama-20m", "rope_theta": 5e5})
    assert OmegaConf.to_object(merged) == ModelConfig(name="llama-20m", rope_theta=5e5)
    with pytest.raises(ConfigKeyError):
        OmegaConf.merge(OmegaConf.structured(llama), {"hidden": 3})
    with pytest.raises(ValidationError):
        OmegaConf.merge(OmegaConf.structured(llama), {"hidden_size": "wide"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "lama-5m"}, "model.name=lama-5m: expected one of llama-5m, .*; did you mean llama-5m"),
        (
            {"num_key_value_heads": 3},
            "model.num_attention_heads=4 is no multiple of model.num_key_value_heads=3",
        ),
        ({"hidden_size": 255}, "model.hidden_size=255 is no multiple of model.num_attention_heads=4"),
        ({"head_dim": 7}, "model.head_dim=7: expected an even number"),
        ({"hidden_size": 0}, "model.hidden_size=0: expected at least 1"),
    ],
)
def test_impossible_models_are_one_clear_line(changes, message):
    with pytest.raises(UserError, match=message):
        ModelConfig(**changes)
