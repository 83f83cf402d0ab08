"""Memory is counted where storages are made and freed: by value, back to the baseline after `del`."""

import gc

import jax
import pytest
import torch

KIB = 1024


@pytest.fixture
def baseline():
    """Bytes allocated before the test; nothing is left over from others, and nothing of the test stays."""
    gc.collect()
    before = torch.tpu.memory_allocated()
    torch.tpu.reset_peak_memory_stats()
    assert torch.tpu.max_memory_allocated() == before
    yield before
    gc.collect()
    assert torch.tpu.memory_allocated() == before


def test_allocated_is_the_bytes_of_live_storages(baseline):
    floats = torch.ones(256, device="tpu")
    assert torch.tpu.memory_allocated() - baseline == KIB
    longs = torch.ones(256, dtype=torch.int64, device="tpu")
    halves = torch.ones(256, dtype=torch.bfloat16, device="tpu")
    flags = torch.ones(256, dtype=torch.bool, device="tpu")
    assert torch.tpu.memory_allocated() - baseline == KIB + 2 * KIB + KIB // 2 + KIB // 4
    del longs
    assert torch.tpu.memory_allocated() - baseline == KIB + KIB // 2 + KIB // 4
    del floats, halves, flags


def test_views_cost_nothing_and_keep_their_storage(baseline):
    whole = torch.arange(256.0, device="tpu")
    views = [whole[:10], whole.view(16, 16).t(), whole.detach(), whole[None].expand(8, 256)]
    assert torch.tpu.memory_allocated() - baseline == KIB
    del whole
    assert torch.tpu.memory_allocated() - baseline == KIB
    assert views[0].sum().item() == 45
    views.clear()


def test_a_clone_is_a_storage_of_its_own(baseline):
    first = torch.ones(256, device="tpu")
    second = first.clone()
    assert torch.tpu.memory_allocated() - baseline == 2 * KIB
    first.add_(1)  # in place: nothing new
    assert torch.tpu.memory_allocated() - baseline == 2 * KIB
    assert (first.sum().item(), second.sum().item()) == (512, 256)


def test_the_peak_is_remembered_until_it_is_reset(baseline):
    first = torch.ones(256, device="tpu")
    second = torch.ones(512, device="tpu")
    del second
    assert torch.tpu.memory_allocated() - baseline == KIB
    assert torch.tpu.max_memory_allocated() - baseline == 3 * KIB
    torch.tpu.reset_peak_memory_stats()
    assert torch.tpu.max_memory_allocated() - baseline == KIB
    del first


def test_resizing_a_storage_is_counted(baseline):
    tensor = torch.ones(256, device="tpu")
    tensor.untyped_storage().resize_(0)
    assert torch.tpu.memory_allocated() == baseline
    tensor.untyped_storage().resize_(2 * KIB)
    assert torch.tpu.memory_allocated() - baseline == 2 * KIB
    del tensor


def test_what_writes_into_regrown_memory_is_the_program_that_wrote_into_it_before():
    """FSDP regrows the memory of gathered parameters: whether that was before changes no program."""
    torch.tpu.flush()
    flat, part = torch.empty(6, device="tpu"), torch.arange(3.0).to("tpu")
    compilations = []
    for _ in range(3):
        before = torch.tpu.compile_stats()["compilations"]
        flat.view(2, 3)[0].copy_(part)
        flat.view(2, 3)[1].copy_(part)
        assert flat.tolist() == [0, 1, 2, 0, 1, 2]
        compilations.append(torch.tpu.compile_stats()["compilations"] - before)
        flat.untyped_storage().resize_(0)
        flat.untyped_storage().resize_(24)
    assert compilations == [1, 0, 0]


def test_a_training_step_frees_what_it_dropped(baseline):
    model = torch.nn.Linear(16, 16, bias=False).to("tpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = torch.tpu.memory_allocated() - baseline
    assert held == KIB
    for _ in range(2):
        model(torch.ones(4, 16, device="tpu")).sum().backward()
        assert torch.tpu.memory_allocated() - baseline == 2 * KIB  # the gradient
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert torch.tpu.memory_allocated() - baseline == held
    del model, optimizer


def test_every_name_for_memory_tells_the_same(baseline):
    tensor = torch.ones(256, device="tpu")
    more = torch.ones(256, device="tpu")
    del more
    now, peak = torch.tpu.memory_allocated(), torch.tpu.max_memory_allocated()
    stats = torch.tpu.memory_stats()
    assert stats["allocated_bytes.all.current"] == stats["live_bytes"] == now
    assert stats["allocated_bytes.all.peak"] == peak
    assert stats["executable_temp_bytes"] >= 0
    assert torch.tpu.memory_reserved() == now
    assert torch.tpu.max_memory_reserved() == peak
    assert torch.accelerator.memory_allocated() == torch.accelerator.memory_reserved() == now
    assert torch.accelerator.max_memory_allocated() == torch.accelerator.max_memory_reserved() == peak
    torch.tpu.empty_cache()
    torch.accelerator.empty_cache()
    assert torch.tpu.memory_allocated() == now
    torch.accelerator.reset_peak_memory_stats()
    assert torch.tpu.max_memory_allocated() == now
    del tensor


def test_memory_comes_back_after_an_exception(baseline):
    def fails() -> None:
        first = torch.ones(256, device="tpu")
        first @ torch.ones(3, 3, device="tpu")

    with pytest.raises(RuntimeError):
        fails()


def test_a_channels_last_tensor_is_made_once(baseline):
    image = torch.empty(2, 3, 4, 8, device="tpu", memory_format=torch.channels_last)
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert torch.tpu.max_memory_allocated() - baseline == image.nbytes


def test_a_small_part_of_a_large_tensor_is_read_by_itself():
    large = torch.arange(2**20, device="tpu").reshape(1024, 1024).t()
    assert large[3, 5].item() == 5 * 1024 + 3
    assert large[:2, 7:10].tolist() == [[7168, 8192, 9216], [7169, 8193, 9217]]


def test_what_copies_from_the_host_replace_is_freed_at_once(baseline):
    def held() -> int:
        return sum(array.nbytes for array in jax.live_arrays() if array.nbytes == 64 * KIB)

    tensors = [torch.ones(16 * KIB, device="tpu") for _ in range(8)]
    torch.tpu.synchronize()
    before = held()
    assert before >= 8 * 64 * KIB
    for number, tensor in enumerate(tensors):
        tensor.copy_(torch.full((16 * KIB,), float(number)))
    assert held() <= before + 64 * KIB  # the last one replaced goes with the next
    assert [tensor[0].item() for tensor in tensors] == list(range(8))
