"""Processes that begin with PyTorch and JAX imported: a rank then costs a fork, not two seconds of imports.

A server imports both and uses neither, so it has one thread and no device. It forks a child for each request.
The child takes its environment variables and its output from the request, and runs its source as `python -c`
does, to the interpreter's own end.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time

_SERVER = """
import json, os, select, signal, socket, sys
import torch, torch._dynamo, torch.distributed, torch.distributed.tensor, torch.distributed.fsdp, jax
from tpu_backend.distributed import launched

assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"
server = socket.socket(fileno=int(sys.argv[1]))
ended, end = os.pipe()
os.set_blocking(ended, False)
os.set_blocking(end, False)
signal.set_wakeup_fd(end)
signal.signal(signal.SIGCHLD, lambda *_: None)
statuses = {}
while True:
    ready, _, _ = select.select([server, ended], [], [])
    if ended in ready:
        os.read(ended, 4096)
        while statuses:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            os.write(statuses[pid], b"%d" % os.waitstatus_to_exitcode(status))
            os.close(statuses.pop(pid))
    if server in ready:
        request, files, _, _ = socket.recv_fds(server, 1 << 20, 3)
        if not request:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            break
        server.send(b"%d" % pid)
        statuses[pid] = files.pop()
        for file in files:
            os.close(file)
signal.set_wakeup_fd(-1)
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
server.close()
for file in (ended, end, *statuses.values(), files[2]):
    os.close(file)
for file, standard in zip(files, (1, 2)):
    os.dup2(file, standard)
    os.close(file)
request = json.loads(request)
os.environ.clear()
os.environ.update(request["environment"])
launched.mark()
sys.argv[:] = ["-c"]
exec(compile(request["source"], "<string>", "exec"))
"""


class PreloadedProcess:
    """A child of a server, with what the tests use of `subprocess.Popen`."""

    def __init__(self, connection: socket.socket, source: str, environment: dict[str, str]):
        pipes = [os.pipe() for _ in range(3)]
        message = json.dumps({"source": source, "environment": environment}).encode()
        socket.send_fds(connection, [message], [write for _, write in pipes])
        for _, write in pipes:
            os.close(write)
        self.pid = int(connection.recv(32))
        self.returncode: int | None = None
        self._status = pipes[2][0]
        self._output = {read: b"" for read, _ in pipes[:2]}

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._status, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired("a preloaded process", timeout or 0)
            self.returncode = int(os.read(self._status, 32))
            os.close(self._status)
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(timeout=0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Standard output and standard error, to their end. Raises subprocess.TimeoutExpired."""
        end = time.monotonic() + (1e9 if timeout is None else timeout)
        with selectors.DefaultSelector() as selector:
            for file in self._output:
                selector.register(file, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(max(end - time.monotonic(), 0))
                if not ready:
                    raise subprocess.TimeoutExpired("a preloaded process", timeout or 0)
                for key, _ in ready:
                    data = os.read(key.fd, 1 << 16)
                    self._output[key.fd] += data
                    if not data:
                        selector.unregister(key.fd)
        self.wait(max(end - time.monotonic(), 0))
        for file in self._output:
            os.close(file)
        stdout, stderr = (data.decode() for data in self._output.values())
        return stdout, stderr


def start_server(environment: dict[str, str]) -> socket.socket:
    """The connection to a new server, which ends when that is closed. Servers hash strings differently, as
    processes that are unrelated do.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _SERVER, str(theirs.fileno())],
            env=environment,
            pass_fds=[theirs.fileno()],
        )
    return ours
