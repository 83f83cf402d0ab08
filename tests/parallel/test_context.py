"""How sequences are cut over ranks (parallel.context). What that trains is in test_training.py."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.utils._python_dispatch import TorchDispatchMode

from tputrain import ExecutionConfig, ParallelConfig, RunConfig
from tputrain.batches import IGNORED_LABEL, counted
from tputrain.errors import UserError
from tputrain.models import attention, sequence
from tputrain.models.huggingface import build_huggingface
from tputrain.models.sequence import SplitSequence, sequence_split
from tputrain.parallel.limits import check_limits
from tputrain.parallel.slices import columns

sys.path.insert(0, str(Path(__file__).parent))

import context_runs


def test_a_part_without_labels_counts_nothing_and_is_run_all_the_same() -> None:
    labels = torch.tensor([[1, IGNORED_LABEL, IGNORED_LABEL, 2]])
    batch = {"input_ids": torch.arange(4)[None], "labels": labels}
    parts = columns(batch, 2)
    assert [each["position_ids"].tolist() for each in parts] == [[[0, 3]], [[1, 2]]]
    nothing = [{**each, "labels": torch.full((1, 2), IGNORED_LABEL)} for each in parts]
    # Two ranks that share sequences with labels, and two whose sequences have none.
    for rank, labelled in ((0, [[1, 2]]), (2, [[1, 2]]), (3, [[0, IGNORED_LABEL]])):
        (taken,), (factor,) = counted([[*parts, *nothing]], [[2, 0, 0, 0]], rank, context=2)
        assert taken["labels"].tolist() == labelled
        assert taken["input_ids"].tolist() == [[[0, 3]], [[1, 2]]][rank % 2]
        assert factor == (4.0 if rank == 0 else 0.0)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_parts_are_put_together_in_the_order_of_the_sequence(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """And of causal attention each rank has as many pairs of tokens."""
    ids = torch.arange(48).reshape(2, 24)
    parts = columns({"input_ids": ids, "labels": ids}, size)
    pieces = [part["input_ids"] for part in parts if part is not None]
    monkeypatch.setattr(collectives, "all_gather_single", lambda part, dim, group: torch.cat(pieces, dim))
    monkeypatch.setattr(collectives, "wait_tensor", lambda gathered: gathered)
    pairs = set()
    for rank, part in enumerate(parts):
        assert part is not None
        monkeypatch.setattr(sequence, "_split", SplitSequence(None, size, rank, torch.device("cpu")))
        own, every = sequence.places(part["labels"].shape[1], torch.device("cpu"))
        assert own.expand(2, -1).equal(part["position_ids"])
        assert every.equal(torch.arange(24))
        assert sequence.whole(part["input_ids"], 1).equal(ids)
        pairs.add(int((own[:, None] >= every).sum()))
    assert len(pairs) == 1
    with pytest.raises(
        UserError, match="a model has 3 tokens of a rank's part of a sequence: expected an even"
    ):
        sequence.places(3, torch.device("cpu"))


def test_what_cannot_be_cut_is_refused_in_one_line() -> None:
    ids = torch.zeros(2, 12, dtype=torch.int64)
    for batch, message in (
        ({"input_ids": ids, "labels": ids}, r"parallel.context=4: a sequence of 12 tokens .* multiple of 8"),
        ([ids, ids], r"parallel.context=4: expected batches of text"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            columns(batch, 4)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"attention_mask in a batch has the shape \(2, 1, 12\)"):
        columns({"input_ids": ids, "labels": ids, "attention_mask": ids[:, None]}, 2)
    world = cast(Any, SimpleNamespace(size=2, context_size=2, tensor_size=1))
    cfg = RunConfig(execution=ExecutionConfig(train="compile"), parallel=ParallelConfig(context=2))
    with pytest.raises(UserError, match=r"execution.train=compile: expected fused, strict, debug with par"):
        check_limits(world, cfg, context_runs.Attending(), context_runs.loss_of)
    with pytest.raises(UserError, match=r"parallel.context=2: Linear may shift labels itself"):
        check_limits(world, RunConfig(parallel=ParallelConfig(context=2)), nn.Linear(1, 1), None)
    model = context_runs.build("split-qwen3")
    check_limits(world, RunConfig(parallel=ParallelConfig(context=2)), model, None)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "layer_types": ["conv", "full_attention"]}
    convolves = build_huggingface({"model_type": "lfm2", **sizes, **heads})
    with pytest.raises(UserError, match=r"Lfm2ForCausalLM has conv, which sees only the part of a seq"):
        check_limits(world, RunConfig(parallel=ParallelConfig(context=2)), convolves, None)
    convolves.config.layer_types = None  # type: ignore[union-attr]
    with pytest.raises(UserError, match=r"has model.layers.0.conv.conv \(Conv1d\), which sees only the part"):
        check_limits(world, RunConfig(parallel=ParallelConfig(context=2)), convolves, None)
    model.config._attn_implementation = "eager"  # type: ignore[union-attr]
    with pytest.raises(UserError, match=r"Qwen3ForCausalLM has the attention eager, which"):
        check_limits(world, RunConfig(parallel=ParallelConfig(context=2)), model, None)


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 6,
}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {
                "model_type": "phi3",
                "pad_token_id": 0,
                "rope_parameters": LONGROPE,
            },
            "Phi3ForCausalLM has model.rotary_emb with rope_type=longrope, which takes the part of a",
        ),
        (
            {"model_type": "llama", "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "LlamaForCausalLM has model.rotary_emb with rope_type=dynamic, which takes the part of a",
        ),
        (
            {"model_type": "llama4_text", "num_local_experts": 2, "intermediate_size_mlp": 16},
            "Llama4ForCausalLM has model.layers.3.self_attn with attn_temperature_tuning, which takes",
        ),
    ],
)
def test_positions_that_depend_on_the_number_of_tokens_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = build_huggingface({**sizes, **heads, **settings})
    world = cast(Any, SimpleNamespace(size=2, context_size=2, tensor_size=1))
    cfg = RunConfig(parallel=ParallelConfig(context=2))
    with pytest.raises(UserError, match=f"^parallel.context=2: {message}") as caught:
        check_limits(world, cfg, model, None)
    assert "\n" not in str(caught.value)
    if settings["model_type"] == "llama4_text":
        for layer in model.model.layers:  # type: ignore[union-attr]
            layer.self_attn.attn_temperature_tuning = False  # type: ignore[union-attr]
        check_limits(world, cfg, model, None)


class Masks(TorchDispatchMode):
    """The dtypes of what stands for a mask in the device's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype | None] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._scaled_dot_product_efficient_attention.default:
            self.dtypes.append(args[3].dtype if args[3] is not None else None)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("caller", ["documents", "window", "causal", "function"])
