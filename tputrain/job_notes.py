"""What is no mistake in a job that begins, but hardly what its user wants: a line each."""

from collections.abc import Iterator

from tputrain.data import Data
from tputrain.recipe import RecipeConfig

_FEW = 0.9  # of the entries asked for


def notes(cfg: RecipeConfig, data: Data) -> Iterator[str]:
    """The lines to say before a run of `cfg` on `data` begins."""
    if cfg.lora.rank > 0 and not cfg.model.is_trained:
        yield (
            "note: lora.rank freezes a model that has learned nothing yet; begin with one that has: "
            "model.path=runs/llama data.tokenizer=runs/llama"
        )
    asked = cfg.data.trained_vocab_size
    if (
        asked is not None
        and data.tokenizer is not None
        and (found := data.tokenizer.vocab_size) < _FEW * asked
    ):
        yield (
            f"note: the tokenizer found {found:,} entries in this text, data.vocab_size={asked} asks for "
            f"{asked:,}: what the model has for the others is never learned; give more text, or lower "
            "data.vocab_size and model.vocab_size"
        )
    taken, there = cfg.batch.size * cfg.trainer.accumulate, data.num_samples
    if there is not None and taken > there:
        unit, key = ("sequences", "batch.tokens") if cfg.data.is_text else ("images", "batch.samples")
        yield (
            f"note: a step takes {taken:,} {unit}, and there are {there:,} to train on: an epoch is less "
            f"than a step; lower {key}, or give more data"
        )
