"""How large a training step is: in tokens of text, or in images."""

from dataclasses import dataclass

from tputrain.config_checks import Settings, expect, expect_at_least


@dataclass(frozen=True)
class BatchConfig(Settings):
    """A step's tokens, and how many sequences are trained on at a time; the rest is accumulated."""

    tokens: int = 1024
    """Tokens of one optimizer step."""
    sequences: int = 8
    """Sequences of one micro-batch, of all ranks together."""
    samples: int | None = None
    """Images of one optimizer step, of all ranks together, in one micro-batch; where the data is images."""

    def __post_init__(self) -> None:
        expect_at_least("batch.tokens", self.tokens, 1)
        expect_at_least("batch.sequences", self.sequences, 1)
        expect_at_least("batch.samples", self.samples, 1)

    @property
    def size(self) -> int:
        """Samples of one micro-batch: images or sequences."""
        return self.samples or self.sequences

    def micro_batches(self, sequence_length: int | None) -> int:
        """Micro-batches to a step. Raises UserError where the tokens do not divide into them."""
        if self.samples is not None:
            return 1
        assert sequence_length is not None, "without batch.samples, samples are sequences"
        micro = self.sequences * sequence_length
        nearest = max(1, round(self.tokens / micro)) * micro
        expect(
            self.tokens % micro == 0,
            "batch.tokens",
            self.tokens,
            f"a multiple of batch.sequences x data.sequence_length = {self.sequences} x {sequence_length} = "
            f"{micro}, such as {nearest}",
        )
        return self.tokens // micro

    def check_divides(self, ranks: int) -> None:
        """Raise UserError where so many ranks cannot have equal parts of a batch."""
        key, count = ("sequences", self.sequences) if self.samples is None else ("samples", self.samples)
        nearest = max(1, round(count / ranks)) * ranks
        expect(
            count % ranks == 0,
            f"batch.{key}",
            count,
            f"a multiple of {ranks}, the ranks that share a batch, such as {nearest}",
        )

    def arithmetic(self, sequence_length: int | None) -> str:
        """The batch, factor by factor, as one line."""
        if self.samples is not None:
            return f"batch: {self.samples:,} images a step"
        count = self.micro_batches(sequence_length)
        return (
            f"batch: {self.tokens:,} tokens a step = {self.sequences} sequences x {sequence_length} tokens x "
            f"{count} micro-batch{'es' if count > 1 else ''}"
        )
