"""When a run logs, evaluates, saves and ends."""

from typing import TYPE_CHECKING

from tputrain.signals import SignalWatch

if TYPE_CHECKING:
    from tputrain.trainer import Trainer


class Occasions:
    """What is due after the steps that a Trainer has done so far."""

    def __init__(self, trainer: "Trainer", signals: SignalWatch):
        self._trainer, self._signals = trainer, signals

    @property
    def end(self) -> bool:
        """All steps are done, a callback asks for the end, or a signal came."""
        return self.is_done or self._trainer.control.stop or self._signals.received is not None

    @property
    def is_done(self) -> bool:
        """All steps are. Never of a run by time, which ranks agree to end: their clocks differ."""
        length = self._trainer.cfg.trainer.length
        return length.unit != "seconds" and length.is_reached(self._trainer)

    @property
    def time_is_up(self) -> bool:
        """Of a run by time, on this rank's clock."""
        length = self._trainer.cfg.trainer.length
        return length.unit == "seconds" and length.is_reached(self._trainer)

    @property
    def time_to_save(self) -> bool:
        """Of checkpoints by time, on this rank's clock."""
        every = self._trainer.cfg.checkpoint.every_seconds
        return every is not None and self._trainer.seconds - self._trainer.saved_seconds >= every

    @property
    def total_steps(self) -> int | None:
        """Of the run, as far as that is known by now."""
        return self._trainer.cfg.trainer.length.total_steps(self._trainer)

    @property
    def log(self) -> bool:
        """Also wherever something is done with what the steps have led to."""
        return self._recurs(self._trainer.cfg.log.every) or self.evaluate or self.save

    @property
    def evaluate(self) -> bool:
        trainer = self._trainer
        # A run ended by a signal evaluates when it goes on, at this same step, and has to leave quickly now.
        if trainer.evaluated_at == trainer.step or self._signals.received is not None:
            return False
        cfg, is_first = trainer.cfg.trainer, trainer.step == 0
        is_wanted = trainer.control.evaluate or (is_first and cfg.evaluate_first)
        return trainer.val_loader is not None and (is_wanted or self._recurs(cfg.evaluate_every))

    @property
    def save(self) -> bool:
        trainer = self._trainer
        is_wanted = trainer.control.save or self._recurs(trainer.cfg.checkpoint.every_steps)
        return is_wanted and trainer.store is not None and trainer.saved_at != trainer.step

    @property
    def draw_ahead(self) -> bool:
        """Whether the next step follows at once."""
        return not (self.end or self.evaluate or self.save)

    def _recurs(self, every: int | None) -> bool:
        step = self._trainer.step
        return self.end or (every is not None and step > 0 and step % every == 0)
