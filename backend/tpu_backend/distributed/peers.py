"""What becomes of the other ranks: a connection to the service, and a thread that reads from it."""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
from typing import Any


class Peers:
    """The other ranks, as far as this one was told of them."""

    def __init__(self, host: str, port: int, rank: int, world_size: int):
        self.rank, self.world_size = rank, world_size
        self._socket = socket.create_connection((host, port), timeout=60)
        self._socket.settimeout(None)
        self._lock = threading.Lock()
        self._known: dict[int, dict[str, Any]] = {}  # by rank: process and host
        self._errors: dict[int, str] = {}
        self._gone: set[int] = set()
        self._ended: set[int] = set()
        self._say({"rank": rank, "pid": os.getpid(), "host": socket.gethostname()})
        threading.Thread(target=self._listen, name="tpu_peers", daemon=True).start()
        self._hook = sys.excepthook
        sys.excepthook = self._on_exception
        atexit.register(self._say_farewell)

    def failure(self) -> str | None:
        """What other ranks have failed of, if any has: one line."""
        with self._lock:
            if self._errors:
                rank, error = next(iter(self._errors.items()))
                return f"{self._named(rank)} failed: {error}"
            if self._gone:
                return f"{self._named(min(self._gone))} has ended without a word (killed, or crashed)"
            if self._ended:
                return f"{self._named(min(self._ended))} has ended"
            return None

    def publish(self, error: str) -> None:
        """Tell the others that this rank fails, and of what."""
        self._say({"error": error})

    def _named(self, rank: int) -> str:
        known = self._known.get(rank)
        return f"rank {rank}" if known is None else f"rank {rank} (process {known['pid']} on {known['host']})"

    def _say(self, message: dict[str, Any]) -> None:
        try:
            self._socket.sendall((json.dumps(message) + "\n").encode())
        except OSError:
            pass  # the service is gone: nobody is left to be told

    def _listen(self) -> None:
        with self._socket.makefile() as lines:
            try:
                for line in lines:
                    self._hear(json.loads(line))
            except OSError:
                return

    def _hear(self, message: dict[str, Any]) -> None:
        rank = message["rank"]
        with self._lock:
            if "pid" in message:
                self._known[rank] = message
            elif "error" in message:
                self._errors.setdefault(rank, message["error"])
            elif message["gone"]:
                self._gone.add(rank)
            else:
                self._ended.add(rank)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        text = str(error).strip().splitlines()
        self.publish(f"{kind.__name__}: {text[0] if text else ''}")
        self._hook(kind, error, trace)

    def _say_farewell(self) -> None:
        self._say({"bye": True})
