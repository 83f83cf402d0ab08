"""DataLoader's workers, forked and spawned, with pinned memory, in front of a device in use."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

SECONDS = 120


def _pairs() -> TensorDataset:
    return TensorDataset(torch.arange(8.0).reshape(4, 2), torch.arange(4))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.filterwarnings("ignore:os.fork", "error:.*worker", "error:.*pin")
def test_workers_of_every_kind_feed_the_device(method):
    weight = torch.ones(2, device="tpu") * 2  # the device is in use, and work is pending
    loader = DataLoader(
        _pairs(),
        batch_size=2,
        num_workers=1,
        pin_memory=True,
        multiprocessing_context=method,
        persistent_workers=True,
        timeout=SECONDS,
    )
    for _ in range(2):
        seen = []
        for inputs, labels in loader:
            assert inputs.is_pinned()
            assert labels.is_pinned()
            inputs, labels = inputs.to("tpu", non_blocking=True), labels.to("tpu", non_blocking=True)
            seen.append(((inputs * weight).sum() + labels.sum()).item())
        assert seen == [13, 49]


@pytest.mark.filterwarnings("ignore:.*pin_memory_device is deprecated:UserWarning")
def test_the_pinning_device_may_be_named():
    loader = DataLoader(_pairs(), batch_size=4, pin_memory=True, pin_memory_device="tpu")
    (batch,) = loader
    assert all(tensor.is_pinned() for tensor in batch)


def test_a_generator_on_the_host_orders_the_data_whatever_the_device_draws():
    def order(draws: int) -> list[int]:
        torch.manual_seed(0)
        torch.rand(draws, device="tpu")
        return [label.item() for _, label in DataLoader(_pairs(), shuffle=True)]

    assert order(0) == order(5)


class _OnDevice(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(2, device="tpu") * index


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:os.fork")
def test_the_device_refuses_to_start_in_a_worker(method):
    torch.ones(2, device="tpu")
    loader = DataLoader(_OnDevice(), num_workers=1, multiprocessing_context=method, timeout=SECONDS)
    expected = "in a forked process" if method == "fork" else "in a DataLoader's worker .number 0.: give"
    with pytest.raises(RuntimeError, match=f"the tpu device cannot be used {expected}"):
        next(iter(loader))
