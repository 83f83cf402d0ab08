"""The faults of the campaign with ranks: each is done to a command of four ranks while it trains."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.acceptance.campaign import FURTHEST, INTERVAL, FaultError, Struck, telling_line
from tests.acceptance.faults import damage
from tests.acceptance.recipe_process import RecipeProcess, RecipeRun, resumed_at
from tests.acceptance.small_disk import SmallDisk
from tests.acceptance.two_hosts import TwoHosts

NUM_RANKS = 4
LONGEST_START = 240.0  # seconds, on a machine that others use too
LONGEST_RECOVERY = 180.0  # from the fault until all ranks train again, a start and all
LONGEST_HANG = 90.0  # more than that, until a rank that does not answer is noticed and ended
LONGEST_EXIT = 60.0  # until a command that was told to stop has ended
LONGEST_TIDYING = 15.0  # until nothing is left of a command or of ranks that have ended
MARK = "RANK_CAMPAIGN"
"""Variable: all processes of a command have it, whoever started them."""


class Command:
    """One command: a launcher, its ranks, and the service that these share."""

    def __init__(self, run: RecipeRun, program: tuple[str, ...], environment: dict[str, str]):
        self.mark = f"{run.directory}-{run.num_processes + 1}"
        self.process: RecipeProcess = run.start(program, environment | {MARK: self.mark})
        self.run = run
        self._told_before = 0  # characters of output that earlier starts of the ranks have made

    @property
    def launcher(self) -> int:
        return self.process.process.pid

    @property
    def code(self) -> int | None:
        return self.process.process.poll()

    def said(self) -> str:
        """Since the ranks were started last, as far as the campaign knows."""
        return self.process.output()[self._told_before :]

    def begin_anew(self) -> None:
        """What was said up to here is of ranks that have ended."""
        self._told_before += len(self.said())

    def trains(self) -> bool:
        # The line in which the first step's time is told.
        return ", is recorded, and its program compiled or found ... " in self.said()

    def ranks(self) -> dict[int, int]:
        """Process ids by rank."""
        found = {}
        for process, environment, command in self.processes():
            if "RANK" in environment and " run " in command and "service.py" not in command:
                found[int(environment["RANK"])] = process
        return found

    def send(self, rank: int, number: signal.Signals) -> None:
        """A signal to one rank."""
        process = self.ranks().get(rank)
        if process is None:
            raise FaultError(f"rank {rank} is not there to be sent {number.name}; {self.process.last_line()}")
        os.kill(process, number)

    def processes(self) -> Iterator[tuple[int, dict[str, str], str]]:
        """All that live: their ids, environments and command lines."""
        for process in Path("/proc").glob("[0-9]*"):
            try:
                values = (process / "environ").read_text(errors="replace").split("\0")
                command = (process / "cmdline").read_text(errors="replace").replace("\0", " ")
                is_dead = (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                continue
            if f"{MARK}={self.mark}" in values and not is_dead:
                yield int(process.name), dict(each.partition("=")[::2] for each in values), command

    def wait_for(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Return as soon as `condition` holds. FaultError where the command ends, or after `seconds`."""
        until = time.monotonic() + seconds
        while not condition():
            if self.code is not None:
                raise FaultError(f"{what}: ended with {self.code}: {self.process.last_line()}")
            if time.monotonic() > until:
                raise FaultError(f"{what}: not within {seconds:.0f} s; {self.process.last_line()}")
            time.sleep(0.005)

    def wait_for_end(self, seconds: float) -> None:
        try:
            self.process.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise FaultError(f"did not end within {seconds:.0f} s; {self.process.last_line()}") from None

    def gone(self, processes: set[int], seconds: float = LONGEST_TIDYING) -> list[str]:
        """Which of these are left after a while, by their command lines."""
        until = time.monotonic() + seconds
        while left := [(pid, command) for pid, _, command in self.processes() if pid in processes]:
            if time.monotonic() > until:
                return [f"{pid}: {command[-60:]}" for pid, command in left]
            time.sleep(0.05)
        return []

    def end_all(self) -> None:
        """SIGKILL to everything: the campaign has nothing more to learn from it."""
        while left := [process for process, _, _ in self.processes()]:
            for process in left:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            self.process.process.poll()
            time.sleep(0.05)


