"""A process that is no rank: it hosts JAX's coordination service, and tells ranks what became of others.

    python service.py WORLD_SIZE ADDRESS

It prints its two ports, as JSON, and ends when all ranks have gone. If the service lived in a rank, the end of
that rank would end all others before they could say why.

Ranks hold a connection to it and send lines of JSON: {"rank": 3, "pid": 17, "host": "a"} first; {"error":
"..."} where they fail; {"bye": true} on a regular end. Each line about a rank goes to all others, and a
connection that ends without a farewell is {"gone": 3}. Imports neither torch nor jax.
"""

import asyncio
import json
import signal
import socket
import sys

_FIRST_RANK = 600.0  # seconds until somebody must have come


class Service:
    """The ranks that are connected, and what was said of them."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        self.writers: dict[int, asyncio.StreamWriter] = {}
        self.said: list[bytes] = []  # to be told to whoever comes later
        self.num_ended = 0
        self.all_gone = asyncio.Event()
        self.somebody_came = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank, regular = None, False
        try:
            while line := await reader.readline():
                message = json.loads(line)
                if rank is None:
                    rank = message["rank"]
                    self.writers[rank] = writer
                    self.somebody_came.set()
                    for earlier in self.said:
                        writer.write(earlier)
                elif "bye" in message:
                    regular = True
                if "error" in message or "rank" in message:
                    self.tell({**message, "rank": rank})
        except (ConnectionError, ValueError):
            pass
        finally:
            writer.close()
        if rank is None:
            return
        self.writers.pop(rank, None)
        self.tell({"rank": rank, "gone": not regular, "bye": regular})
        self.num_ended += 1
        if not self.writers:
            self.all_gone.set()

    def tell(self, message: dict) -> None:
        line = (json.dumps(message) + "\n").encode()
        self.said.append(line)
        for rank, writer in self.writers.items():
            if rank != message["rank"]:
                writer.write(line)

    async def until_all_gone(self) -> None:
        await asyncio.wait_for(self.somebody_came.wait(), _FIRST_RANK)
        while self.writers or self.num_ended < self.world_size:
            self.all_gone.clear()
            await self.all_gone.wait()
            if not self.writers:
                await asyncio.sleep(2)  # somebody may be about to come
                if not self.writers:
                    return


async def main(world_size: int, address: str) -> None:
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
    family, any_address = (socket.AF_INET6, "::") if both else (socket.AF_INET, "")
    listening = socket.create_server((any_address, 0), family=family, dualstack_ipv6=both)
    server = await asyncio.start_server(service.serve, sock=listening)
    print(json.dumps({"jax": port, "peers": listening.getsockname()[1]}), flush=True)
    await service.until_all_gone()
    server.close()
    del coordination


if __name__ == "__main__":
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)  # it ends with its ranks, who may have to save something first
    asyncio.run(main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""))
