"""A process that is no rank: it hosts JAX's coordination service, and tells ranks what becomes of others.

    python service.py WORLD_SIZE

It prints its two ports, as JSON, and ends when all ranks have gone. If the service lived in a rank, the end
of that rank would end all others before they could say why.

Ranks hold a connection to it and send lines of JSON:

    {"rank": 3, "pid": 17, "host": "a"}                              first
    {"calls": [[GROUP, NUMBER, DIGEST, ASKS], ...], "texts": {...}}  collectives, about to be launched
    {"ask": [GROUP, NUMBER]}                                         tell when all have made this call
    {"tell": [GROUP, NUMBER, TEXT]}                                  to all of the group, with that call
    {"who": [GROUP, NUMBER]}                                         who has not made this call?
    {"senders": [[GROUP, NUMBER], ...]}                              the first of these that is a send
    {"beat": "..."}                                                  it lives, and does that
    {"awaited": SECONDS}                                             whom do all wait for?
    {"hang": true}                                                   it says that the run hangs
    {"error": "..."}, {"bye": true}                                  it fails, it ends

and are told `agreed` (all of a group made the call, where one asked), before it `told` (the texts of that
call, by rank), `failure` (of the whole group), `missing`, `sender` (the group of the send), `awaited`,
`hang`: the rank that said so first, and of each rank that came, failed or `left`: its process ended,
`regular` after a farewell. A group is its ranks, as "0,1,2"; a name and a colon may stand before. Imports
neither torch nor jax.
"""

import asyncio
import json
import signal
import socket
import sys
import time
from typing import Any

_FIRST_RANK = 600.0  # seconds until somebody must have come
# A host that is cut off ends no connection: it is asked after 30 s of silence, and given up 30 s later.
_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000),  # milliseconds, of what was sent
)


def notice_cut_off(connection: socket.socket) -> None:
    """Have a connection end where the other host is cut off or has lost its power."""
    for level, option, value in _ALIVE:
        connection.setsockopt(level, option, value)


class Calls:
    """The collectives that the ranks of one group have called, by number."""

    def __init__(self, group: str):
        self.ranks = [int(rank) for rank in group.rpartition(":")[2].split(",")]
        self.open: dict[int, dict[int, str]] = {}  # by number: digests by rank
        self.asked: set[int] = set()
        self.told: dict[int, dict[int, str]] = {}  # by number: texts by rank
        self.last: dict[int, tuple[int, str]] = {}  # by rank: number and digest

    def add(self, rank: int, number: int, digest: str, asks: bool) -> tuple[int, str] | None:
        """A rank calls; another rank that calls something else under this number, and what."""
        self.last[rank] = number, digest
        calls = self.open.setdefault(number, {})
        calls[rank] = digest
        if asks:
            self.asked.add(number)
        return next(((other, its) for other, its in calls.items() if its != digest), None)

    def is_over(self, number: int) -> bool:
        """Whether all have made this call, which this rank has."""
        return number not in self.open

    def left_by(self, rank: int) -> tuple[int, str] | None:
        """A rank that waits in a call which this one has not made, and the call's digest."""
        last = self.last.get(rank, (0, ""))[0]
        return next(
            (made for number in self.open if number > last for made in self.open[number].items()), None
        )

    def is_agreed(self, number: int) -> bool:
        """Whether all have made this call, which is over then; to be told if somebody asked."""
        if len(self.open[number]) < len(self.ranks):
            return False
        del self.open[number]
        was_asked = number in self.asked
        self.asked.discard(number)
        return was_asked


