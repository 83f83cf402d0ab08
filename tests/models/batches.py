"""Batches of random numbers in the shapes that transformers' models take, named by what they hold."""

import torch
from torch import Generator, Tensor

from tests.models.case import Batch

VOCABULARY = 64
BATCH, LENGTH = 2, 8
IMAGE_SIDE = 32
CLASSES = 5


def _tokens(generator: Generator, length: int = LENGTH) -> Tensor:
    # From 4 on: the first ids are padding, begin and end in most configurations.
    return torch.randint(4, VOCABULARY, (BATCH, length), generator=generator)


def text(generator: Generator) -> Batch:
    """Token ids with their labels; the second row is padded by two."""
    ids = _tokens(generator)
    attention_mask = torch.ones_like(ids)
    attention_mask[1, -2:] = 0
    labels = ids.masked_fill(attention_mask == 0, -100)
    return {"input_ids": ids, "attention_mask": attention_mask, "labels": labels}


def unpadded_text(generator: Generator) -> Batch:
    """For state-space models, whose training has no padding."""
    ids = _tokens(generator)
    return {"input_ids": ids, "labels": ids.clone()}


def translation(generator: Generator) -> Batch:
    return text(generator) | {"labels": _tokens(generator, 6)}


def _pixels(generator: Generator, side: int = IMAGE_SIDE) -> Tensor:
    return torch.randn(BATCH, 3, side, side, generator=generator)


def _classes(generator: Generator) -> Tensor:
    return torch.randint(0, CLASSES, (BATCH,), generator=generator)


def image(generator: Generator) -> Batch:
    return {"pixel_values": _pixels(generator), "labels": _classes(generator)}


def segmented_image(generator: Generator) -> Batch:
    labels = torch.randint(0, CLASSES, (BATCH, IMAGE_SIDE, IMAGE_SIDE), generator=generator)
    return {"pixel_values": _pixels(generator), "labels": labels}


def image_and_text(generator: Generator) -> Batch:
    return {"input_ids": _tokens(generator), "pixel_values": _pixels(generator)}


def classified_waveform(generator: Generator) -> Batch:
    waveform = torch.randn(BATCH, 400, generator=generator)
    return {"input_values": waveform, "labels": _classes(generator)}


def transcribed_waveform(generator: Generator) -> Batch:
    waveform = torch.randn(BATCH, 400, generator=generator)
    return {"input_values": waveform, "labels": _tokens(generator, 3)}


def transcribed_spectrogram(generator: Generator) -> Batch:
    spectrogram = torch.randn(BATCH, 8, 32, generator=generator)
    return {"input_features": spectrogram, "labels": _tokens(generator, 6)}