def test_attention_has_documents_and_places_instead_of_pairs(
    monkeypatch: pytest.MonkeyPatch, rank: int, caller: str
) -> None:
    """The values are those of this rank's rows of the whole sequence."""
    torch.manual_seed(0)
    tensors = [torch.randn(2, heads, 8, 4) for heads in (4, 2, 2)]
    ids = None
    seen = torch.ones(8, 8, dtype=torch.bool).tril()
    if caller in ("documents", "window"):
        ids = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1, 1]])
        seen = (seen & (ids[:, :, None] == ids[:, None, :]))[:, None]
    window = 3 if caller == "window" else None
    if window is not None:
        seen = seen.triu(1 - window)
    expected = F.scaled_dot_product_attention(*tensors, seen, enable_gqa=True)

    own = [[0, 1, 6, 7], [2, 3, 4, 5]][rank]
    split = SplitSequence(None, 2, rank, torch.device("tpu"))
    wholes = iter([*([] if ids is None else [ids]), *tensors[1:]])

    def whole(part: Tensor, dim: int) -> Tensor:
        split.num_gathered += 1
        return next(wholes).to("tpu")

    for module in (sequence, attention):
        monkeypatch.setattr(module, "whole", whole)
    parts = [each[:, :, own].to("tpu") for each in tensors]
    with sequence_split(split), Masks() as masks:
        if caller == "function":
            found = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        else:
            of_own = None if ids is None else ids[:, own].to("tpu")
            mask = attention.causal_mask(*sequence.places(4, torch.device("tpu")), of_own)
            found = attention.attend(*parts, mask, window=window)
    assert masks.dtypes == [torch.int64, torch.int64]
    torch.testing.assert_close(found.cpu(), expected[:, :, own])


def test_a_mask_is_of_the_columns_of_the_whole_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "whole", lambda part, dim: torch.cat([part, part], dim))
    split = SplitSequence(None, 2, 1, torch.device("cpu"))
    part = torch.zeros(1, 1, 3, 2)
    for mask, is_causal, message in (
        (torch.zeros(3, 3), False, r"a mask of shape \(3, 3\): expected .* all 6 columns of the sequence"),
        (torch.zeros(3, 6), True, r"a mask of shape \(3, 6\) beside is_causal: expected"),
    ):
        with pytest.raises(UserError, match=message), sequence_split(split):
            F.scaled_dot_product_attention(part, part, part, mask, is_causal=is_causal)