@dataclass
class Scene:
    """A run, and the command that trains it now, if one does."""

    run: RecipeRun
    choice: random.Random
    disk: SmallDisk
    environment: dict[str, str]
    command: Command | None = None
    base: int = 0
    """The step that the ranks went on from last."""

    def training(self, *program: str) -> Command:
        """A command whose ranks train; with `program` a new one, which is that."""
        if self.command is not None and program:
            self.stop()
        if self.command is None:
            self.base = self.run.newest_step()
            self.command = Command(self.run, program or ("tputrain.cli",), self.environment)
        self.command.wait_for(self.command.trains, LONGEST_START, "to start")
        return self.command

    def stop(self) -> None:
        """End the command that trains, so that another one can begin."""
        assert self.command is not None
        os.kill(self.command.launcher, signal.SIGTERM)
        self.command.wait_for_end(LONGEST_EXIT)
        self.forget()

    def forget(self) -> None:
        if self.command is not None:
            self.command.end_all()
        self.command = None

    def wait_for_some_step(self, command: Command, nearest: int = 3) -> int:
        step = self.base + self.choice.randint(nearest, FURTHEST)
        command.wait_for(lambda: self.run.last_step() >= step, 120, f"to come to step {step}")
        return step

    def any_rank(self) -> int:
        return self.choice.randrange(NUM_RANKS)


Inflict = Callable[[Scene], Struck]


def ranks_start_again(
    scene: Scene, command: Command, before: set[int], moment: str, seconds: float = LONGEST_RECOVERY
) -> Struck:
    """Wait until the launcher has started all ranks again and they train."""
    began = time.monotonic()
    command.wait_for(lambda: "failed first: " in command.said(), seconds, "to notice it")
    reached, said = scene.run.last_step(), ""
    being_saved = [*(scene.run.run_dir / "checkpoints").glob(".unfinished-step-*")]
    begun = min((int(path.name.rpartition("-")[2]) for path in being_saved), default=reached)
    problems = []
    command.wait_for(lambda: "(restart " in command.said(), seconds, "to be started again")
    said = next(line for line in command.said().splitlines() if "failed first: " in line)
    if left := command.gone(before - {command.launcher}):
        problems.append(f"left of the ranks before: {', '.join(left)}")
    command.begin_anew()
    command.wait_for(command.trains, seconds, "to train again")
    resumed = resumed_at(command.said()) or 0
    scene.base = resumed
    return Struck(
        moment=f"{moment}, {time.monotonic() - began:.0f} s",
        reached=reached,
        resumed=resumed,
        may_lose=INTERVAL + max(0, reached - begun),  # the write in flight counts from its end on
        said=said,
        problems=problems,
    )


def command_ends(
    scene: Scene, command: Command, moment: str, expected: int, seconds: float = LONGEST_EXIT
) -> Struck:
    """Wait until the command has ended with everything that it had started; the next one goes on."""
    began = time.monotonic()
    command.wait_for_end(seconds)
    problems = [f"exit code {command.code}, expected {expected}"] if command.code != expected else []
    everything = {process for process, _, _ in command.processes()}
    if left := command.gone(everything):
        problems.append(f"left behind: {', '.join(left)}")
        command.end_all()
    took = time.monotonic() - began
    scene.command = None
    return Struck(
        moment=f"{moment}, {took:.0f} s",
        reached=scene.run.last_step(),
        resumed=scene.run.newest_step(),
        said=telling_line(command.process, command.said()),
        problems=problems,
    )


# -- the faults ---------------------------------------------------------------------------------------------


def rank_killed(which: int | None, moment: str) -> Inflict:
    """SIGKILL to one rank (None: any of them) in a step, a save, or before the first step."""

    def inflict(scene: Scene) -> Struck:
        if moment == "start-up":
            if scene.command is not None:
                scene.stop()
            scene.base = scene.run.newest_step()
            scene.command = command = Command(scene.run, ("tputrain.cli",), scene.environment)
            command.wait_for(lambda: len(command.ranks()) == NUM_RANKS, 60, "to start ranks")
            time.sleep(scene.choice.uniform(0, 12))
            where = "start-up"
        else:
            command = scene.training()
            where = f"step {scene.wait_for_some_step(command)}"
            if moment == "save":
                command.wait_for(lambda: command.process.saves(), 60, "to save")
                where += ", in a save"
        before = {process for process, _, _ in command.processes()}
        rank = scene.any_rank() if which is None else which
        command.send(rank, signal.SIGKILL)
        struck = ranks_start_again(scene, command, before, f"rank {rank}, {where}")
        if f"rank {rank} failed first: Signal 9" not in struck.said:
            struck.problems.append(f"rank {rank} is not named")
        return struck

    return inflict


