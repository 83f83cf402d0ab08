"""Sparse tensors against the CPU: what training with sparse gradients needs runs on the device."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

INDICES = torch.tensor([[1, 0, 1, 1], [2, 0, 2, 0]])  # (1, 2) twice


def coo(device: str) -> torch.Tensor:
    """2 x 3, not coalesced."""
    return torch.sparse_coo_tensor(INDICES, torch.tensor([1.0, 2.0, 3.0, -1.0]), (2, 3)).to(device)


def hybrid(device: str) -> torch.Tensor:
    """2 x 3 of sparse rows, not coalesced, as the gradient of an embedding."""
    return torch.sparse_coo_tensor(INDICES[:1], torch.arange(12.0).view(4, 3), (2, 3)).to(device)


def wide(device: str) -> torch.Tensor:
    """2 x 3 x 4 sparse, of pairs, not coalesced."""
    places = torch.tensor([[1, 0, 1], [0, 2, 0], [3, 1, 3]])
    return torch.sparse_coo_tensor(places, torch.arange(6.0).view(3, 2), (2, 3, 4, 2)).to(device)


def dense(device: str) -> torch.Tensor:
    return torch.arange(6.0).view(2, 3).to(device)


@pytest.fixture(autouse=True)
def counters() -> None:
    torch.tpu.reset_fallback_stats()


def same(actual: torch.Tensor, expected: torch.Tensor, what: str = "it") -> None:
    """Layout, coalescedness, indices and values."""
    assert actual.device.type == "tpu", what
    torch.testing.assert_close(actual.cpu(), expected, msg=lambda message: f"{what}: {message}")


Case = Callable[[str], torch.Tensor]
ON_DEVICE: dict[str, dict[str, Case]] = {
    "structure": {
        "moved": coo,
        "coalesce": lambda device: coo(device).coalesce(),
        "coalesce rows": lambda device: hybrid(device).coalesce(),
        "coalesce 3 sparse dims": lambda device: wide(device).coalesce(),
        "to_dense": lambda device: hybrid(device).to_dense(),
        "to_sparse": lambda device: dense(device).to_sparse(),
        "transpose": lambda device: coo(device).t(),
        "cat": lambda device: torch.cat([coo(device), coo(device)], 1),
        "zero": lambda device: coo(device).zero_(),
        "deepcopy": lambda device: copy.deepcopy(coo(device)),
    },
    "arithmetic": {
        "dense + sparse": lambda device: dense(device) + coo(device),
        "dense - sparse": lambda device: dense(device).sub_(hybrid(device), alpha=0.5),
        "into a transposed": lambda device: dense(device).t().contiguous().t().add_(coo(device)),
        "sparse + sparse": lambda device: (coo(device) + dense(device).to_sparse()).coalesce(),
        "coalesced + coalesced": lambda device: coo(device).coalesce() + dense(device).to_sparse(),
        "by a number": lambda device: coo(device).mul_(2.5),
        "by a dense": lambda device: coo(device) * dense(device),
        "sqrt": lambda device: coo(device).abs().sqrt(),
        "sum": lambda device: torch.sparse.sum(coo(device), 0).coalesce(),
        "mask of dense": lambda device: dense(device).sparse_mask(coo(device)),
        "mask of sparse": lambda device: coo(device).sparse_mask(dense(device).to_sparse()),
    },
    "products": {
        "sparse.addmm": lambda device: torch.sparse.addmm(
            dense(device)[:, :2], coo(device), dense(device).t(), beta=2, alpha=3
        ),
        "csr product": lambda device: dense(device).to_sparse_csr() @ dense(device).t(),
    },
    "compressed": {
        "csr": lambda device: dense(device).to_sparse_csr(),
        "csr to dense": lambda device: dense(device).to_sparse_csr().to_dense(),
        "csr to csc": lambda device: dense(device).to_sparse_csr().to_sparse_csc(),
    },
}


@pytest.mark.parametrize("cases", ON_DEVICE.values(), ids=list(ON_DEVICE))
def test_runs_on_the_device(cases: dict[str, Case]) -> None:
    results = {name: run("tpu") for name, run in cases.items()}
    assert torch.tpu.fallback_stats() == {}
    for name, run in cases.items():
        same(results[name], run("cpu"), name)


@pytest.mark.filterwarnings("ignore:.*runs on the CPU")
def test_what_reads_memory_runs_on_the_cpu_and_is_counted() -> None:
    for run in (
        lambda device: torch.sparse.softmax(coo(device), 1),
        lambda device: torch.sparse.mm(coo(device), coo(device).t()),
        lambda device: dense(device).to_sparse_csr() + (dense(device) - 1).to_sparse_csr(),
    ):
        same(run("tpu"), run("cpu"))
    assert set(torch.tpu.fallback_stats()) == {
        "aten::_sparse_softmax",
        "aten::_sparse_sparse_matmul",
        "aten::add.out",
    }


def test_printing_is_the_cpus_with_the_device() -> None:
    assert str(coo("tpu")) == str(coo("cpu")).replace("size=", "device='tpu:0', size=")


def test_to_the_cpu_and_back() -> None:
    for original in (coo("cpu"), hybrid("cpu").coalesce(), dense("cpu").to_sparse_csr()):
        there = original.to("tpu")
        assert there.layout == original.layout
        same(there.cpu().to("tpu"), original)
        same(torch.empty_like(there).copy_(original), original)


# ---- training ----------------------------------------------------------------------------------------------


def train(
    device: str, kind: type[torch.optim.Optimizer], padding_idx: int | None, **options: Any
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    table = nn.Embedding(7, 3, padding_idx=padding_idx, sparse=True).to(device)
    optimizer = kind(table.parameters(), **options)
    tokens = torch.tensor([[1, 4, 4, 2], [5, 3, 4, 3]]).to(device)
    target = torch.linspace(-1, 1, 12).view(4, 3).to(device)
    losses = []
    for step in range(2):
        optimizer.zero_grad()
        loss = F.mse_loss(table(tokens[step]), target) + table(tokens[step]).square().mean()
        loss.backward()
        assert table.weight.grad is not None
        assert table.weight.grad.is_sparse
        optimizer.step()
        losses.append(loss.detach())
    return [value.cpu() for value in (table.weight.detach(), torch.stack(losses))]


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SparseAdam": (torch.optim.SparseAdam, {"lr": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("SparseAdam", "fused"),
        ("SparseAdam", "strict"),
        ("SparseAdam", "debug"),
        ("SGD", "fused"),
        ("SGD", "strict"),
        ("SGD", "debug"),
        ("Adagrad", "fused"),
    ],
)
def test_an_embedding_trains_in_every_mode(name: str, mode: str) -> None:
    kind, options = OPTIMIZERS[name]
    with torch.tpu.eager_mode(mode):
        on_device = train("tpu", kind, 4, **options)
    assert torch.tpu.fallback_stats() == {}
    torch.testing.assert_close(on_device, train("cpu", kind, 4, **options))


def test_sgd_with_a_sparse_gradient_compiles_once_for_any_tokens() -> None:
    table = nn.Embedding(50, 4, sparse=True, device="tpu")
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)

    def step(seed: int) -> None:
        tokens = torch.randint(50, (16,), generator=torch.Generator().manual_seed(seed)).to("tpu")
        optimizer.zero_grad()
        table(tokens).square().sum().backward()
        optimizer.step()
        torch.tpu.synchronize()

    for seed in range(3):
        step(seed)
    compilations = torch.tpu.compile_stats()["compilations"]
    for seed in range(3, 8):
        step(seed)
    assert torch.tpu.compile_stats()["compilations"] == compilations


def test_gradients_flow_through_sparse_products() -> None:
    def gradients(device: str) -> list[torch.Tensor]:
        matrix, other = coo(device).coalesce().requires_grad_(), dense(device).t().requires_grad_()
        values = torch.tensor([1.0, 2.0], device=device, requires_grad=True)
        made = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]], device=device), values, (2, 3))
        loss = torch.sparse.mm(matrix, other).square().sum() + made.to_dense().mul(dense(device)).sum()
        return [grad.cpu() for grad in torch.autograd.grad(loss, [matrix, other, values])]

    on_device = gradients("tpu")
    assert torch.tpu.fallback_stats() == {}
    torch.testing.assert_close(on_device, gradients("cpu"))


def test_the_gradient_of_an_embedding_bag_may_be_sparse() -> None:
    def gradient(device: str) -> torch.Tensor:
        table = torch.linspace(-1, 1, 21).view(7, 3).to(device).requires_grad_()
        tokens, starts = torch.tensor([1, 4, 4, 2, 5]).to(device), torch.tensor([0, 2]).to(device)
        F.embedding_bag(tokens, table, starts, mode="mean", sparse=True).square().sum().backward()
        assert table.grad is not None
        return table.grad

    same(gradient("tpu"), gradient("cpu"))
    assert torch.tpu.fallback_stats() == {}


# ---- errors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            lambda sparse: sparse.exp(),
            r"aten::exp: PyTorch has no kernel for sparse COO tensors; call to_dense",
        ),
        (
            lambda sparse: sparse.to_sparse_csr().nan_to_num(),
            "nan_to_num.out: PyTorch has no kernel for sparse CSR",
        ),
        (lambda sparse: sparse + dense(sparse.device.type), r"add\(sparse, dense\) is not supported"),
        (lambda sparse: dense(sparse.device.type).t() + sparse, "to have same size, but self has size"),
        (lambda sparse: sparse.indices(), "Cannot get indices on an uncoalesced tensor"),
        (
            lambda sparse: torch.sparse_coo_tensor(
                sparse._indices() + 5, sparse._values(), (2, 3), check_invariants=True
            ),
            "size is inconsistent with indices",
        ),
    ],
    ids=["no kernel", "no csr kernel", "sparse + dense", "size", "uncoalesced", "indices"],
)
def test_errors_say_what_to_do(run: Callable[[torch.Tensor], Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        run(coo("tpu"))


def test_momentum_keeps_as_many_entries_as_there_are_rows() -> None:
    buffers = []
    for device in ("cpu", "tpu"):
        torch.manual_seed(0)
        embedding = nn.Embedding(5, 3, sparse=True).to(device)
        optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1, momentum=0.9)
        for start in range(4):
            optimizer.zero_grad()
            embedding(torch.tensor([start, start + 1, start]).to(device) % 5).square().sum().backward()
            optimizer.step()
        buffer = optimizer.state[embedding.weight]["momentum_buffer"]
        buffers.append((buffer.cpu().to_dense(), embedding.weight.detach().cpu()))
    assert buffer._nnz() <= 5
    torch.testing.assert_close(buffers[1], buffers[0])
