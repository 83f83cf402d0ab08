"""This rank's connection to the service, and what it knows of the other ranks."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any, NamedTuple

from tpu_backend.distributed.absent import AbsentPeers
from tpu_backend.distributed.service import notice_cut_off

_RULE = "All ranks of a group must make the same calls in the same order"
_PAUSE = 0.05  # seconds in which calls are gathered before they are told: nobody waits for them

_FOR_EVER = 10.0**7  # seconds
_LONG_WAIT = 60.0  # seconds, after which a wait for other ranks is told
_ANSWER = 5.0  # seconds that the service has to answer
_LAUNCHERS_LOOK = 0.3  # seconds; torchrun looks ten times a second at its processes


class Awaited(NamedTuple):
    """A rank that others wait for, and that waits for nobody. Where none is late: one that says nothing."""

    rank: int
    name: str
    """With its process and host."""
    call: str
    """Its last one; "": it has made none."""
    beat: str
    """What it said last that it does; "": nothing."""
    silent: float
    """Seconds since it said anything."""


class Peers:
    """The other ranks, as far as this one was told of them; and what this one tells."""

    def __init__(self, host: str, port: int, rank: int, world_size: int, timeout: float):
        self.rank, self.world_size = rank, world_size
        self.timeout = timeout  # seconds, of the world's group
        self._socket = socket.create_connection((host, port), timeout=60)
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        notice_cut_off(self._socket)
        self.last_call: tuple[str, int] | None = None  # of this rank: the group, and its number there
        self._unconfirmed: dict[str, int] = {}  # by group: a call that may not be compared yet
        self.has_raised = False  # this rank's newest calls: an error said that they did not end
        self.has_failed = False  # this rank: an error ended it
        self._is_first = False  # to fail
        self._telling = threading.RLock()  # around the socket, and around what is to be told
        self._changed = threading.Condition()
        self._known: dict[int, dict[str, Any]] = {}  # by rank: process and host
        self._failures: list[tuple[int | None, str]] = []  # the rank, if it is one rank's
        self._aborted: dict[str, str] = {}  # by group: where this rank has aborted it
        self._left: set[int] = set()  # ranks whose process has ended
        self._agreed: dict[str, int] = {}  # by group: the last call that all its ranks are known to have made
        self._missing: dict[tuple[str, int], list[str]] = {}
        self._told: dict[tuple[str, int], list[str]] = {}  # by call: a text of each rank
        self._awaited: list[Awaited] | None = None  # the service's last answer
        self._sender = ""  # the same: the group of a send
        self._hang: int | None = None  # the rank that said first that the run hangs
        self._hosts = f"hosts:{','.join(map(str, range(world_size)))}"  # the group of exchanges
        self._num_exchanges = 0
        self._calls: list[tuple[str, int, str, bool]] = []
        self._texts: dict[str, str] = {}
        self._has_calls = threading.Event()
        self._say({"rank": rank, "pid": os.getpid(), "host": socket.gethostname()})
        for work in (self._listen, self._tell_calls):
            threading.Thread(target=work, name="tpu_peers", daemon=True).start()

    def failure(self) -> str | None:
        """What came to light first: that a rank failed or has gone, or that ranks call different things."""
        return self._failures[0][1] if self._failures else None

    def wait_for_failure(self, seconds: float) -> str | None:
        """`failure()`, as soon as something comes to light; None after `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: self._failures, seconds)
        return self.failure()

    def raise_failure(self, group: str) -> None:
        """Raise RuntimeError if something has come to light, or this rank has aborted the group."""
        if (failure := self.failure()) is not None:
            self.has_raised = True
            raise RuntimeError(failure)
        if (aborted := self._aborted.get(group)) is not None:
            raise RuntimeError(aborted)

    def abort(self, group: str, where: str) -> str:
        """Refuse all calls of a group from here on, and end the waits for it; what they raise."""
        with self._changed:
            text = f"the group of ranks {group} was aborted by this rank, at {where}"
            text = self._aborted.setdefault(group, text)
            self._changed.notify_all()
        with self._telling:
            self._unconfirmed.pop(group, None)
        return text

    def aborted(self) -> str | None:
        """What this rank has aborted last."""
        return next(reversed(self._aborted.values()), None)

    def call(self, group: str, number: int, digest: str) -> None:
        """Tell of a collective that this group has called before; to be compared with the others'."""
        with self._telling:
            self.has_raised = False
            self._unconfirmed[group] = number
            self._calls.append((group, number, digest, False))
        self._has_calls.set()

    def exchange(self, text: str) -> None:
        """Tell of an exchange between the hosts of all ranks, about to begin: it shows who is late."""
        with self._telling:
            self._num_exchanges += 1
            self._texts[text] = text
            self._calls.append((self._hosts, self._num_exchanges, text, False))
        self._has_calls.set()

    def meet(self, text: str) -> None:
        """Return when all ranks have come to this, however long that takes. Raises RuntimeError when one has
        failed.
        """
        with self._telling:
            self._num_exchanges += 1
            number = self._num_exchanges
        self.agree(self._hosts, number, text, text, _FOR_EVER)

    def agree(self, group: str, number: int, digest: str, text: str, seconds: float) -> None:
        """The same, of one that is new: returns when all of the group have called it.

        Raises RuntimeError if another rank calls something else or has failed, or after `seconds`.
        """
        with self._telling:
            self._texts[digest] = text
            self._calls.append((group, number, digest, True))
            self._flush()
        self._wait_until_agreed(group, number, text, seconds)
        self.has_raised = False

    def gather(self, group: str, number: int, digest: str, text: str, told: str, seconds: float) -> list[str]:
        """What each rank of a group has `told` with this call, in the order of the group. Waits and raises as
        `agree` does.
        """
        self._say({"tell": [group, number, told]})
        self.agree(group, number, digest, text, seconds)
        return self._told.pop((group, number))

    def confirm(self, seconds: float) -> None:
        """Return when all ranks are known to have made the same calls as this one. To be called before the
        host looks at values that come of them. Raises as `agree` does.
        """
        if not self._unconfirmed:
            return
        with self._telling:
            unconfirmed = self._unconfirmed.copy()
            self._flush()
            for group, number in unconfirmed.items():
                self._say({"ask": [group, number]})
        for group, number in unconfirmed.items():
            self._wait_until_agreed(group, number, "waiting for the device", seconds)
            with self._telling:  # not before: another thread may be about to look at these values, too
                if self._unconfirmed.get(group) == number:
                    del self._unconfirmed[group]

    def _wait_until_agreed(self, group: str, number: int, what: str, seconds: float) -> None:
        def wait(seconds: float) -> bool:
            with self._changed:
                is_over = self._changed.wait_for(
                    lambda: self._agreed.get(group, 0) >= number or self._failures or group in self._aborted,
                    seconds,
                )
            return bool(is_over)

        is_over = wait(min(seconds, _LONG_WAIT))
        if not is_over and seconds > _LONG_WAIT:
            late = self.why_late(group, number, _LONG_WAIT)
            end = "as long as it takes" if seconds >= _FOR_EVER else f"until {seconds:.0f} s"
            print(f"tpu: {what}: {late}; waits {end}", file=sys.stderr, flush=True)
            is_over = wait(seconds - _LONG_WAIT)
        self.raise_failure(group)
        if not is_over:
            self.has_raised = True
            raise RuntimeError(f"{what}: {self.why_late(group, number, seconds)}")

    def why_late(self, group: str, number: int, seconds: float) -> str:
        """Which ranks have not made this call."""
        self._flush()
        self._say({"who": [group, number]})
        with self._changed:
            self._changed.wait_for(lambda: (group, number) in self._missing, 5)
        missing = self._missing.pop((group, number), [])
        late = "; ".join(missing) or "all ranks have called it, and it does not end"
        return f"not done after {seconds:.0f} s: {late}"

    def find_sender(self, calls: list[tuple[str, int]], seconds: float) -> int:
        """The first of these calls, by group and number, that is a send to this rank: its index. Raises
        RuntimeError when something has come to light, or after `seconds`.
        """
        groups = [group for group, _ in calls]
        with self._telling:
            self._flush()
            self._sender = ""
            self._say({"senders": calls})
        with self._changed:
            self._changed.wait_for(
                lambda: self._sender or self._failures or self._aborted.keys() & set(groups), seconds
            )
            sender = self._sender
        for group in groups:
            self.raise_failure(group)
        if sender not in groups:
            self._say({"senders": []})
            self.has_raised = True
            late = f"not done after {seconds:.0f} s: no rank has sent to this one"
            raise RuntimeError(f"recv from any rank: {late}")
        return groups.index(sender)

    def beat(self, doing: str) -> None:
        """Tell that this rank lives, and what it does."""
        self._say({"beat": doing})

    def awaited(self, silence: float) -> list[Awaited] | None:
        """The ranks that all others wait for; where no rank is late, those that have said nothing for more
        than `silence` seconds. None: the service does not answer.
        """
        self._flush()
        with self._changed:
            self._awaited = None
            self._say({"awaited": silence})
            self._changed.wait_for(lambda: self._awaited is not None, _ANSWER)
            return self._awaited

    def declare_hang(self) -> bool:
        """Tell all ranks that the run hangs; whether this one is the first to say so, and no service knows
        better.
        """
        self._say({"hang": True})
        with self._changed:
            self._changed.wait_for(lambda: self._hang is not None, _ANSWER)
        return self._hang in (None, self.rank)

    @property
    def hangs(self) -> bool:
        """Whether a rank has said that the run hangs."""
        return self._hang is not None

    def publish(self, error: str) -> None:
        """Tell the others that this rank fails, and of what."""
        self._is_first = not self._failures
        self.has_failed = True
        self._say({"error": error})

    def let_first_end(self, seconds: float) -> None:
        """Return when the rank that failed first has ended and a launcher has seen it, or after
        `seconds`. The launcher reports the exit code of the rank that it sees end first.
        """
        if not self._failures or self._is_first:
            return
        rank = self._failures[0][0]
        with self._changed:
            has_left = self._changed.wait_for(lambda: rank is None or rank in self._left, seconds)
        if has_left:
            time.sleep(_LAUNCHERS_LOOK)

    def say_farewell(self) -> None:
        self._flush()
        self._say({"bye": True})

    def _named(self, rank: int) -> str:
        known = self._known.get(rank)
        if rank == self.rank:
            known = {"pid": os.getpid(), "host": socket.gethostname()}
        return f"rank {rank}" if known is None else f"rank {rank} (process {known['pid']} on {known['host']})"

    def _say(self, message: dict[str, Any]) -> None:
        with self._telling, suppress(OSError):  # the service is gone: nobody is left to be told
            self._socket.sendall((json.dumps(message) + "\n").encode())

    def _flush(self) -> None:
        with self._telling:
            calls, self._calls = self._calls, []
            texts, self._texts = self._texts, {}
            if calls:
                self._say({"calls": calls, "texts": texts})

    def _tell_calls(self) -> None:
        while True:
            self._has_calls.wait()
            time.sleep(_PAUSE)
            self._has_calls.clear()
            self._flush()

    def _listen(self) -> None:
        # ValueError: the last line was cut off, as the service was killed while it wrote.
        with suppress(OSError, ValueError), self._socket.makefile() as lines:
            for line in lines:
                with self._changed:
                    self._hear(json.loads(line))
                    self._changed.notify_all()
        with self._changed:
            self._failures.append((None, "the process that carries word between the ranks has ended"))
            self._changed.notify_all()

    def _hear(self, message: dict[str, Any]) -> None:
        if "agreed" in message:
            group, number = message["agreed"]
            self._agreed[group] = max(number, self._agreed.get(group, 0))
        elif "told" in message:
            self._told[tuple(message["of"])] = message["told"]
        elif "missing" in message:
            self._missing[tuple(message["of"])] = message["missing"]
        elif "awaited" in message:
            self._awaited = [Awaited(each[0], self._named(each[0]), *each[1:]) for each in message["awaited"]]
        elif "sender" in message:
            self._sender = message["sender"]
        elif "hang" in message:
            self._hang = message["hang"]
        elif "failure" in message:
            self._failures.append((message.get("by"), f"{message['failure']}. {_RULE}"))
        elif "pid" in message:
            self._known[message["rank"]] = message
        elif "error" in message:
            rank = message["rank"]
            self._failures.append((rank, f"{self._named(rank)} failed: {message['error']}"))
        else:
            rank = message["left"]
            self._left.add(rank)
            if not message["regular"]:
                text = f"{self._named(rank)} has ended without a word: it was killed, or it crashed"
                self._failures.append((rank, text))


def failure_of_peers(seconds: float) -> str | None:
    """Which rank failed, and why, as soon as it is known; None: after `seconds` nothing is."""
    return None if world is None else world.wait_for_failure(seconds)


world: Peers | AbsentPeers | None = None
"""Of this process, once it is one of many."""
