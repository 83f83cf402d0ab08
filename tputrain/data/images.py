"""Images with classes: scikit-learn's handwritten digits, which come with that package."""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from tputrain.batches import IGNORED_LABEL, Batch
from tputrain.data.config import BuildContext, Data, DataConfig, DataError
from tputrain.data.shuffled import epoch_order, shuffled


@dataclass(frozen=True)
class Images:
    """Images, float32 (number, channels, height, width) from 0 to 1, and their classes, int64 (number,)."""

    pixels: np.ndarray
    labels: np.ndarray
    seed: int

    def __len__(self) -> int:
        return len(self.labels)

    def batch_at(self, step: int, size: int) -> Batch:
        """Batch `step` of `size` images: a pure function of (seed, step).

        Every epoch takes each image once, in an order of its own; a batch may hold the end of one epoch and
        the start of the next.
        """
        return self.batch_of(shuffled(self.seed, step * size + np.arange(size), len(self)))

    def batch_of(self, indices: np.ndarray) -> Batch:
        """The images numbered `indices` (int64; -1: one that does not count), as a batch."""
        labels = np.where(indices >= 0, self.labels[indices], IGNORED_LABEL)
        return {"pixel_values": torch.from_numpy(self.pixels[indices]), "labels": torch.from_numpy(labels)}


@dataclass(frozen=True)
class ImageBatches:
    """Images as the Trainer's indexed loader, `size` of them a step."""

    images: Images
    size: int
    fingerprint: str

    def batch_at(self, step: int, micro: int) -> Batch:
        """The batch of step `step`, whose only micro-batch it is."""
        return self.images.batch_at(step, self.size)

    def epochs_at(self, step: int) -> float:
        """How many epochs the steps before `step` come to."""
        return step * self.size / len(self.images)


@dataclass(frozen=True)
class ImageEvaluation:
    """Images as an evaluation goes through them: each once, in batches of one size."""

    images: Images
    size: int

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, len(self.images), self.size):
            indices = np.arange(start, start + self.size)
            yield self.images.batch_of(np.where(indices < len(self.images), indices, -1))


@dataclass(frozen=True)
class ImageData(Data):
    """What a run trains on and is judged by."""

    title: str
    train: Images
    validation: Images
    fingerprint: str
    """Names the images and how they are split."""
    tokenizer: None = None

    @property
    def num_samples(self) -> int:
        """Images to train on."""
        return len(self.train)

    def describe(self) -> list[str]:
        """A line for people."""
        return [f"data: {self.title}, {len(self.train):,} to train on, {len(self.validation):,} held out"]

    def training_batches(self, size: int, micro_batches: int) -> ImageBatches:
        """The Trainer's loader: `size` images a step, which is one micro-batch."""
        assert micro_batches == 1, "BatchConfig gives images one"
        return ImageBatches(self.train, size, self.fingerprint)

    def evaluation_batches(self, size: int) -> "ImageEvaluation":
        """An evaluation's loader."""
        return ImageEvaluation(self.validation, size)


@dataclass(frozen=True)
class DigitsConfig(DataConfig, names=("digits",)):
    """scikit-learn's handwritten digits: images of 8 x 8 pixels, with their classes."""

    source: str = "digits"

    is_text: ClassVar[bool] = False

    def _build(self, context: BuildContext) -> ImageData:
        return _build_images(self, context)

    def example(self, rows: int) -> dict[str, Tensor]:
        labels = torch.empty(rows, dtype=torch.int64, device="meta")
        return {"pixel_values": torch.empty(rows, 1, 8, 8, device="meta"), "labels": labels}


def _build_images(cfg: DigitsConfig, context: BuildContext) -> ImageData:
    """Raises DataError, one line, if scikit-learn is missing or has other images."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError(
            "data.source=digits: expected the package scikit-learn: pip install 'tputrain[digits]'"
        ) from None
    pixels, labels = load_digits(return_X_y=True)
    pixels = (pixels / 16.0).astype(np.float32).reshape(-1, 1, 8, 8)
    labels = labels.astype(np.int64)
    digest = blake2b(pixels.tobytes() + labels.tobytes(), digest_size=16)
    digest.update(str(cfg.validation_fraction).encode())
    if context.expected not in (None, digest.hexdigest()):
        raise DataError(
            "data.source=digits: the images, or data.validation_fraction, are not what this run was started "
            "with; restore them, or choose another run_dir"
        )
    order = epoch_order(0, 0, len(labels))
    num_held_out = min(max(1, round(cfg.validation_fraction * len(labels))), len(labels) - 1)
    held_out, rest = order[:num_held_out], order[num_held_out:]
    return ImageData(
        "scikit-learn's handwritten digits",
        Images(pixels[rest], labels[rest], context.seed),
        Images(pixels[held_out], labels[held_out], context.seed),
        digest.hexdigest(),
    )
