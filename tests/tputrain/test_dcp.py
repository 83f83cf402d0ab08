"""Checkpoints to and from torch.distributed.checkpoint, by its own load and save."""

import json
import os
import pickle
import shutil
from io import BytesIO
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.backend.distributed.ranks import assert_all_ended_well, run_ranks
from tests.tputrain.tiny_run import finish_a_run
from tputrain.checkpoint.dcp_files import DcpFiles, _OnlyTensors
from tputrain.cli import main
from tputrain.errors import UserError
from tputrain.models.hf_llama import load_weights, model_config_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finish_a_run(tmp_path_factory.mktemp("finished"))


@pytest.fixture
def exported(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a run and its newest checkpoint in torch.distributed.checkpoint's format."""
    shutil.copytree(finished, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    assert main(["export", "runs/tiny", "exported", "--format", "dcp"]) == 0
    return Path("exported")


def test_dcp_load_gives_the_weights_and_the_optimizer_of_an_exported_run(exported: Path):
    checkpoint = Path("runs/tiny/checkpoints/step-4")
    model = model_config_of(exported).build_empty()
    names = dict(model.named_parameters())
    saved = json.loads((checkpoint / "state.json").read_text())["optimizer"]["groups"]
    optimizer = torch.optim.AdamW([{"params": [names[n] for n in group["params"]]} for group in saved])
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states}
    dcp.load(state, checkpoint_id=exported, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        assert torch.equal(model.state_dict()[name], tensor)
    moments = load_file(checkpoint / "optimizer.safetensors")
    assert len(moments) >= 2 * len(names)
    for name, tensor in moments.items():
        parameter, _, key = name.rpartition(".")
        assert torch.equal(optimizer.state[names[parameter]][key], tensor)
    for group, expected in zip(optimizer.param_groups, saved, strict=True):
        assert group["lr"] == expected["options"]["lr"] > 0
        assert group["weight_decay"] == expected["options"]["weight_decay"]


def test_a_run_begins_with_the_weights_and_the_optimizer_of_what_was_exported(exported: Path, capsys):
    assert main(["import", "exported", "runs/again"]) == 0
    assert "optimizer  goes on, with" in capsys.readouterr().out
    for file in ("model.safetensors", "optimizer.safetensors"):
        begun = load_file(f"runs/again/checkpoints/step-0/{file}")
        expected = load_file(f"runs/tiny/checkpoints/step-4/{file}")
        assert begun.keys() == expected.keys()
        assert all(torch.equal(begun[name], tensor) for name, tensor in expected.items())


def test_an_optimizer_whose_state_is_not_there_begins_anew(exported: Path, capsys):
    model = model_config_of(exported).build_empty()
    load_weights(model, exported)
    shutil.copytree(exported, "anew", ignore=shutil.ignore_patterns(".metadata", "*.distcp"))
    dcp.save({"model": model.state_dict()}, checkpoint_id="anew", no_dist=True)
    assert main(["import", "anew", "runs/again"]) == 0
    assert "optimizer  begins anew: anew/.metadata has no " in capsys.readouterr().out
    moments = load_file("runs/again/checkpoints/step-0/optimizer.safetensors")
    assert all(not tensor.any() for tensor in moments.values())


SAVE = """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    values = torch.arange(35.0).reshape(7, 5)
    dims = {"rows": 0, "columns": 1}
    state = {name: distribute_tensor(values, mesh, [Shard(dim)]) for name, dim in dims.items()}
    dcp.save({"model": state, "other": {"rows": torch.zeros(2)}}, checkpoint_id=os.environ["OUT"])
    dist.barrier()
    dist.destroy_process_group()
"""
PROLOGUE = """
    import os, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    world = dist.get_world_size()
"""


def test_any_region_is_read_of_what_ranks_saved(tmp_path: Path):
    ranks = run_ranks(
        SAVE, 2, prologue=PROLOGUE, OUT=str(tmp_path / "saved"), TORCH_DEVICE_BACKEND_AUTOLOAD="0"
    )
    assert_all_ended_well(ranks)
    files, values = DcpFiles(tmp_path / "saved"), torch.arange(35.0).reshape(7, 5)
    assert sorted(files.names()) == ["columns", "rows"]
    for name in files.names():
        assert files.spec(name).shape == (7, 5)
        assert torch.equal(files.read(name), values)
        assert torch.equal(files.read(name, slice(2, 6), slice(1, 4)), values[2:6, 1:4])
        assert torch.equal(files.read(name, slice(6, 7), slice(0, 5)), values[6:])


class Evil:
    def __reduce__(self):
        return os.mkdir, ("broken-into",)


class ByName:
    """An attribute, as Python 3.11.2 pickles a member of an enum."""

    def __init__(self, kind: object, name: str):
        self.given = kind, name

    def __reduce__(self):
        return getattr, self.given


def test_members_of_an_enum_are_read_as_older_pythons_write_them():
    kind = metadata._MEM_FORMAT_ENCODING
    written = pickle.dumps(ByName(kind, "TORCH_CHANNELS_LAST"))
    assert _OnlyTensors(BytesIO(written)).load() is kind.TORCH_CHANNELS_LAST
    for other in (ByName(kind, "__class__"), ByName(metadata.Metadata, "__init__")):
        with pytest.raises(UserError, match="which is no part of a description of tensors"):
            _OnlyTensors(BytesIO(pickle.dumps(other))).load()


def test_an_index_that_would_run_code_is_refused(exported: Path):
    model = model_config_of(exported).build_empty()
    index = exported / ".metadata"
    whole = index.read_bytes()
    index.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UserError, match=r"\.metadata: it names posix\.mkdir, .*; nothing else is unpickled"):
        load_weights(model, exported)
    assert not Path("broken-into").exists()
    index.write_bytes(whole[:-50])
    with pytest.raises(UserError, match=r"\.metadata: cannot be read \("):
        load_weights(model, exported)
    index.write_bytes(whole)
    (exported / "__0_0.distcp").unlink()
    with pytest.raises(UserError, match=r"__0_0\.distcp: cannot be read \(No such file"):
        load_weights(model, exported)
