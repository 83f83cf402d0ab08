"""Whom all ranks wait for, as the service knows it from their calls."""

import json

from tpu_backend.distributed.service import Service


def called(service: Service, group: str, number: int, *ranks: int) -> None:
    for rank in ranks:
        service.called(rank, group, number, f"{group}:{number}", False)


def awaited(service: Service) -> list[int]:
    return [rank for rank, *_ in service.awaited()]


def test_nobody_is_awaited_where_all_have_made_the_same_calls():
    service = Service(4)
    called(service, "hosts:0,1,2,3", 1, 0, 1, 2, 3)
    assert awaited(service) == []


def test_the_rank_that_has_not_called_is_awaited_with_what_is_known_of_it():
    service = Service(4)
    service.texts["hosts:0,1,2,3:1"] = "an exchange"
    service.beats[2] = "waiting for data"
    called(service, "hosts:0,1,2,3", 1, 0, 1, 2, 3)
    called(service, "hosts:0,1,2,3", 2, 0, 1, 3)
    ((rank, call, beat, silent),) = service.awaited()
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


class Told:
    """The writer of a rank's connection."""

    def __init__(self) -> None:
        self.messages: list[dict[str, object]] = []

    def write(self, line: bytes) -> None:
        self.messages.append(json.loads(line))


def test_a_rank_that_receives_from_any_is_told_of_the_first_send_and_of_no_other_call():
    service, told = Service(3), Told()
    service.writers[2] = told  # type: ignore[assignment]
    service.texts.update({"1,2:1": "all_reduce(Float[1], sum)", "0,2:1": "send(Float[1])"})
    service.receivers[2] = [("0,2", 1), ("1,2", 1)]
    called(service, "1,2", 1, 1)
    assert told.messages == []
    called(service, "0,2", 1, 0)
    assert told.messages == [{"sender": "0,2"}]
    assert service.receivers == {}
