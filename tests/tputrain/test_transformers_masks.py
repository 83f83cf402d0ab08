"""Masks of transformers' models: which are documents on the device. The values are the CPU's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tputrain.models import LoraConfig, add_lora, transformers_masks
from tputrain.models.huggingface import build_huggingface

transformers = pytest.importorskip("transformers")

LENGTH = 300  # on the CPU attention is in blocks from 257 on
SIZES = {
    "vocab_size": 96,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 512,
}
GPT2 = {"vocab_size": 96, "n_positions": 512, "n_embd": 16, "n_layer": 2, "n_head": 2}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
KINDS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen3": SIZES,
    "mistral": SIZES | {"sliding_window": 512},
    "gpt2": GPT2 | NO_DROPOUT,
    "deepseek_v3": SIZES
    | {
        "num_key_value_heads": 4,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 2,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 4,
    },
}


class Attended(TorchDispatchMode):
    """What stood for a mask in each call of the device's attention: nothing, documents or pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._scaled_dot_product_efficient_attention.default:
            mask = args[3]
            is_documents = mask is not None and mask.dtype == torch.int64
            self.masks.append("nothing" if mask is None else "documents" if is_documents else "pairs")
        return func(*args, **(kwargs or {}))


def theirs(kind: str = "llama", **settings: Any) -> Any:
    """A model of transformers as it is."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **KINDS[kind] | settings)
    model = transformers.AutoModelForCausalLM.from_config(config)
    transformers_masks.register()
    return model.train()


def ours(kind: str = "llama", **settings: Any) -> Any:
    """The same with the forward of this library's models."""
    return build_huggingface({"model_type": kind, **KINDS[kind]}, **settings).train()


def gradients(model: Any, batch: dict[str, Tensor], is_seen: Tensor, call: Any = None) -> list[Tensor]:
    """Results at tokens that count, and the gradients of all parameters."""
    device = next(model.parameters()).device
    # Packed positions count for transformers only where it makes no cache.
    options = {} if hasattr(model, "gives_logits_with_loss") else {"use_cache": False}
    result = (model if call is None else call)(
        **{name: each.to(device) for name, each in batch.items()}, **options
    )
    logits = result if isinstance(result, Tensor) else result.logits
    counted = logits[is_seen.to(device)]
    counted.sin().sum().backward()
    return [counted.detach().cpu(), *(each.grad.cpu() for each in model.parameters())]


def check(found: list[Tensor], expected: list[Tensor]) -> None:
    for here, there in zip(found, expected, strict=True):
        assert (here - there).norm() <= 1e-4 * there.norm()


def masks_of(make: Callable[[], Any], batch: dict[str, Tensor], is_seen: Tensor | None = None) -> set[str]:
    """What attention had for a mask on the device. The values are those of the CPU."""
    is_seen = torch.ones_like(batch["input_ids"], dtype=torch.bool) if is_seen is None else is_seen
    with Attended() as attended:
        found = gradients(make().to("tpu"), batch, is_seen)
    check(found, gradients(make(), batch, is_seen))
    return set(attended.masks)


def tokens() -> Tensor:
    return torch.randint(96, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def packed() -> dict[str, Tensor]:
    """Two rows of three documents each, and their positions."""
    starts = torch.tensor([[0, 70, 200], [0, 3, 290]])
    places = torch.arange(LENGTH).expand(2, -1)
    ids = (places[:, :, None] >= starts[:, None, :]).sum(-1) - 1
    return {"position_ids": places - starts.gather(1, ids), "document_ids": ids}


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_a_recipe_give_documents_to_the_device(kind: str) -> None:
    assert masks_of(lambda: ours(kind), {"input_ids": tokens(), **packed()}) == {"documents"}
    assert masks_of(lambda: ours(kind), {"input_ids": tokens()}) == {"nothing"}


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_packed_positions_are_documents(kind: str) -> None:
    batch = {"input_ids": tokens(), "position_ids": packed()["position_ids"]}
    assert masks_of(lambda: theirs(kind), batch) == {"documents"}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_documents(kind: str, side: str) -> None:
    padding = torch.ones(2, LENGTH, dtype=torch.int64)
    padding[0] = 2  # any number but 0 is seen
    padding[1, slice(0, 40) if side == "left" else slice(250, None)] = 0
    batch = {"input_ids": tokens(), "attention_mask": padding}
    assert masks_of(lambda: theirs(kind), batch, padding.bool()) == {"documents"}
    if side == "right":  # those who look at what is before padding see it as before, too
        assert masks_of(lambda: theirs(kind), batch) == {"documents"}


def test_rows_that_see_nothing_are_numbers() -> None:
    padding = torch.ones(2, LENGTH, dtype=torch.int64)
    padding[1, :40] = 0
    logits = theirs().to("tpu")(input_ids=tokens().to("tpu"), attention_mask=padding.to("tpu")).logits
    assert logits.isfinite().all()


@pytest.mark.parametrize("window", [40, LENGTH])
def test_a_window_is_part_of_documents(window: int) -> None:
    def model() -> Any:
        return theirs("mistral", sliding_window=window)

    assert masks_of(model, {"input_ids": tokens(), "position_ids": packed()["position_ids"]}) == {"documents"}
    padding = torch.ones(2, LENGTH, dtype=torch.int64)
    padding[1, 250:] = 0
    batch = {"input_ids": tokens(), "attention_mask": padding}
    assert masks_of(model, batch, padding.bool()) == {"documents"}


def test_layers_of_two_kinds_have_a_window_or_none() -> None:
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 40}

    def model() -> Any:
        return build_huggingface({"model_type": "gemma3_text", **SIZES, **kinds}).train()

    assert masks_of(model, {"input_ids": tokens()}) == {"documents", "nothing"}
    assert masks_of(model, {"input_ids": tokens(), **packed()}) == {"documents"}


