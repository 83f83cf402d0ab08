"""A rank holds its part of a model that is built on the meta device, and at most a parameter beside it."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.backend.distributed.ranks import assert_all_ended_well, run_ranks
from tputrain import RunConfig, Trainer, job
from tputrain.errors import UserError
from tputrain.models import Llama, ModelConfig, initialize, parameters_on_meta
from tputrain.models.meta import allocate, is_on_meta, move
from tputrain.recipe import RecipeConfig

sys.path.insert(0, str(Path(__file__).parent))

import small_run

SCRIPT = """
    from functools import partial
    from tputrain import Callback, RunConfig, Trainer, TrainerConfig
    from tputrain.checkpoint import rows
    from tputrain.checkpoint.store import CheckpointConfig
    from tputrain.loggers.config import LogConfig
    from tputrain.models import ModelConfig, initialize, parameters_on_meta
    from tputrain.parallel.config import ParallelConfig

    rows.SMALLEST_PART = 0  # each rank writes its rows of everything
    # Rows that do not divide by the ranks; the largest parameter is a fifth of the whole.
    SIZES = {"vocab_size": 1023, "hidden_size": 48, "intermediate_size": 131, "num_hidden_layers": 4}
    SHAPE = ModelConfig("llama-5m", **SIZES)
    SLACK = 50_000  # rows that fill up a part, and a few numbers

    class Peaks(Callback):
        def on_fit_start(self, trainer):
            self.look("start")
            if trainer.step == 0:
                plain = SHAPE.build(seed=5)
                for name, parameter in trainer.model.named_parameters():
                    found = parameter.full_tensor().cpu()
                    assert torch.equal(found, plain.get_parameter(name)), name
                for name, buffer in trainer.model.named_buffers():
                    assert torch.equal(buffer.cpu(), plain.get_buffer(name)), name

        def on_step_end(self, trainer):
            torch.tpu.synchronize()
            torch.tpu.reset_peak_memory_stats()

        def on_save(self, trainer, checkpoint):
            self.look("save")

        def look(self, what):
            torch.tpu.synchronize()
            peak = torch.tpu.max_memory_allocated() - before
            assert 0.99 * shard < peak < shard + largest + SLACK, (what, peak, shard, largest)

    def never(model):
        raise AssertionError("values that a checkpoint holds were made")

    for steps, give_values in ((1, partial(initialize, seed=5)), (2, never)):
        with parameters_on_meta():
            model = SHAPE.build_empty()
        sizes = [4 * parameter.numel() for parameter in model.parameters()]
        shard, largest = 3 * sum(sizes) // world, max(sizes)
        assert SLACK < largest / 2 and largest < shard / 2
        torch.tpu.synchronize()
        torch.tpu.reset_peak_memory_stats()
        before = torch.tpu.memory_allocated()
        cfg = RunConfig(
            run_dir=os.environ["RUN"], trainer=TrainerConfig(steps=steps), log=LogConfig(progress="none"),
            checkpoint=CheckpointConfig(every=None), parallel=ParallelConfig(shard=-1),
        )
        ids = torch.arange(32).view(2, 16)
        data = [{"input_ids": ids, "labels": ids + 1}] * 2
        trainer = Trainer(model, cfg, train_loader=data, callbacks=[Peaks()], initialize=give_values)
        trainer.fit()
        assert trainer.step == steps
        del trainer, model
    dist.destroy_process_group()
"""


def test_no_more_than_the_shard_and_a_parameter_with_the_bits_of_one_process(tmp_path: Path) -> None:
    environment = {"GROUP_BACKEND": "cpu:gloo,tpu:tpu", "RUN": str(tmp_path / "run")}
    assert_all_ended_well(run_ranks(SCRIPT, 2, timeout=240, **environment))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.table = nn.Buffer(torch.arange(3.0), persistent=False)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_ties_and_buffers_outlast_the_meta_device() -> None:
    with parameters_on_meta():
        model = Tied()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(parameter.is_meta for parameter in Tied().parameters())
    for device in (torch.device("tpu"), torch.device("cpu")):
        with parameters_on_meta():
            model = Tied()
        move(device, model)
        assert is_on_meta(model)
        assert model.table.device.type == device.type
        allocate(model, device)
        assert not is_on_meta(model)
        assert model.head.weight is model.embed.weight
        assert {each.device.type for each in model.state_dict().values()} == {device.type}
        assert model.table.tolist() == [0, 1, 2]
        assert model.norm.running_var.tolist() == [1, 1, 1]


def test_a_model_of_transformers_that_goes_on_is_read_and_not_made(tmp_path: Path) -> None:
    shape = {
        "model_type": "gpt2",
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 1,
        "vocab_size": 4096,
        "n_positions": 128,
    }
    cfg = RecipeConfig(model=ModelConfig("huggingface", config=shape))
    trained = cfg.model.build(seed=1)
    checkpoint = Trainer(trained, RunConfig(device="cpu", run_dir=str(tmp_path))).save()
    model, give_values = job._build_divisible(cfg, checkpoint)
    assert is_on_meta(model)
    assert give_values is not None
    allocate(model, torch.device("cpu"))
    give_values(model)
    assert model.lm_head.weight is model.transformer.wte.weight
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in (dict(trained.named_parameters()) | dict(trained.named_buffers())).items():
        assert torch.equal(tensors[name], tensor), name


def test_one_process_gives_such_a_model_its_values_too(tmp_path: Path) -> None:
    def fill(model: nn.Module) -> None:
        initialize(model, seed=3)  # type: ignore[arg-type]

    with parameters_on_meta():
        model = Llama(small_run.SHAPE)
    initialize(built := Llama(small_run.SHAPE), seed=3)
    cfg, data = RunConfig(device="cpu"), small_run.EVALUATION
    deferred = Trainer(model, cfg, val_loader=data, initialize=fill)
    assert deferred.validate()["loss"] == Trainer(built, cfg, val_loader=data).validate()["loss"]


def test_a_model_that_would_have_no_values_is_refused() -> None:
    with parameters_on_meta():
        model = Tied()
    with pytest.raises(
        UserError, match=r"initialize is a NoneType: expected a function that gives the model"
    ):
        Trainer(model, RunConfig(device="cpu"))
    with pytest.raises(UserError, match=r"initialize is a function: expected None: the model has its values"):
        Trainer(Tied(), RunConfig(device="cpu"), initialize=lambda model: None)
    with torch.device("meta"):
        model = Tied()
    with pytest.raises(UserError, match=r"the model's buffer table is on the meta device"):
        Trainer(model, RunConfig(device="cpu"), initialize=lambda model: None)
