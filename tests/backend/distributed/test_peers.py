"""What a rank makes of what the service tells it; the service is played here."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

from tpu_backend.distributed.peers import Peers
from tpu_backend.distributed.service import _ALIVE


@contextmanager
def rank_of(serve: Callable[[IO[str]], None]) -> Iterator[Peers]:
    """Rank 0 of 2, whose service is `serve`; the connection ends when that returns, or with the context."""

    def accept() -> None:
        connection, _ = listening.accept()
        with connection, connection.makefile("rw") as lines:
            serve(lines)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=accept)
        thread.start()
        peers = Peers("127.0.0.1", listening.getsockname()[1], rank=0, world_size=2, timeout=60)
        yield peers
        peers._socket.shutdown(socket.SHUT_WR)
        thread.join()


def test_a_service_that_is_killed_while_it_writes_counts_as_ended():
    def serve(lines: IO[str]) -> None:
        lines.readline()
        lines.write('{"rank": 1, "pid": 7, "host": "b"}\n{"told": ["half a t')

    with rank_of(serve) as peers:
        failure = peers.wait_for_failure(10)
    assert failure == "the process that carries word between the ranks has ended"


def test_the_host_of_the_service_is_noticed_within_a_minute_where_it_is_cut_off():
    def serve(lines: IO[str]) -> None:
        lines.read()  # until the rank has gone

    with rank_of(serve) as peers:
        options = {name: peers._socket.getsockopt(level, name) for level, name, _ in _ALIVE}
    assert options[socket.SO_KEEPALIVE] == 1
    assert options[socket.TCP_KEEPIDLE] + options[socket.TCP_KEEPINTVL] * options[socket.TCP_KEEPCNT] == 60
    assert options[socket.TCP_USER_TIMEOUT] == 60_000


def test_calls_that_one_thread_waits_for_are_not_compared_yet_for_another():
    is_asked, is_agreed = threading.Event(), threading.Event()

    def serve(lines: IO[str]) -> None:
        for line in lines:
            message = json.loads(line)
            if "ask" in message:
                is_asked.set()
                assert is_agreed.wait(60)
                lines.write(json.dumps({"agreed": message["ask"]}) + "\n")
                lines.flush()

    confirmed = []

    def confirm() -> None:
        peers.confirm(60)
        confirmed.append(threading.current_thread())

    with rank_of(serve) as peers:
        peers.call("0,1", 1, "digest")
        threads = [threading.Thread(target=confirm) for _ in range(2)]
        threads[0].start()
        assert is_asked.wait(60)
        threads[1].start()
        threads[1].join(0.5)
        confirmed_early = list(confirmed)
        is_agreed.set()
        for thread in threads:
            thread.join(60)
    assert confirmed_early == []
    assert set(confirmed) == set(threads)
