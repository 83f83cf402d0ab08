"""Whom all ranks wait for, as the service knows it from their calls."""

import asyncio
import errno
import json
import time
from unittest.mock import Mock

from tpu_backend.distributed.service import Service


def called(service: Service, group: str, number: int, *ranks: int) -> None:
    for rank in ranks:
        service.called(rank, group, number, f"{group}:{number}", False)


def awaited(service: Service) -> list[int]:
    return [rank for rank, *_ in service.awaited(silence=6.0)]


def test_nobody_is_awaited_where_all_have_made_the_same_calls():
    service = Service(4)
    called(service, "hosts:0,1,2,3", 1, 0, 1, 2, 3)
    assert awaited(service) == []


def test_the_rank_that_has_not_called_is_awaited_with_what_is_known_of_it():
    service = Service(4)
    service.texts[2] = {"hosts:0,1,2,3:1": "an exchange"}
    service.beats[2] = "waiting for data"
    called(service, "hosts:0,1,2,3", 1, 0, 1, 2, 3)
    called(service, "hosts:0,1,2,3", 2, 0, 1, 3)
    ((rank, call, beat, silent),) = service.awaited(silence=6.0)
    assert (rank, call, beat) == (2, "an exchange", "waiting for data")
    assert silent >= 0


def test_a_rank_that_waits_itself_is_not_the_one_that_is_awaited():
    service = Service(4)
    called(service, "0,1", 1, 0)  # waits for 1,
    called(service, "1,3", 1, 1)  # which waits for 3
    called(service, "0,1,2,3", 1, 2)
    assert awaited(service) == [3]


def test_ranks_that_wait_for_each_other_are_all_awaited():
    service = Service(2)
    called(service, "0,1", 1, 0)
    called(service, "hosts:0,1", 1, 1)
    assert awaited(service) == [0, 1]


def test_where_no_rank_is_late_the_one_that_says_nothing_is_awaited():
    """It was stopped after it had told of its call: 15 of 100 steps of a small model are exchanges."""
    service, now = Service(3), time.monotonic()
    called(service, "hosts:0,1,2", 1, 0, 1, 2)
    service.writers = dict.fromkeys(range(3), Mock())
    service.heard = {0: now - 30, 1: now - 1, 2: now}
    assert awaited(service) == [0]
    called(service, "hosts:0,1,2", 2, 0, 2)
    assert awaited(service) == [1]


def test_a_call_is_named_by_the_line_of_the_rank_that_made_it():
    service, told = Service(2), Told()
    service.writers[0] = told  # type: ignore[assignment]
    service.texts = {0: {"0,1:1": "a, at line 3"}, 1: {"0,1:1": "a, at line 5"}}
    called(service, "0,1", 1, 0)
    service.ended.add(1)
    service.tell_left(service.calls["0,1"], 1)
    assert told.messages[-1]["failure"] == "rank 1 has ended, and has not called a, at line 3"
    assert service.missing("0,1", 2) == [
        "rank 0 has not called it; its last was a, at line 3",
        "rank 1 has called nothing in this group",
    ]


class Told:
    """The writer of a rank's connection."""

    def __init__(self) -> None:
        self.messages: list[dict[str, object]] = []

    def write(self, line: bytes) -> None:
        self.messages.append(json.loads(line))


def test_a_rank_that_receives_from_any_is_told_of_the_first_send_and_of_no_other_call():
    service, told = Service(4), Told()
    service.writers[2] = told  # type: ignore[assignment]
    service.texts = {
        0: {"0,2:1": "send(Float[1], from rank 0 to rank 2)"},
        1: {"1,2:1": "all_reduce(Float[1], sum)"},
        3: {"2,3:1": "send(Float[1], from rank 2 to rank 3)"},
    }
    service.receivers[2] = [("0,2", 1), ("1,2", 1), ("2,3", 1)]
    called(service, "1,2", 1, 1)
    called(service, "2,3", 1, 3)
    assert told.messages == []
    called(service, "0,2", 1, 0)
    assert told.messages == [{"sender": "0,2"}]
    assert service.receivers == {}


class CutOff:
    """A rank's connection, which ends as that of a host whose wire was cut: after the first line."""

    def __init__(self) -> None:
        self.lines = iter([b'{"rank": 1, "pid": 7, "host": "b"}\n'])
        self.writer = Mock()

    async def readline(self) -> bytes:
        for line in self.lines:
            return line
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")


def test_a_rank_that_is_cut_off_counts_as_ended():
    """The service lived for ever otherwise."""
    service, rank = Service(2), CutOff()
    asyncio.run(service.serve(rank, rank.writer))  # type: ignore[arg-type]
    assert service.ended == {1}
    assert service.all_gone.is_set()