def rank_stopped(scene: Scene) -> Struck:
    """SIGSTOP to one rank, which lives on and does nothing: a watchdog names it and ends the ranks."""
    command = scene.training()
    step = scene.wait_for_some_step(command, nearest=10)  # the time of a step must have been learnt
    before = {process for process, _, _ in command.processes()}
    rank = scene.any_rank()
    command.send(rank, signal.SIGSTOP)
    struck = ranks_start_again(
        scene, command, before, f"rank {rank}, step {step}", LONGEST_RECOVERY + LONGEST_HANG
    )
    return named_as_awaited(struck, command, rank)


def rank_stuck(scene: Scene) -> Struck:
    """One rank waits in C for ever in the middle of a step."""
    rank = scene.any_rank()
    command, before, step = faulty(scene, "stuck", rank)
    struck = ranks_start_again(
        scene, command, before, f"rank {rank}, step {step}", LONGEST_RECOVERY + LONGEST_HANG
    )
    reports = [path.read_text() for path in scene.run.run_dir.rglob(f"hang-*-rank-{rank}.txt")]
    if not any(" in hang" in text for text in reports):
        struck.problems.append("no report has its stack")
    return named_as_awaited(struck, command, rank)


def named_as_awaited(struck: Struck, command: Command, rank: int) -> Struck:
    lines = [line for line in command.process.output().splitlines() if " waits for rank " in line]
    struck.said = lines[-1] if lines else struck.said
    if not lines or f" waits for rank {rank} " not in lines[-1]:
        struck.problems.append(f"rank {rank} is not named as the one that is waited for")
    return struck


def rank_terminated(scene: Scene) -> Struck:
    """SIGTERM to one rank: all save together and end, the command with 143, and it is not started again."""
    command = scene.training()
    step = scene.wait_for_some_step(command)
    rank = scene.any_rank()
    command.send(rank, signal.SIGTERM)
    struck = command_ends(scene, command, f"rank {rank}, step {step}", 128 + signal.SIGTERM)
    struck.may_lose = 0
    return struck


def launcher_ended(number: signal.Signals) -> Inflict:
    """The launcher is killed, or told to stop: its ranks save together, and leave."""

    def inflict(scene: Scene) -> Struck:
        command = scene.training()
        step = scene.wait_for_some_step(command)
        os.kill(command.launcher, number)
        expected = -number if number == signal.SIGKILL else 128 + number
        struck = command_ends(scene, command, f"step {step}", expected)
        if number == signal.SIGKILL and command.gone({pid for pid, _, _ in command.processes()}):
            struck.problems.append("ranks outlive their launcher")
        struck.reached, struck.resumed = scene.run.last_step(), scene.run.newest_step()
        struck.may_lose = 0
        return struck

    return inflict


def rank_raises(scene: Scene) -> Struck:
    """An exception on one rank."""
    rank = scene.any_rank()
    command, before, step = faulty(scene, "raises", rank)
    struck = ranks_start_again(scene, command, before, f"rank {rank}, step {step}")
    if f"rank {rank} failed first: ValueError: a fault of this rank" not in struck.said:
        struck.problems.append(f"rank {rank} and its error are not named")
    return struck


def not_a_number(scene: Scene) -> Struck:
    """A weight of one rank is NaN: all ranks stop, and the update with it is in no checkpoint."""
    rank = scene.any_rank()
    command, _, step = faulty(scene, "nan", rank)
    struck = command_ends(scene, command, f"rank {rank}, step {step}", 2)
    if " is nan" not in struck.said:
        struck.problems.append("nothing is said of it")
    # Steps after the bad one may have been logged with it; they are done again.
    struck.reached = min(struck.reached, step)
    return struck


def rank_finds_no_room(scene: Scene) -> Struck:
    """One rank cannot write its part of a checkpoint: none is made, the next one is."""
    rank = scene.any_rank()
    command, _, step = faulty(scene, "full", rank)
    said = f"rank {rank}: " if rank else "No space left"  # the first rank tells of itself
    return saved_later(scene, command, f"rank {rank}, from step {step}", said)