class Service:
    """The ranks that are connected, and what was said of them."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        self.writers: dict[int, asyncio.StreamWriter] = {}
        self.said: list[bytes] = []  # to be told to whoever comes later
        self.calls: dict[str, Calls] = {}  # by group
        self.texts: dict[int, dict[str, str]] = {}  # by rank and digest: the call and its Python line
        self.ended: set[int] = set()
        self.heard: dict[int, float] = {}  # by rank: when it said something last
        self.beats: dict[int, str] = {}  # by rank: what it does
        self.last: dict[int, str] = {}  # by rank: the digest of its last call
        self.receivers: dict[int, list[tuple[str, int]]] = {}  # by rank: the sends of which it takes any
        self.hang: int | None = None  # the rank that said so first
        self.all_gone = asyncio.Event()
        self.somebody_came = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank, regular = -1, False
        notice_cut_off(writer.get_extra_info("socket"))
        try:
            while line := await reader.readline():
                message = json.loads(line)
                self.heard[message.get("rank", rank)] = time.monotonic()
                if rank < 0:
                    rank = message["rank"]
                    self.writers[rank] = writer
                    self.somebody_came.set()
                    for earlier in self.said:
                        writer.write(earlier)
                    self.tell_others(rank, message)
                elif "calls" in message:
                    self.texts.setdefault(rank, {}).update(message["texts"])
                    for call in message["calls"]:
                        self.called(rank, *call)
                elif "ask" in message:
                    self.asked(writer, *message["ask"])
                elif "tell" in message:
                    group, number, text = message["tell"]
                    calls = self.calls.setdefault(group, Calls(group))
                    calls.told.setdefault(number, {})[rank] = text
                elif "who" in message:
                    self.tell(writer, {"missing": self.missing(*message["who"]), "of": message["who"]})
                elif "senders" in message:
                    self.receivers[rank] = message["senders"]
                    self.find_sender(rank)
                elif "beat" in message:
                    self.beats[rank] = message["beat"]
                elif "awaited" in message:
                    self.tell(writer, {"awaited": self.awaited(message["awaited"])})
                elif "hang" in message:
                    if self.hang is None:
                        self.hang = rank
                        self.tell_group([*self.writers], {"hang": rank})
                elif "error" in message:
                    self.tell_others(rank, {**message, "rank": rank})
                else:
                    regular = True
        except (OSError, ValueError):  # one that is cut off ends in a TimeoutError
            pass
        finally:
            writer.close()
        if rank < 0:
            return
        self.writers.pop(rank, None)
        self.ended.add(rank)
        for calls in self.calls.values() if regular else ():
            self.tell_left(calls, rank)
        self.tell_others(rank, {"left": rank, "regular": regular})
        if not self.writers:
            self.all_gone.set()

    def called(self, rank: int, group: str, number: int, digest: str, asks: bool) -> None:
        calls = self.calls.setdefault(group, Calls(group))
        self.last[rank] = digest
        other = calls.add(rank, number, digest, asks)
        if other is not None:
            its = f"rank {other[0]} calls {self.text_of(*other)}"
            text = f"rank {rank} calls {self.text_of(rank, digest)}; {its}"
            self.tell_group(calls.ranks, {"failure": f"ranks call different things: {text}"})
        elif calls.is_agreed(number):
            if (texts := calls.told.pop(number, None)) is not None:
                by_rank = [texts.get(each, "") for each in calls.ranks]
                self.tell_group(calls.ranks, {"told": by_rank, "of": [group, number]})
            self.tell_group(calls.ranks, {"agreed": [group, number]})
        for receiver in self.receivers.keys() & set(calls.ranks):
            self.find_sender(receiver)
        for ended in self.ended.intersection(calls.ranks):
            self.tell_left(calls, ended)

    def text_of(self, rank: int, digest: str) -> str:
        return self.texts.get(rank, {}).get(digest, "")

    def asked(self, writer: asyncio.StreamWriter, group: str, number: int) -> None:
        calls = self.calls.get(group)
        if calls is None or calls.is_over(number):
            self.tell(writer, {"agreed": [group, number]})
        else:
            calls.asked.add(number)

    def find_sender(self, receiver: int) -> None:
        """Tell a rank that receives from any other who has called `send` first, if somebody has."""
        for group, number in self.receivers[receiver]:
            made = self.calls[group].open.get(number, {}) if group in self.calls else {}
            for sender, digest in made.items():
                text = self.text_of(sender, digest)
                if sender != receiver and text.startswith("send(") and f", from rank {sender} to " in text:
                    del self.receivers[receiver]
                    self.tell_group([receiver], {"sender": group})
                    return

    def tell_left(self, calls: Calls, rank: int) -> None:
        """Tell a group that a rank has ended in front of one of its calls, if it has."""
        if rank in calls.ranks and (awaited := calls.left_by(rank)) is not None:
            text = f"rank {rank} has ended, and has not called {self.text_of(*awaited)}"
            self.tell_group(calls.ranks, {"failure": text, "by": rank})

    def missing(self, group: str, number: int) -> list[str]:
        """The ranks that have not made this call, each with its last one."""
        calls = self.calls.get(group)
        if calls is None:
            return []
        found = []
        for rank in calls.ranks:
            last = calls.last.get(rank)
            if last is None:
                found.append(f"rank {rank} has called nothing in this group")
            elif last[0] < number:
                found.append(f"rank {rank} has not called it; its last was {self.text_of(rank, last[1])}")
        return found

    def awaited(self, silence: float) -> list[tuple[int, str, str, float]]:
        """The ranks that others wait for, and that wait for nobody: each with its last call, what it does,
        and the seconds since it said something. Where all have made the same calls, those that have said
        nothing for more than `silence` seconds: they may have stopped in the middle of one.
        """
        waiting: set[int] = set()
        missing: set[int] = set()
        for calls in self.calls.values():
            for made in calls.open.values():
                waiting.update(made)
                missing.update(each for each in calls.ranks if each not in made)
        now = time.monotonic()
        silent = {each for each in self.writers if now - self.heard[each] > silence}
        return [
            (
                rank,
                self.text_of(rank, self.last.get(rank, "")),
                self.beats.get(rank, ""),
                now - self.heard.get(rank, now),
            )
            for rank in sorted(missing - waiting or missing or silent)
        ]

    def tell_others(self, rank: int, message: dict[str, Any]) -> None:
        self.said.append((json.dumps(message) + "\n").encode())
        self.tell_group([each for each in self.writers if each != rank], message)

    def tell_group(self, ranks: list[int], message: dict[str, Any]) -> None:
        for rank in ranks:
            if rank in self.writers:
                self.tell(self.writers[rank], message)

    @staticmethod
    def tell(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
        writer.write((json.dumps(message) + "\n").encode())

    async def until_all_gone(self) -> None:
        await asyncio.wait_for(self.somebody_came.wait(), _FIRST_RANK)
        while True:
            self.all_gone.clear()
            if not self.writers:
                if len(self.ended) >= self.world_size:
                    return
                await asyncio.sleep(5)  # somebody may be about to come
                if not self.writers:
                    return
            await self.all_gone.wait()


async def main(world_size: int) -> None:
    from jaxlib import _jax

    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    # Ranks find out by themselves that others have ended: nothing here is to abort them.
    never = 10**7
    coordination = _jax.get_distributed_runtime_service(
        f"[::]:{port}", world_size, heartbeat_timeout=never, shutdown_timeout=1, recoverable=True
    )
    service = Service(world_size)
    both = socket.has_dualstack_ipv6()
    family, anywhere = (socket.AF_INET6, "::") if both else (socket.AF_INET, "")
    listening = socket.create_server((anywhere, 0), family=family, dualstack_ipv6=both)
    server = await asyncio.start_server(service.serve, sock=listening, limit=2**26)  # bytes of a line
    print(json.dumps({"jax": port, "peers": listening.getsockname()[1]}), flush=True)
    await service.until_all_gone()
    server.close()
    del coordination


if __name__ == "__main__":
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)  # it ends with its ranks, who may have to save something first
    asyncio.run(main(int(sys.argv[1])))
