"""What holds while a run goes on: signals, the watchdog, the device's mode, what is closed at its end."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from tputrain.garbage import ScheduledCollection
from tputrain.loop.checkpoints import Checkpoints
from tputrain.signals import SignalWatch
from tputrain.snapshot.background import BackgroundWriter
from tputrain.watchdog import Watchdog
from tputrain.worker_death import deaths_named
from tputrain.worker_signals import left_to

if TYPE_CHECKING:
    from tputrain.trainer import Trainer


@contextmanager
def session(
    trainer: "Trainer",
    checkpoints: Checkpoints,
    signals: SignalWatch,
    watchdog: Watchdog,
    writer: BackgroundWriter,
) -> Iterator[ScheduledCollection]:
    """In here `fit` runs; yields the garbage collector's schedule.

    Raises Interrupted at its end if a signal came, UserError where the run directory is another Trainer's.
    """

    def tell_of_exception(
        kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for callback in trainer.callbacks if error is not None else ():
            callback.on_exception(trainer, error)  # type: ignore[arg-type]

    with ExitStack() as stack:
        # Outermost the deaths of workers, which PyTorch raises in whatever line it comes by.
        stack.enter_context(deaths_named())
        stack.enter_context(checkpoints.owned())
        stack.enter_context(signals)
        stack.enter_context(signals.raised_at_the_end())
        stack.enter_context(left_to(signals))
        stack.enter_context(watchdog)
        stack.enter_context(trainer.execution.phase("train"))
        garbage = stack.enter_context(ScheduledCollection(trainer.cfg.trainer.collect_garbage_every))
        for logger in trainer.loggers:
            stack.callback(logger.close)
        for callback in trainer.callbacks:
            stack.callback(callback.close)
        stack.push(tell_of_exception)
        stack.callback(writer.wait, watchdog.go_on)  # whatever ends the run
        yield garbage
