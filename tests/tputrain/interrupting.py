"""Sends a signal to a run with data workers at some moment, as terminals and `timeout` do."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.tputrain.run_with_workers import MOMENTS, STEPS
from tputrain.checkpoint.integrity import verify

ROOT = Path(__file__).resolve().parents[2]
_NOISE = ("Traceback", "Exception ignored", "Error", "out of memory", "terminate called", "leaked")


@dataclass(frozen=True)
class Try:
    """One run, and how it is interrupted."""

    options: tuple[str, ...] = ()
    moment: str = "stepping"
    delay: float = 0.0
    """Seconds after the moment."""
    number: int = signal.SIGINT
    sender: str = "terminal"
    """terminal: to all processes of the group; timeout: to the run, then to all; process: to the run alone;
    twice: to all, and to all again two seconds later."""

    @staticmethod
    def drawn(choice: random.Random) -> "Try":
        """Any of them."""
        method = choice.choice(("fork", "spawn"))
        options = (method, *(name for name in ("persistent", "tpu") if choice.random() < 0.4))
        return Try(
            options,
            choice.choice(MOMENTS[:-1]),
            choice.choice((0.0, choice.uniform(0, 0.2), choice.uniform(0, 5))),
            choice.choice((signal.SIGINT, signal.SIGINT, signal.SIGTERM)),
            choice.choice(("terminal", "terminal", "timeout", "process", "twice")),
        )

    def problems(self, run_dir: Path) -> list[str]:
        """What is not as it should be; empty: nothing."""
        command = [sys.executable, "-m", "tests.tputrain.run_with_workers", str(run_dir), *self.options]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        said: list[str] = []
        reached = threading.Event()

        def read() -> None:
            for line in process.stdout:
                said.append(line)
                if line == f"moment: {self.moment}\n":
                    reached.set()
            reached.set()

        reader = threading.Thread(target=read)
        reader.start()
        try:
            assert reached.wait(240), "".join(said)
            time.sleep(self.delay)
            self._send(process)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=90)
            orphans = self._orphans(process)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            reader.join()
        return self._judge(run_dir, process.returncode, said, orphans)

    def _send(self, process: subprocess.Popen) -> None:
        with suppress(ProcessLookupError):
            if self.sender in ("timeout", "process"):
                process.send_signal(self.number)
            if self.sender != "process":
                os.killpg(process.pid, self.number)
            if self.sender == "twice":
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=2)
                os.killpg(process.pid, self.number)

    @staticmethod
    def _orphans(process: subprocess.Popen) -> bool:
        """Whether processes of the group stay, 30 s after the run has ended."""
        until = time.monotonic() + 30
        while time.monotonic() < until:
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                return False
            time.sleep(0.1)
        return True

    def _judge(self, run_dir: Path, code: int, said: list[str], orphans: bool) -> list[str]:
        found = [line.strip() for line in said if any(noise in line for noise in _NOISE)]
        if orphans:
            found.append("processes stay behind")
        has_ended = "moment: ended\n" in said  # the signal came after the last moment that was any of it
        is_second = any("leaving at once" in line for line in said)
        if code != 128 + self.number and not (has_ended and code in (0, -self.number)):
            found.append(f"exit code {code}")
        saved = sorted((run_dir / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))
        if saved:
            verify(saved[-1])
        elif not is_second:
            found.append("no checkpoint")
        if has_ended and (not saved or saved[-1].name != f"step-{STEPS}"):
            found.append("the last step is not saved")
        if found and has_ended:
            found = [each for each in found if each in ("no checkpoint", "the last step is not saved")]
        return found and [*found, f"said: {''.join(said)[-3000:]}"]


def main(tries: int, seed: int, directory: Path) -> int:
    """So many drawn tries; returns how many failed."""
    choice, failures = random.Random(seed), 0
    for number in range(tries):
        one = Try.drawn(choice)
        began = time.monotonic()
        problems = one.problems(directory / f"{seed}-{number}")
        failures += bool(problems)
        verdict = "; ".join(problems) or "well"
        print(f"{number + 1}/{tries} {time.monotonic() - began:.0f} s {one}: {verdict}", flush=True)
    print(f"{failures} of {tries} tries failed", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])) > 0)