def disk_full(scene: Scene) -> Struck:
    """The disk that all ranks write to is full for one checkpoint."""
    command = scene.training()
    step = scene.wait_for_some_step(command)
    newest = scene.run.checkpoints.directory / f"step-{scene.run.newest_step()}"
    needed = sum(path.stat().st_size for path in newest.glob("*"))
    unfinished = scene.run.checkpoints.directory.glob
    command.wait_for(lambda: not any(unfinished(".unfinished-*")), 60, "to end a save")
    # None at all; or room for a part of the files.
    scene.disk.fill(free=scene.choice.choice([0, needed // 2, max(0, needed - 4096)]))
    try:
        command.wait_for(lambda: "NOT SAVED" in command.said(), 60, "to notice a full disk")
    finally:
        scene.disk.make_room()
    return saved_later(scene, command, f"after step {step}", "")


def saved_later(scene: Scene, command: Command, moment: str, said: str) -> Struck:
    """A checkpoint was not saved; the next one is, and a stop loses nothing."""
    command.wait_for(lambda: "NOT SAVED" in command.said(), 120, "to notice that it cannot save")
    command.wait_for(
        lambda: "saved " in command.said().partition("NOT SAVED")[2], 120, "to save when there is room"
    )
    os.kill(command.launcher, signal.SIGTERM)
    struck = command_ends(scene, command, moment, 128 + signal.SIGTERM)
    struck.may_lose = 0
    if said not in struck.said:
        struck.problems.append(f"{said!r} is not said")
    return struck


def damaged(how: str) -> Inflict:
    """A file of the newest checkpoint is damaged between two commands: all take the one before."""

    def inflict(scene: Scene) -> Struck:
        command = scene.training()
        scene.wait_for_some_step(command)
        command.wait_for(lambda: len(scene.run.checkpoints.steps()) >= 2, 120, "to save twice")
        os.kill(command.launcher, signal.SIGTERM)
        struck = command_ends(scene, command, "", 128 + signal.SIGTERM)
        step = scene.run.newest_step()
        files = sorted((scene.run.checkpoints.directory / f"step-{step}").iterdir())
        file = scene.choice.choice(files)
        damage(file, how, scene.choice)
        struck.moment = f"{file.name} of step {step}{struck.moment}"
        command = scene.training()
        struck.resumed = scene.base = resumed_at(command.said()) or 0
        if struck.resumed >= step:
            struck.problems.append(f"damaged checkpoint of step {step} accepted")
        refused = [line for line in command.said().splitlines() if " refused: " in line]
        struck.said = refused[0] if refused else struck.said
        if len(refused) != 1:
            struck.problems.append(f"the refusal is said {len(refused)} times")
        return struck

    return inflict


def network_cut(scene: Scene) -> Struck:
    """Two hosts of two ranks each, under torchrun: the wire between them is cut, and mended afterwards."""
    if scene.command is not None:
        scene.stop()
    scene.base = scene.run.newest_step()
    with TwoHosts() as hosts:
        launchers = [
            Command(scene.run, hosts.torchrun(host, NUM_RANKS // 2), scene.environment) for host in (0, 1)
        ]
        try:
            first = launchers[0]
            first.wait_for(first.trains, LONGEST_START, "to start")
            step = scene.wait_for_some_step(first, nearest=10)
            hosts.cut()
            began = time.monotonic()
            problems = []
            for each in launchers:
                each.wait_for_end(LONGEST_HANG + LONGEST_EXIT)
                if each.code == 0:
                    problems.append("a launcher ended with 0")
                # The service gives up ranks that it cannot reach after a minute.
                if left := each.gone({pid for pid, _, _ in each.processes()}, 90.0):
                    problems.append(f"left behind: {', '.join(left)}")
            took = time.monotonic() - began
        finally:
            for each in launchers:
                each.end_all()
    reached = scene.run.last_step()
    command = scene.training()
    scene.base = resumed_at(command.said()) or 0
    waiting = [line for line in first.said().splitlines() if " waits for " in line]
    return Struck(
        moment=f"step {step}, {took:.0f} s",
        reached=reached,
        resumed=scene.base,
        said=waiting[0] if waiting else telling_line(first.process, first.said()),
        problems=problems,
    )


def faulty(scene: Scene, fault: str, rank: int) -> tuple[Command, set[int], int]:
    """A command one of whose ranks does `fault` at a step that is returned, in its first start only."""
    if scene.command is not None:
        scene.stop()
    scene.base = scene.run.newest_step()
    step = scene.choice.randint(10, FURTHEST)
    program = ("tests.acceptance.faulty_ranks", fault, str(step), str(rank))
    command = scene.training(*program)
    return command, {process for process, _, _ in command.processes()}, scene.base + step
