"""Two hosts on this machine: network namespaces with a wire between them, which can be cut."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType

_ADDRESSES = ("10.213.7.1", "10.213.7.2")
_PORT = 29517
_NAMESPACES = Path("/etc/netns")


class TwoHosts:
    """Context with both; needs root and the command `ip`."""

    def __init__(self) -> None:
        self._names = tuple(f"ranks-{os.getpid()}-{host}" for host in (0, 1))

    @staticmethod
    def why_not() -> str | None:
        """What this machine lacks; None: nothing."""
        probe = ["unshare", "-n", "ip", "link", "add", "wire0", "type", "veth", "peer", "name", "wire1"]
        try:
            done = subprocess.run(probe, capture_output=True, text=True)
        except OSError as error:
            return str(error)
        return (done.stderr.strip() or f"ip ended with {done.returncode}") if done.returncode else None

    def __enter__(self) -> "TwoHosts":
        named = [f"{address} {name}" for address, name in zip(_ADDRESSES, self._names, strict=True)]
        for name in self._names:
            # What stands there is /etc/hosts in the namespace: a rank finds its own address by its name.
            directory = _NAMESPACES / name
            directory.mkdir(parents=True)
            (directory / "hosts").write_text("\n".join(["127.0.0.1 localhost", *named, ""]))
            _ip("netns", "add", name)
        one, other = self._names
        _ip("-n", one, "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", other)
        for name, address in zip(self._names, _ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "wire")
            for device in ("lo", "wire"):
                _ip("-n", name, "link", "set", device, "up")
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for name in self._names:
            _ip("netns", "delete", name)
            shutil.rmtree(_NAMESPACES / name)

    def torchrun(self, host: int, num_ranks: int) -> tuple[str, ...]:
        """The program that starts the ranks of one host; as `RecipeRun.start` takes it."""
        here = Path(__file__).stem
        own = (f"tests.acceptance.{here}", self._names[host])
        options = ("--nnodes=2", f"--nproc-per-node={num_ranks}", f"--node-rank={host}")
        where = (f"--master-addr={_ADDRESSES[0]}", f"--master-port={_PORT}", "-m", "tputrain")
        return (*own, *options, *where)

    def cut(self) -> None:
        """Nothing passes any more, and nobody is told."""
        _ip("-n", self._names[0], "link", "set", "wire", "down")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def main(name: str, *arguments: str) -> None:
    """Become torchrun in the namespace of that name, on a host of that name."""
    named = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'
    torchrun = (sys.executable, "-m", "torch.distributed.run", *arguments)
    os.execvp("ip", ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", named, name, *torchrun])


if __name__ == "__main__":
    main(*sys.argv[1:])
