"""What ranks decide together: whether to stop, evaluate and save, and at which signal to leave.

On each rank somebody may wish something at any moment: a signal comes, a callback sets `control.stop` by a
clock of its own. Nobody sees a wish before all ranks have agreed on it, at the same place of the loop.
"""

import os
import signal
from collections.abc import Callable

from tputrain import device as devices
from tputrain.announce import warn
from tputrain.callbacks.callback import Control
from tputrain.parallel.launched import exit_code_of_stop
from tputrain.parallel.world import World
from tputrain.parallel.writer import SharedWriter
from tputrain.signals import SignalWatch
from tputrain.snapshot.background import BackgroundWriter


class AgreedControl(Control):
    """`trainer.control` of several ranks: what is set to True counts on all of them, from `agree` on."""

    _KEYS = ("evaluate", "save", "stop")

    def __init__(self) -> None:
        self._wishes: set[str] = set()
        super().__init__()

    def __setattr__(self, name: str, value: object) -> None:
        if name in self._KEYS and value:
            self._wishes.add(name)
        else:
            super().__setattr__(name, value)

    def agree(self, wishes: list[int]) -> None:
        """Take what all ranks have agreed on, in the order of `wishes`."""
        for name, is_wished in zip(self._KEYS, wishes, strict=True):
            if is_wished:
                super().__setattr__(name, True)
        self._wishes.clear()

    @property
    def wishes(self) -> list[int]:
        """What this rank wishes."""
        return [int(name in self._wishes) for name in self._KEYS]


class AgreedSignals(SignalWatch):
    """A SignalWatch whose `received` is the same on all ranks: None until `agree`.

    So a signal breaks off no wait of one rank, which others would then wait for. One that comes because
    another rank has failed, as launchers send it to those that are left, saves nothing: there is nobody to
    agree with. Wherever such a rank waits, it leaves.
    """

    grace = 2.0
    """Seconds in which the main thread, too, should notice that another rank has failed."""
    come = 0
    """The signal that this rank has got; 0: none."""

    def _note(self, number: int) -> None:
        self.come = self.come or number

    def agree(self, number: int, rank: int, speaks: bool) -> None:
        """Take the signal that all ranks have agreed on, which `rank` has got; 0: none.

        `speaks`: whether this rank tells of one that another rank has got, whose output is in a file.
        """
        if number and not self.received and not self.come and speaks:
            warn(f"{signal.Signals(number).name} of rank {rank}: {self._what_follows()}")
        self.received = self.received or number or None

    def _exit_code(self, number: int) -> int:
        return exit_code_of_stop(number)

    def _what_follows(self) -> str:
        failure = devices.failure_of_peers(0.0)
        if failure is None:
            return super()._what_follows()
        return f"the launcher ends this rank, since {failure}; what was saved stays"  # it sends the signal

    def _call_rescue(self, number: int) -> None:
        if (failure := devices.failure_of_peers(0.0)) is not None:
            warn(f"{failure}: leaving without saving")
            os._exit(128 + number)

    def __exit__(self, *details: object) -> None:
        super().__exit__(*details)  # type: ignore[arg-type]
        self.come = 0


class Agreement:
    """Brings control, signals and the background writer of all ranks to one state, with one exchange.

    With it goes what `host_seconds()` gives on each rank.
    """

    def __init__(
        self,
        world: World,
        control: Control,
        signals: SignalWatch,
        writer: BackgroundWriter,
        host_seconds: Callable[[], float],
    ):
        self._world, self._control, self._signals, self._writer = world, control, signals, writer
        self._host_seconds = host_seconds
        self.slowest: tuple[int, float] | None = None
        """The rank with the largest `host_seconds()`, and these; None: there is one, or nothing was done."""

    def reach(self) -> None:
        """Agree, where there is anybody to agree with."""
        control, signals, writer = self._control, self._signals, self._writer
        if isinstance(control, AgreedControl) and isinstance(signals, AgreedSignals):
            assert isinstance(writer, SharedWriter)
            size = self._world.size
            microseconds = int(self._host_seconds() * 1e6)
            own = [*control.wishes, int(writer.has_ended_here)]
            of_ranks = [each * size + self._world.rank for each in (signals.come, microseconds)]
            *wishes, has_ended, stopped, slowest = self._world.largest([*own, *of_ranks])
            self.slowest = (slowest % size, slowest // size / 1e6) if slowest >= size else None
            signals.agree(stopped // size, stopped % size, self._world.is_first)
            control.agree(wishes)
            writer.agree(bool(has_ended))
