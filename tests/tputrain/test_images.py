"""Images: the split, the order, and that an evaluation sees each once."""

import numpy as np
import pytest
import torch

from tputrain.batches import IGNORED_LABEL
from tputrain.data import DataConfig, DataError, ImageBatches, ImageEvaluation
from tputrain.errors import UserError
from tputrain.models import ModelConfig

DIGITS = DataConfig(source="digits", validation_fraction=0.2)


def test_the_split_does_not_depend_on_the_seed_and_the_order_does():
    one, other = DIGITS.build(1), DIGITS.build(2)
    assert one.fingerprint == other.fingerprint
    assert np.array_equal(one.validation.pixels, other.validation.pixels)
    assert (len(one.train), len(one.validation)) == (1438, 359)
    first, second = (data.train.batch_at(0, 8)["labels"] for data in (one, other))
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer", "runs/llama"),
        ("vocab_size", 300),
        ("layout", "padded"),
        ("buckets", 2),
        ("workers", 1),
        ("prefetch", 3),
    ],
)
def test_what_means_nothing_for_images_is_refused(key, value):
    with pytest.raises(UserError, match=rf"^data\.{key}={value}: expected nothing with data\.source=digits"):
        DataConfig(source="digits", **{key: value})


def test_a_batch_is_a_function_of_the_step_and_an_epoch_takes_each_image_once():
    data = DIGITS.build(0)
    batches = ImageBatches(data.train, 100, data.fingerprint)
    seen = torch.cat([batches.batch_at(step, 0)["pixel_values"] for step in range(15)])[:1438]
    assert seen.shape == (1438, 1, 8, 8)
    assert 0.0 <= seen.min() < seen.max() <= 1.0
    assert len(torch.unique(seen.flatten(1), dim=0)) == len(
        np.unique(data.train.pixels.reshape(1438, -1), axis=0)
    )
    again = ImageBatches(DIGITS.build(0).train, 100, "").batch_at(14, 0)
    assert torch.equal(again["pixel_values"], batches.batch_at(14, 0)["pixel_values"])


def test_an_evaluation_sees_each_image_once_in_batches_of_one_size():
    data = DIGITS.build(0)
    batches = list(ImageEvaluation(data.validation, 100))
    assert {len(batch["labels"]) for batch in batches} == {100}
    labels = torch.cat([batch["labels"] for batch in batches])
    assert torch.equal(labels[labels != IGNORED_LABEL], torch.from_numpy(data.validation.labels))


def test_other_images_than_a_run_was_started_with_are_refused():
    with pytest.raises(DataError, match=r"^data\.source=digits: the images, or data\.validation_fraction"):
        DIGITS.build(0, expected="another")


def test_without_scikit_learn_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"pip install 'tputrain\[digits\]'"):
        DIGITS.build(0)


def test_patches_are_squares_of_the_image_row_by_row():
    model = ModelConfig(name="vit-digits").build(seed=0)
    patches = model.patches(torch.arange(64.0).view(1, 1, 8, 8))
    assert patches.shape == (1, 16, 4)
    assert patches[0, 0].tolist() == [0, 1, 8, 9]
    assert patches[0, 5].tolist() == [18, 19, 26, 27]


def test_labels_that_do_not_count_leave_the_loss_alone():
    model = ModelConfig(name="vit-digits").build(seed=0)
    batch = DIGITS.build(0).train.batch_at(0, 6)
    few = {name: tensor[:4] for name, tensor in batch.items()}
    batch["labels"][4:] = IGNORED_LABEL
    with torch.no_grad():
        torch.testing.assert_close(model(**batch), model(**few))
