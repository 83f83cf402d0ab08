"""The PyTorch side: the benchmarks' models and batches, and one ordinary training step on any device."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.benchmarks.jax_reference import IGNORED_LABEL, MAX_NORM
from tputrain.models.llama import LLAMA_CONFIGS, Llama, LlamaConfig

LLAMA = LLAMA_CONFIGS["llama-5m"]
LLAMA_BATCH, LLAMA_LENGTH = 8, 128

Batch = tuple[np.ndarray, ...]
Loss = Callable[[Callable[..., Tensor], tuple[Tensor, ...]], Tensor]


def learning_rate(step: int) -> float:
    """Another one at every step, as in real training."""
    return 1e-3 / (1 + 0.01 * step)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def mlp_batch(size: int = 128) -> Batch:
    """Images (size, 784), float32, and labels (size), int64."""
    random = np.random.default_rng(0)
    return random.standard_normal((size, 784), dtype=np.float32), random.integers(0, 10, size)


def mlp_loss(model: Callable[..., Tensor], batch: tuple[Tensor, ...]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def llama(config: LlamaConfig = LLAMA) -> nn.Module:
    torch.manual_seed(0)
    model = Llama(config)
    for name, parameter in model.named_parameters():
        if (std := model.initial_std(name)) is not None:
            nn.init.normal_(parameter, std=std)
    return model


def llama_batch(
    config: LlamaConfig = LLAMA, size: int = LLAMA_BATCH, length: int = LLAMA_LENGTH, seed: int = 0
) -> Batch:
    """Tokens, labels, positions, document numbers: each (size, length), int64, two documents a sequence."""
    random = np.random.default_rng(seed)
    text = random.integers(0, config.vocab_size, (size, length + 1))
    starts = random.integers(length // 4, 3 * length // 4, (size, 1))
    places = np.arange(length)[None].repeat(size, 0)
    documents = (places >= starts).astype(np.int64)
    positions = np.where(documents == 1, places - starts, places)
    labels = np.where(
        places == starts - 1, IGNORED_LABEL, text[:, 1:]
    )  # nothing is learnt across the boundary
    return text[:, :-1], labels, positions, documents


def llama_loss(model: Callable[..., Tensor], batch: tuple[Tensor, ...]) -> Tensor:
    return model(*batch)


class TrainingStep:
    """AdamW, clipping, a learning rate that changes at every step: what anybody would write, on `device`.

    `compiled`: the model by `torch.compile` and AdamW's fused form. `captured`: that, and the whole of it by
    `torch.tpu.capture`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        batch: Batch,
        device: str,
        compiled: bool = False,
        captured: bool = False,
    ):
        compiled |= captured
        self.model = self._placed(model, device)
        self.loss = loss
        self.batch = tuple(torch.from_numpy(array).to(device) for array in batch)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=compiled or None)
        self.called: Callable[..., Tensor] = torch.compile(self.model) if compiled else self.model
        self.step: Callable[..., Tensor] = torch.tpu.capture(self._step) if captured else self._step
        self.steps_done = 0

    def _placed(self, model: nn.Module, device: str) -> nn.Module:
        return model.to(device)

    def __call__(self) -> Tensor:
        """Do one step and return its loss, still on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.steps_done)
        self.steps_done += 1
        return self.step(*self.batch)

    def _step(self, *batch: Tensor) -> Tensor:
        loss = self.loss(self.called, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class DeviceSteps:
    """A target for `interleave`: steps on the tpu device in one of its modes, each dispatched at its end."""

    def __init__(self, step: TrainingStep, mode: str):
        self.step = step
        self.mode = mode

    def __call__(self, calls: int) -> None:
        with torch.tpu.eager_mode(self.mode):
            for _ in range(calls):
                self.dispatch()
            torch.tpu.synchronize()

    def dispatch(self) -> None:
        """One step, not waited for."""
        self.step()
        torch.tpu.flush()


def in_each_form(make_model: Callable[[], nn.Module], loss: Loss, batch: Batch) -> dict[str, DeviceSteps]:
    """The step captured, by `torch.compile`, and as it is, in fused mode."""
    forms = {"captured": {"captured": True}, "compile": {"compiled": True}, "fused": {}}
    return {
        name: DeviceSteps(TrainingStep(make_model(), loss, batch, "tpu", **form), "fused")
        for name, form in forms.items()
    }


class NativeSteps:
    """A target for `interleave`: steps on a device of PyTorch's own; a loss is there when they are done."""

    def __init__(self, step: TrainingStep):
        self.step = step

    def __call__(self, calls: int) -> None:
        for _ in range(calls):
            self.loss = self.step()
        self.loss.item()
