"""Types of transformers' models that plans give context ranks: each trains on them as in one process."""

import sys
from pathlib import Path

import pytest

from tests.backend.distributed.ranks import assert_all_ended_well, run_ranks
from tputrain.models import huggingface

sys.path.insert(0, str(Path(__file__).parent))

import context_types

SCRIPT = """
    sys.path.insert(0, os.environ["HERE"])
    import context_types

    context_types.train_all()
    assert not torch.tpu.fallback_stats(), torch.tpu.fallback_stats()
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the runs of two ranks, by name."""
    directory = tmp_path_factory.mktemp("runs")
    environment = {
        "GROUP_BACKEND": "cpu:gloo,tpu:tpu",
        "GROUP_TIMEOUT": "300",
        "HERE": str(Path(__file__).parent),
        "RUNS": str(directory),
    }
    assert_all_ended_well(run_ranks(SCRIPT, 2, timeout=600, **environment))
    return directory


@pytest.mark.parametrize("name", context_types.NAMES)
def test_it_trains_on_context_ranks_as_in_one_process(runs: Path, name: str) -> None:
    context_types.train(name, runs / f"{name}-alone", "cpu", 1)
    expected, found = (context_types.losses(runs / each) for each in (f"{name}-alone", name))
    assert len(expected) == context_types.STEPS
    assert found == pytest.approx(expected, rel=1e-5)


def test_plans_divide_sequences_of_the_types_that_are_compared() -> None:
    assert context_types.TYPES.keys() == huggingface._TAKES_PARTS
    assert all(context_types.build(name).takes_parts for name in ("qwen3", context_types.LORA))
