"""What the model writes by now, shown at every evaluation."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tputrain.announce import say
from tputrain.callbacks.callback import Callback
from tputrain.config_checks import Settings, expect_at_least
from tputrain.data import Tokenizer
from tputrain.errors import UserError
from tputrain.loggers.logger import Record
from tputrain.sampling import generate, printable

if TYPE_CHECKING:
    from tputrain.trainer import Trainer


@dataclass(frozen=True)
class SampleConfig(Settings):
    """The text written at evaluations."""

    prompt: str = "def "
    """What it goes on from."""
    max_new_tokens: int = 48
    """Its length; 0: no sample."""
    temperature: float = 0.8
    """0: always the likeliest token."""

    def __post_init__(self) -> None:
        expect_at_least("sample.max_new_tokens", self.max_new_tokens, 0)
        expect_at_least("sample.temperature", self.temperature, 0.0)


class SampleText(Callback):
    """Prints text by the model at every evaluation, drawn with one seed: what changes is the model."""

    def __init__(self, tokenizer: Tokenizer, cfg: SampleConfig, window: int, in_conversation: bool = False):
        """`window`: tokens that the model sees at a time, best the length it is trained on;
        `in_conversation`: whether it is trained on conversations.
        """
        self.tokenizer, self.cfg, self.window = tokenizer, cfg, window
        self.in_conversation = in_conversation
        self._is_silent = False

    def on_evaluate(self, trainer: "Trainer", result: Record) -> None:
        if self._is_silent:
            return
        try:
            with trainer.evaluation_weights.in_place(), trainer.execution.phase("sample"):
                text = generate(
                    trainer.execution.model,
                    self.tokenizer,
                    self.cfg.prompt,
                    self.cfg.max_new_tokens,
                    temperature=self.cfg.temperature,
                    window=self.window,
                    in_conversation=self.in_conversation,
                )
        except UserError as error:  # no logits, or a template without this prompt: it trains all the same
            self._is_silent = True
            say(f"no samples: {error}")
            return
        say("sample: " + printable(text).replace("\n", "\n        "))
