"""The faults of the campaign: each is done to one process of a run, started for it, which ends by it."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.acceptance import campaign
from tests.acceptance.campaign import FURTHEST, INTERVAL, FaultError, telling_line
from tests.acceptance.recipe_process import RecipeProcess, RecipeRun
from tests.acceptance.small_disk import SmallDisk
from tests.file_modes import obey_file_modes
from tputrain.checkpoint.unsealed import is_written

LONGEST_EXIT = 30.0  # seconds from a SIGTERM to the end
LONGEST_HANG = 75.0  # seconds until a step that is stuck has ended the process, its start not counted
MAX_TRIES = 5  # a save lasts milliseconds: it may be over before the signal arrives


@dataclass(kw_only=True)
class Struck(campaign.Struck):
    """What a fault did to one process, which ended by it."""

    code: int
    expected_code: int
    process: int
    """Its number in the run."""


class MissedError(FaultError):
    """The run was over before the fault could come."""


@dataclass
class Scene:
    """A run, and what faults need to know about it."""

    run: RecipeRun
    choice: random.Random
    disk: SmallDisk
    compiled_before: dict[str, str]
    """Environment with which a process finds its programs compiled; without it, it compiles them."""
    base: int = 0
    """The step that the process started last goes on from."""

    def start(self, *program: str, compiles: bool = False) -> RecipeProcess:
        environment = {} if compiles else self.compiled_before
        self.base = self.next_begins_at()
        return self.run.start(program or ("tputrain.cli",), environment, preexec=obey_file_modes)

    def next_begins_at(self) -> int:
        """The step that the next process goes on from: it finishes a checkpoint whose files are written."""
        unsealed = self.run.checkpoints.directory.glob(".unfinished-step-*")
        written = [int(path.name.rpartition("-")[2]) for path in unsealed if is_written(path)]
        return max(self.run.newest_step(), *written, 0)

    def some_step(self) -> int:
        """One that the process just started will come to."""
        return self.base + self.choice.randint(3, FURTHEST)

    def reached(self, process: RecipeProcess) -> int:
        return max(self.run.last_step(), self.base) if process.trains() else self.base

    def struck(self, process: RecipeProcess, moment: str, expected_code: int) -> Struck:
        """`process` has ended."""
        return Struck(
            moment=f"{moment}, exit {process.process.returncode}",
            code=process.process.returncode,
            expected_code=expected_code,
            reached=self.reached(process),
            said=telling_line(process, process.output()),
            process=self.run.num_processes,
        )


Inflict = Callable[[Scene], Struck]


def killed(moment: str) -> Inflict:
    """SIGKILL to the process and its workers."""

    def inflict(scene: Scene) -> Struck:
        for _ in range(MAX_TRIES):
            process = scene.start()
            where = wait_for_moment(scene, process, moment)
            struck = kill(scene, process, where)
            if IS_AT[moment](process):  # asked again: the moment may have passed before the signal came
                break
        return struck

    return inflict


def terminated(moment: str) -> Inflict:
    """SIGTERM to the process."""

    def inflict(scene: Scene) -> Struck:
        process = scene.start(compiles=moment == "first step")
        where = wait_for_moment(scene, process, moment)
        struck, seconds = terminate(scene, process, where)
        struck.may_lose = 0
        if seconds > LONGEST_EXIT:
            struck.problems.append(f"took {seconds:.0f} s to leave")
        # One that is still starting leaves to the next what a process before it has written but not sealed.
        newest = scene.next_begins_at() if moment == "start-up" else scene.run.newest_step()
        if newest != struck.reached:
            struck.problems.append(f"left without a checkpoint of step {struck.reached}: newest is {newest}")
        if moment == "start-up" and struck.code == -signal.SIGTERM:
            struck.expected_code = -signal.SIGTERM  # Python itself was still starting
        struck.moment += f", {seconds:.1f} s to leave"
        return struck

    return inflict


def stays_full(scene: Scene) -> Struck:
    """The disk is full until after the end, which SIGTERM brings."""
    with full_disk(scene) as process:
        last_good = scene.run.newest_step()
        struck, _ = terminate(scene, process, "while saving and after", expected_code=1)
    struck.may_lose = struck.reached - last_good  # the disk took nothing that came after
    return struck


def is_full_for_a_while(scene: Scene) -> Struck:
    """The disk is full for one checkpoint; the next one is written, and SIGTERM loses nothing."""
    with full_disk(scene) as process:
        pass
    expect(process, lambda: said_after(process, "NOT SAVED", "saved "), "no checkpoint when there was room")
    struck, _ = terminate(scene, process, "for one checkpoint")
    struck.may_lose = 0
    return struck


@contextmanager
def full_disk(scene: Scene) -> Iterator[RecipeProcess]:
    """A process that found the disk full when it saved."""
    newest = scene.run.run_dir / "checkpoints" / f"step-{scene.run.newest_step()}"
    needed = sum(path.stat().st_size for path in newest.glob("*"))
    process = scene.start()
    wait_for_step(scene, process, scene.some_step())
    # What an earlier fault left is removed by the next save, and a save that is nearly done removes an old
    # checkpoint: either would make room.
    unfinished = (scene.run.run_dir / "checkpoints").glob
    expect(process, lambda: not any(unfinished(".unfinished-*")), "a save does not end")
    # None at all; or room for the tensors, but not for the rest.
    free = scene.choice.choice([0, max(0, needed - 4096)])

    def is_noticed() -> bool:
        scene.disk.fill(free)  # again: a checkpoint that was just saved has an old one removed
        return "NOT SAVED" in process.output()

    scene.disk.fill(free)
    if process.process.poll() is not None:
        scene.disk.make_room()
        raise MissedError(process.last_line())
    try:
        expect(process, is_noticed, "a full disk was not noticed")
        yield process
    finally:
        scene.disk.make_room()


def read_only(scene: Scene) -> Struck:
    """The run directory cannot be written to any more: the end fails, and so does a new start."""
    process = scene.start()
    wait_for_step(scene, process, scene.some_step())
    last_good = scene.run.newest_step()
    # Before the first checkpoint there is only one of them.
    directories = [path for path in (scene.run.run_dir, scene.run.run_dir / "checkpoints") if path.exists()]
    modes = [directory.stat().st_mode for directory in directories]
    for directory in directories:
        directory.chmod(0o555)
    try:
        expect(process, lambda: "NOT SAVED" in process.output(), "a read-only directory was not noticed")
        struck, _ = terminate(scene, process, "while saving and after", expected_code=1)
        again = scene.start()
        if (code := again.process.wait(timeout=60)) != 2:
            struck.problems.append(f"started again, still read-only: exit code {code}, {again.last_line()}")
    finally:
        for directory, mode in zip(directories, modes, strict=True):
            directory.chmod(mode)
    struck.may_lose = max(INTERVAL, struck.reached - last_good)
    return struck


def corrupted(how: str) -> Inflict:
    """SIGKILL, and the newest checkpoint is damaged: the next process must take the one before."""

    def inflict(scene: Scene) -> Struck:
        for _ in range(MAX_TRIES):
            process = scene.start()
            wait_for_step(scene, process, scene.some_step())
            expect(process, lambda: len(scene.run.checkpoints.steps()) >= 2, "no second checkpoint")
            struck = kill(scene, process, "the newest checkpoint")
            step = scene.run.newest_step()
            if scene.next_begins_at() == step:  # else a newer one is written, and the next process seals it
                break
        files = sorted((scene.run.run_dir / "checkpoints" / f"step-{step}").iterdir())
        damage(scene.choice.choice(files), how, scene.choice)
        struck.moment += f", of step {step}"
        struck.may_lose += INTERVAL  # what is gone with the damaged one
        if scene.run.newest_step() >= step:
            struck.problems.append(f"damaged checkpoint of step {step} accepted")
        return struck

    return inflict


def damage(path: Path, how: str, choice: random.Random) -> None:
    """`flip` a bit, `truncate` or `delete` a file."""
    content = bytearray(path.read_bytes())
    if how == "delete":
        path.unlink()
        return
    place = choice.randrange(len(content))
    if how == "flip":
        content[place] ^= 1 << choice.randrange(8)
    path.write_bytes(content[:place] if how == "truncate" else content)


def worker_killed(scene: Scene) -> Struck:
    """SIGKILL to one of the processes that make batches: the run ends and names it."""
    process = scene.start()
    where = wait_for_moment(scene, process, "step")
    worker = scene.choice.choice(workers_of(process.process.pid))
    os.kill(worker, signal.SIGKILL)
    wait_for_end(process, 60)
    struck = scene.struck(process, where, 1)
    if f"data worker (pid {worker}) " not in process.output():
        struck.problems.append("the worker is not named")
    return struck


def workers_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def stuck(scene: Scene) -> Struck:
    """A step that never returns: the watchdog reports it and ends the process."""
    scene.base = scene.next_begins_at()
    step = scene.base + scene.choice.randint(8, FURTHEST)  # the step time must have been learnt
    process = scene.start("tests.acceptance.faulty_process", "stuck", str(step))
    if not process.wait_for(lambda: process.has_reached(step - 3), may_fail=True):
        raise MissedError(process.last_line())
    began = time.monotonic()
    wait_for_end(process, LONGEST_HANG)
    struck = scene.struck(process, f"step {step}, ended after {time.monotonic() - began:.0f} s", 1)
    reports = [path.read_text() for path in scene.run.run_dir.glob("hang-*.txt")]
    told = (f"hangs at step {step - 1} in phase 'step'", " in hang")
    if not any(all(words in text for words in told) for text in reports):
        struck.problems.append("no report names the step and its stack")
    return struck


def not_a_number(policy: str) -> Inflict:
    """A batch whose loss is NaN, in a run whose `on_nonfinite` is `policy`."""

    def inflict(scene: Scene) -> Struck:
        scene.base = scene.next_begins_at()
        # After a checkpoint: the operation is found by going back to one.
        step = max(scene.base, INTERVAL) + scene.choice.randint(3, FURTHEST)
        process = scene.start("tests.acceptance.faulty_process", "nan", str(step))
        wait_for_end(process, 300)
        struck = scene.struck(process, f"step {step}", 2 if policy == "stop" else 0)
        report = scene.run.run_dir / "nonfinite" / f"step-{step}" / "report.json"
        if not report.exists() or "aten.div" not in report.read_text():
            struck.problems.append("no report names the operation that made it")
        return struck

    return inflict


# -- waiting ------------------------------------------------------------------------------------------------

IS_AT: dict[str, Callable[[RecipeProcess], bool]] = {
    "start-up": lambda process: not process.trains(),
    "first step": RecipeProcess.compiles_first_step,
    "step": RecipeProcess.trains,
    "save": RecipeProcess.saves,
    "evaluation": RecipeProcess.evaluates,
}


def wait_for_moment(scene: Scene, process: RecipeProcess, moment: str) -> str:
    """Wait until the process is at such a moment, and some time into it; returns where that is."""
    if moment in ("step", "save", "evaluation"):
        step = scene.some_step()
        wait_for_step(scene, process, step)
    if not process.wait_for(lambda: IS_AT[moment](process), poll_seconds=0.001, may_fail=True):
        raise MissedError(process.last_line())
    longest = {"start-up": 5.0, "first step": 1.0, "step": 0.05}.get(moment, 0.0)
    seconds = scene.choice.uniform(0, longest)
    time.sleep(seconds)
    if moment in ("start-up", "first step"):
        return f"{seconds:.1f} s into it, after {scene.base}"
    return f"after step {step}"


def wait_for_step(scene: Scene, process: RecipeProcess, step: int) -> None:
    if not process.wait_for(lambda: process.has_reached(step), poll_seconds=0.01, may_fail=True):
        raise MissedError(process.last_line())


def kill(scene: Scene, process: RecipeProcess, where: str) -> Struck:
    """SIGKILL to the process and its workers."""
    process.kill()
    return scene.struck(process, where, -signal.SIGKILL)


def terminate(
    scene: Scene, process: RecipeProcess, where: str, expected_code: int = 128 + signal.SIGTERM
) -> tuple[Struck, float]:
    """SIGTERM, and the seconds until the process had ended."""
    began = time.monotonic()
    process.process.send_signal(signal.SIGTERM)
    wait_for_end(process, 2 * LONGEST_EXIT)
    return scene.struck(process, where, expected_code), time.monotonic() - began


def wait_for_end(process: RecipeProcess, seconds: float) -> None:
    try:
        process.process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise FaultError(f"did not end within {seconds:.0f} s; it said: {process.last_line()}") from None


def expect(process: RecipeProcess, condition: Callable[[], bool], otherwise: str) -> None:
    """Wait until `condition` holds; FaultError where it does not within a minute, or the process ends."""
    until = time.monotonic() + 60
    process.wait_for(lambda: condition() or time.monotonic() > until, poll_seconds=0.01, may_fail=True)
    if not condition():
        process.kill()
        raise FaultError(f"{otherwise}; exit code {process.process.returncode}: {process.last_line()}")


def said_after(process: RecipeProcess, first: str, then: str) -> bool:
    _, found, rest = process.output().partition(first)
    return bool(found) and then in rest