def test_other_masks_and_other_attention_are_as_before() -> None:
    pairs = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(2, 1, -1, -1)
    assert masks_of(theirs, {"input_ids": tokens(), "attention_mask": pairs}) == {"pairs"}
    padding = torch.ones(2, LENGTH, dtype=torch.int64)
    padding[1, 250:] = 0

    def eager() -> Any:
        return theirs(attn_implementation="eager")

    assert masks_of(eager, {"input_ids": tokens(), "attention_mask": padding}, padding.bool()) == set()


def test_a_mask_that_was_written_to_is_pairs() -> None:
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool, device="tpu").tril()
    transformers_masks.attach_documents(mask, None)
    attend = transformers.AttentionInterface()["sdpa"]
    query = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(0)).to("tpu")
    with Attended() as attended:
        attend(nn.Identity(), query, query, query, mask)
        mask[..., 0, 1] = True
        found, _ = attend(nn.Identity(), query, query, query, mask)
    assert attended.masks == ["nothing", "pairs"]
    expected = F.scaled_dot_product_attention(*[query.cpu()] * 3, mask.cpu()).transpose(1, 2)
    torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("registry", ["AttentionInterface", "AttentionMaskInterface"])
def test_what_somebody_registered_is_left_alone(registry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def somebodys(*args: Any, **options: Any) -> None:
        pass

    own = {
        "AttentionInterface": transformers.integrations.sdpa_attention.sdpa_attention_forward,
        "AttentionMaskInterface": transformers.masking_utils.sdpa_mask,
    }
    for name, function in own.items():
        mapping = getattr(transformers, name)._global_mapping
        monkeypatch.setitem(mapping, "sdpa", somebodys if name == registry else function)
    transformers_masks._register.__wrapped__()
    for name, function in own.items():
        expected = somebodys if name == registry else function
        assert getattr(transformers, name)()["sdpa"] is expected


def test_attention_that_somebody_has_replaced_gets_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers_masks.register()
    attend, seen = transformers.AttentionInterface()["sdpa"], []

    def replaced(query: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        seen.append(options.get("attn_mask"))
        return query

    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool, device="tpu").tril()
    transformers_masks.attach_documents(mask, None)
    monkeypatch.setattr(F, "scaled_dot_product_attention", replaced)
    attend(nn.Identity(), *[torch.ones(1, 2, 4, 8, device="tpu")] * 3, mask)
    assert seen[0] is mask


def test_dropout_is_transformers_own() -> None:
    model = theirs(attention_dropout=0.5).to("tpu")
    batch = {"input_ids": tokens().to("tpu"), "position_ids": packed()["position_ids"].to("tpu")}
    with Attended() as attended:
        first, second = model(**batch).logits, model(**batch).logits
    assert attended.masks == []
    assert not torch.equal(first.cpu(), second.cpu())


def test_text_is_written_with_a_cache_as_on_the_cpu() -> None:
    model = theirs().eval()
    padding = torch.ones(2, 20, dtype=torch.int64)
    padding[1, :6] = 0
    given = {"input_ids": tokens()[:, :20], "attention_mask": padding}
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**given, **options)
    found = model.to("tpu").generate(**{name: each.to("tpu") for name, each in given.items()}, **options)
    assert torch.equal(found.cpu(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("of", ["model", "layers"])
def test_compiled_models_have_the_same_values(of: str) -> None:
    batch, model = {"input_ids": tokens(), **packed()}, ours().to("tpu")
    is_seen = torch.ones_like(batch["input_ids"], dtype=torch.bool)
    call = model
    if of == "model":
        call = torch.compile(model, fullgraph=True, dynamic=False)
    else:
        for layer in model.model.layers:
            layer.forward = torch.compile(layer.forward, fullgraph=True, dynamic=False)
    check(gradients(model, batch, is_seen, call), gradients(ours(), batch, is_seen))


def test_layers_with_lora_that_are_computed_again_have_documents_too() -> None:
    def model() -> Any:
        add_lora(made := ours(activation_checkpointing=True), LoraConfig(rank=2, match=["*.q_proj"]), seed=0)
        return made.requires_grad_()

    assert masks_of(model, {"input_ids": tokens(), **packed()}) == {"documents"}
