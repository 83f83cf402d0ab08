"""Streams and events. Each device has one stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tpu_backend import _C
from tpu_backend.torch_tpu.devices import index_of


class Stream(torch.Stream):
    """The device's one stream. Its work is ordered, so no stream has to wait for another."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, device=torch.device("tpu", index_of(device)), priority=priority)

    def wait_stream(self, stream: torch.Stream) -> None:
        pass


class _EventKind(type(torch.Event)):  # type: ignore[misc]
    """Makes a tpu event of ``torch.Event`` an instance of ``torch.tpu.Event``."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Event) and instance.device.type == "tpu"


class Event(torch.Event, metaclass=_EventKind):
    """An event on the device's stream: ``torch.Event`` on the tpu, under torch.cuda's name.

    Recording an event runs nothing; ``query``, ``synchronize`` and ``elapsed_time`` run the work before it.
    With ``enable_timing`` that work ends a program. When the program runs, the device waits for it: the time
    of the event is the moment it was done.
    """

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
        # A torch.Event itself: its `elapsed_time` takes no subclass.
        return torch.Event(
            torch.device("tpu"), enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )


def current_stream(device: Any = None) -> torch.Stream:
    return Stream(device)


def default_stream(device: Any = None) -> torch.Stream:
    return Stream(device)


def set_stream(stream: torch.Stream) -> None:
    _C.set_device(stream.device_index)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Context manager for code that names a stream. The order of work does not change."""
    yield
