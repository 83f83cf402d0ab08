"""The executable cache on disk: found by another process, never wrongly, never damaged, never in the way."""

from __future__ import annotations

import contextlib
import grp
import json
import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax.experimental.compilation_cache import compilation_cache

from tests.backend.fresh_process import run_python
from tpu_backend import executable_cache, from_jax, jax_op, to_jax
from tpu_backend.executable_cache import ExecutableCache

Description = dict[str, Any]
BACKEND = Path(executable_cache.__file__).parent


# ---- files -------------------------------------------------------------------------------------------------


def fill(cache: ExecutableCache, *keys: str, size: int = 1000) -> None:
    for age, key in enumerate(reversed(keys)):
        cache.write(key, {"name": key}, key[:1].encode() * size)
        used_at = time.time() - 10 * age
        os.utime(cache.directory / f"{key}.executable", (used_at, used_at))


def kept(cache: ExecutableCache) -> set[str]:
    return {path.stem for path in cache.directory.glob("*.executable")}


def test_what_was_written_is_read(tmp_path):
    cache = ExecutableCache(tmp_path / "not" / "there" / "yet")
    assert cache.read("a") is None
    cache.write("a", {"shapes": [[2, 3]]}, b"\0payload\n")
    assert cache.read("a") == ({"key": "a", "shapes": [[2, 3]]}, b"\0payload\n")
    assert cache.directory.stat().st_mode & 0o777 == 0o700, "executables of others would be run"
    assert [path.name for path in cache.directory.iterdir()] == ["a.executable"], "nothing unfinished"


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut off in the header": lambda content: content[:70],
    "cut off at the end": lambda content: content[:-1],
    "longer": lambda content: content + b"\0",
    "a bit flipped in the payload": lambda content: content[:-5] + bytes([content[-5] ^ 1]) + content[-4:],
    "a bit flipped in the checksum": lambda content: content[:25] + bytes([content[25] ^ 1]) + content[26:],
    "zeros, as after a power failure": lambda content: bytes(len(content)),
    "another format": lambda content: content.replace(b"executable 1", b"executable 2"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_missing_and_said_once(tmp_path, caplog, damage):
    cache = ExecutableCache(tmp_path)
    cache.write("a", {}, b"payload " * 100)
    path = tmp_path / "a.executable"
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    assert cache.read("a") is None
    assert not path.exists()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(path) in caplog.text
    cache.write("a", {}, b"new")
    assert cache.read("a") == ({"key": "a"}, b"new")


def test_a_file_under_another_program_s_name_is_not_used(tmp_path):
    cache = ExecutableCache(tmp_path)
    cache.write("a", {}, b"of a")
    (tmp_path / "a.executable").rename(tmp_path / "b.executable")
    assert cache.read("b") is None


def test_what_was_used_least_recently_goes_first(tmp_path):
    cache = ExecutableCache(tmp_path, max_bytes=4000)
    fill(cache, "a", "b", "c", size=1000)
    assert cache.read("a") is not None, "which is the oldest, and used just now"
    cache.write("d", {}, b"d" * 1000)
    assert kept(cache) == {"a", "c", "d"}


def test_a_program_that_is_larger_than_the_cache_displaces_nothing(tmp_path, caplog):
    cache = ExecutableCache(tmp_path, max_bytes=4000)
    fill(cache, "a")
    cache.write("b", {}, b"b" * 5000)
    assert kept(cache) == {"a"}
    assert "is not kept: there is room for 4000" in caplog.text
    with pytest.raises(ValueError, match="max_bytes=0: expected 1 or more"):
        ExecutableCache(tmp_path, max_bytes=0)


def test_a_directory_that_cannot_be_written_is_said_once(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    cache = ExecutableCache(tmp_path / "file" / "cache")
    for key in "ab":
        cache.write(key, {}, b"payload")
        assert cache.read(key) is None
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"tpu: executable cache: {cache.directory} cannot be written (Not a directory)")
    assert said[0].endswith("make it writable or name another directory")


def test_a_directory_that_can_only_be_read_is_read(tmp_path, monkeypatch, capsys):
    fill(ExecutableCache(tmp_path), "a")
    cache = ExecutableCache(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(Path, "write_bytes", refuse)
    cache.write("b", {}, b"payload")
    assert cache.read("a") is not None
    assert "cannot be written (Permission denied)" in capsys.readouterr().err


def is_used(directory: Path, capsys: pytest.CaptureFixture[str]) -> str | None:
    """None where programs are written to and read from a directory, else the one line that says why not."""
    cache = ExecutableCache(directory)
    for file in directory.glob("*.executable"):
        file.unlink()
    cache.write("a", {}, b"payload")
    found = cache.read("a")
    cache.write("b", {}, b"payload")
    said = capsys.readouterr().err.splitlines()
    assert len(said) == (found is None)
    assert len(kept(cache)) == (0 if found is None else 2)
    return said[0] if said else None


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A directory of this user's, that it can give any mode and owner."""
    (tmp_path / "own").mkdir(mode=0o700)
    return tmp_path / "own"


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775, 0o702])
def test_where_others_may_write_nothing_is_loaded(own, capsys, monkeypatch, mode):
    monkeypatch.setattr(executable_cache, "_is_private_group", lambda group, user: False)
    own.chmod(mode)
    who = "everybody" if mode & 0o002 else f"its group, number {own.stat().st_gid}"
    assert is_used(own, capsys) == (
        f"tpu: executable cache: {own} is not used, since programs in it would be run: "
        f"{own} can be written by {who}; chmod go-w {own}, or name another directory"
    )
    own.chmod(0o755)
    assert is_used(own, capsys) is None


@pytest.mark.parametrize("is_there", [True, False])
def test_where_others_may_put_another_directory_nothing_is_loaded(own, capsys, is_there):
    cache = own / "above" / "cache"
    if is_there:
        cache.mkdir(parents=True, mode=0o700)
    own.chmod(0o777)
    said = is_used(cache, capsys)
    assert said is not None
    assert said.startswith(f"tpu: executable cache: {cache} is not used")
    assert f"{own} can be written by everybody; chmod go-w {own}" in said
    own.chmod(0o1777)  # sticky, as /tmp is: nobody renames what is not theirs
    assert is_used(cache, capsys) is None


def as_if_owned(monkeypatch: pytest.MonkeyPatch, owners: dict[Path, int]) -> None:
    """Let paths seem to belong to these users."""
    original = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        found = list(original(path))
        found[4] = owners.get(path, found[4])
        return os.stat_result(found)

    monkeypatch.setattr(Path, "lstat", lstat)


@pytest.mark.parametrize("user", [0, 1000])
@pytest.mark.parametrize("place", ["itself", "above"])
def test_what_belongs_to_another_user_is_not_loaded(own, capsys, monkeypatch, user, place):
    """Root is asked as every other user, and nobody loads what root has put there for itself."""
    cache = own / "cache"
    cache.mkdir(mode=0o700)
    mine = dict.fromkeys([cache, *cache.parents], user)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    as_if_owned(monkeypatch, mine)
    assert is_used(cache, capsys) is None
    other = 1234 if place == "above" or user == 0 else 0
    as_if_owned(monkeypatch, mine | {(cache if place == "itself" else own): other})
    said = is_used(cache, capsys)
    assert said is not None
    path, whose = (own if place == "above" else cache), "root" if other == 0 else f"user {other}"
    assert said.endswith(f"{path} belongs to {whose}, and this is user {user}; name a directory of your own")
    if place == "above" and user != 0:
        monkeypatch.undo()
        monkeypatch.setattr(os, "geteuid", lambda: user)
        as_if_owned(monkeypatch, mine | {own: 0})  # as /home is
        assert is_used(cache, capsys) is None


def test_a_link_is_looked_at_and_where_it_leads(own, capsys, monkeypatch):
    others, real = own / "others", own / "real"
    others.mkdir(mode=0o700)
    real.mkdir(mode=0o700)
    (own / "link").symlink_to("others/../real/.")
    (real / "here").symlink_to(".")
    assert is_used(own / "link", capsys) is None
    assert is_used(own / "link" / "here" / "cache", capsys) is None
    as_if_owned(monkeypatch, {own / "link": 1234})
    said = is_used(own / "link" / "cache", capsys)
    assert said is not None
    assert f"{own / 'link'} belongs to user 1234" in said
    monkeypatch.undo()
    others.chmod(0o777)  # who may write there may put a link in its place
    (own / "through").symlink_to(others / "on")
    (others / "on").symlink_to(real)
    said = is_used(own / "through", capsys)
    assert said is not None
    assert f"{others} can be written by everybody" in said
    (own / "endless").symlink_to("endless")
    assert executable_cache.untrusted(own / "endless") is None, "nobody finds anything there"


def test_a_group_of_one_user_s_own_may_write(own, capsys, monkeypatch):
    """With the umask 002 that some systems give with such groups, ~/.cache is made so."""
    group, user = own.stat().st_gid, own.stat().st_uid
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name="ann", pw_gid=group))
    entry = SimpleNamespace(gr_name="ann", gr_mem=["ann"])
    monkeypatch.setattr(grp, "getgrgid", lambda gid: entry)
    (own / "cache").mkdir(mode=0o700)
    for path in (own, own / "cache"):
        path.chmod(0o775)
    assert is_used(own / "cache", capsys) is None
    for change in ({"gr_mem": ["ann", "bob"]}, {"gr_name": "staff"}):
        monkeypatch.setattr(
            grp, "getgrgid", lambda gid, change=change: SimpleNamespace(**(vars(entry) | change))
        )
        assert "can be written by its group" in (executable_cache.untrusted(own / "cache") or "")
    assert executable_cache._is_private_group(group + 1, user) is False

    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", unknown)  # as in a container that runs as any number
    assert "can be written by its group" in (executable_cache.untrusted(own / "cache") or "")


def test_what_is_made_is_its_user_s_alone_whatever_the_umask_is(own, capsys, monkeypatch):
    monkeypatch.setattr(executable_cache, "_is_private_group", lambda group, user: False)
    before = os.umask(0)
    try:
        assert is_used(own / "not" / "there" / "yet", capsys) is None
    finally:
        os.umask(before)
    made = [path for path in own.rglob("*") if path.is_dir()]
    assert [path.stat().st_mode & 0o777 for path in made] == [0o700] * 3
    assert {path.stat().st_mode & 0o777 for path in own.rglob("*.executable")} == {0o600}


def test_a_directory_that_another_user_was_faster_to_make_is_not_used(own, capsys, monkeypatch):
    cache = ExecutableCache(own / "cache")
    assert cache.read("a") is None, "it is not there yet, and would be made"
    (own / "cache").mkdir()
    (own / "cache").chmod(0o777)
    cache.write("a", {}, b"payload")
    assert not kept(cache)
    assert cache.read("a") is None
    assert len(capsys.readouterr().err.splitlines()) == 1


WRITER = """
import hashlib, os, random, runpy, signal, sys
from pathlib import Path

cache = runpy.run_path(sys.argv[1])["ExecutableCache"](sys.argv[2], max_bytes=2_000_000)
numbers = random.Random(int(sys.argv[3]))
if sys.argv[4] == "dies":
    whole = Path.write_bytes

    def half(path, content):
        whole(path, content[: len(content) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    Path.write_bytes = half
print("ready", flush=True)
while True:
    payload = numbers.randbytes(numbers.randrange(300_000))
    cache.write(f"key-{numbers.randrange(20)}", {"digest": hashlib.sha256(payload).hexdigest()}, payload)
"""


@contextlib.contextmanager
def writing(directory: Path, seed: int, how: str = "lives") -> Iterator[subprocess.Popen[str]]:
    """A process that writes programs into a directory until it is killed; it has begun."""
    module = str(BACKEND / "executable_cache.py")
    command = [sys.executable, "-c", WRITER, module, str(directory), str(seed), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_eight_writers_and_a_kill_in_the_midst_of_a_write_leave_no_bad_program(tmp_path, caplog):
    from hashlib import sha256

    cache, num_read = ExecutableCache(tmp_path), 0
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(writing(tmp_path, seed)) for seed in range(8)]
        victim = stack.enter_context(writing(tmp_path, 9, "dies"))
        assert victim.wait(timeout=60) == -signal.SIGKILL
        for number in range(200):
            found = cache.read(f"key-{number % 20}")
            if found is not None:
                num_read += 1
                assert sha256(found[1]).hexdigest() == found[0]["digest"]
        for writer in writers:
            assert writer.poll() is None, "it still writes"
            writer.kill()
    assert num_read > 20
    for number in range(20):
        found = cache.read(f"key-{number}")
        assert found is None or sha256(found[1]).hexdigest() == found[0]["digest"]
    assert caplog.records == [], "not one file was half-written under its name"

    left = list(tmp_path.glob("*.unfinished"))
    assert left, "by the process that was killed"
    for path in left:
        os.utime(path, (time.time() - 7200, time.time() - 7200))
    cache.write("later", {}, b"payload")
    assert not list(tmp_path.glob("*.unfinished"))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 4_000_000


# ---- programs ----------------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path) -> Iterator[Path]:
    """A cache for what a test compiles."""
    torch.tpu.set_executable_cache(tmp_path / "cache")
    yield tmp_path / "cache"
    torch.tpu.set_executable_cache(None)


@pytest.fixture
def recorded(monkeypatch) -> list[Description]:
    """What is looked up on disk, as the recorder describes it."""
    from tpu_backend.runtime import compiler

    seen: list[Description] = []
    original = compiler.key_of_tape

    def spy(description: Description, *rest: Any) -> str | None:
        seen.append(description)
        return original(description, *rest)

    monkeypatch.setattr(compiler, "key_of_tape", spy)
    return seen


def ran(function: Callable[..., torch.Tensor], *arguments: torch.Tensor) -> torch.Tensor:
    """What a function makes of CPU tensors on the device, in a program of its own."""
    on_device = [argument.to("tpu") for argument in arguments]
    torch.tpu.flush()
    result = function(*on_device)
    torch.tpu.flush()
    return result.cpu()


def programs_in(directory: Path) -> list[dict[str, Any]]:
    """The headers of the programs that are kept, without what else is."""
    cache = ExecutableCache(directory)
    headers = [found[0] for key in kept(cache) if (found := cache.read(key)) is not None]
    return [header for header in headers if "outputs" in header]


def key_of_tape(description: Description) -> str | None:
    from tpu_backend.runtime import compiler_options, program_key
    from tpu_backend.runtime.target import target_of

    target = target_of(0)
    return program_key.key_of_tape(description, compiler_options.options_for(description, target), target)


def compiled_again(description: Description) -> Any:
    """As another process would: its memory has no such program."""
    from tpu_backend.runtime.compiler import compile_segment

    (link,) = compile_segment(description, may_wait=True)
    return link.executable


def test_a_program_from_disk_computes_the_same_and_takes_over_memory(directory, recorded):
    values = torch.randn(31, 17)
    x = values.to("tpu")
    torch.tpu.flush()
    x.tanh_().sin_()
    expected = x.cpu()
    executable = compiled_again(recorded[-1])
    assert executable.from_disk
    array = jax.numpy.add(values.numpy(), 0)  # not NumPy's own memory, which no program can take over
    address = array.unsafe_buffer_pointer()
    (result,) = executable.execute([array], with_tokens=True).consume_with_handlers(executable.handlers)
    assert array.is_deleted()
    assert result.unsafe_buffer_pointer() == address
    assert torch.equal(torch.from_numpy(np.array(result)), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.int64, torch.float64, torch.complex64])
def test_outputs_have_their_dtypes(directory, recorded, dtype):
    values = torch.arange(12).reshape(3, 4).to(dtype)
    expected = ran(lambda x: torch.stack([x, x]), values)
    executable = compiled_again(recorded[-1])
    assert executable.from_disk
    arrays = [to_jax(values.to("tpu"))]
    (result,) = executable.execute(arrays, with_tokens=True).consume_with_handlers(executable.handlers)
    assert result.weak_type is False
    assert torch.equal(from_jax(result).cpu(), expected)


def test_what_xla_refuses_is_compiled_and_replaced(directory, recorded, caplog):
    ran(lambda x: x.cosh(), torch.randn(5, 3))
    (header,) = programs_in(directory)
    ExecutableCache(directory).write(header["key"], header, b"whole, but no executable")
    assert not compiled_again(recorded[-1]).from_disk
    assert "XLA refuses it" in caplog.text
    assert compiled_again(recorded[-1]).from_disk


def test_a_program_says_in_clear_what_it_was_made_for(directory):
    ran(lambda x: x.sinh(), torch.randn(5, 3))
    (header,) = programs_in(directory)
    assert header["outputs"] == [["float32", [5, 3], False]]
    assert header["environment"]["versions"]["jaxlib"] == version("jaxlib")
    assert header["environment"]["platform"][0] == "cpu"
    assert os.uname().nodename not in json.dumps(header["environment"])


# What makes another program of the same tape, or the same program another executable.
CHANGES: dict[str, Callable[[pytest.MonkeyPatch, contextlib.ExitStack], object]] = {
    "XLA's flags": lambda patch, stack: started_with(patch, XLA_FLAGS="--xla_cpu_enable_fast_math=true"),
    "libtpu's flags": lambda patch, stack: started_with(patch, LIBTPU_INIT_ARGS="--xla_tpu_flag=true"),
    "a setting of JAX": lambda patch, stack: stack.enter_context(jax.default_matmul_precision("highest")),
    "versions": lambda patch, stack: changed(patch, versions={"torch": "2.13.0", "jax": "0.10.9"}),
    "the lowerings": lambda patch, stack: changed(patch, sources="0123"),
    "the platform": lambda patch, stack: changed(patch, platform=["tpu", "libtpu 1"]),
    "the chip": lambda patch, stack: changed(patch, device="TPU v6e"),
    "the topology": lambda patch, stack: changed(patch, topology="4x4"),
    "the host's processor": lambda patch, stack: changed(patch, host={"features": "avx"}),
}


def started_with(patch: pytest.MonkeyPatch, **variables: str) -> None:
    from tpu_backend.runtime import program_key

    for name, value in variables.items():
        patch.setenv(name, value)
    patch.setattr(program_key, "flags", program_key.flags.__wrapped__)


def test_flags_are_those_that_the_compilers_started_with(monkeypatch, tmp_path):
    from tpu_backend.runtime import program_key

    found = program_key.flags()
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert program_key.flags() == found, "what is set later says nothing to XLA"
    file, seen = tmp_path / "flags", []
    for text in ("--a=1 --a=2", "--a=2 --a=1", str(file), str(tmp_path / "missing")):
        file.write_text("--a=3\n--b=4\n")
        started_with(monkeypatch, XLA_FLAGS=text)
        seen.append(program_key.flags()["XLA_FLAGS"])
        monkeypatch.undo()
    assert seen == [["--a=1", "--a=2"], ["--a=2", "--a=1"], ["--a=3", "--b=4"], [str(tmp_path / "missing")]]


def changed(patch: pytest.MonkeyPatch, **parts: Any) -> None:
    from tpu_backend.runtime import program_key
    from tpu_backend.runtime.target import target_of

    before = program_key._fixed_environment(target_of(0))
    assert set(parts) <= set(before)
    patch.setattr(program_key, "_fixed_environment", lambda _: before | parts)


@pytest.mark.parametrize("change", CHANGES)
def test_a_program_for_something_else_is_not_used(directory, recorded, monkeypatch, change):
    ran(lambda x: x.log1p(), torch.rand(5, list(CHANGES).index(change) + 1))  # known to no other test
    key = key_of_tape(recorded[-1])
    assert (directory / f"{key}.executable").exists()
    with contextlib.ExitStack() as stack:
        CHANGES[change](monkeypatch, stack)
        assert key_of_tape(recorded[-1]) != key
    monkeypatch.undo()
    assert key_of_tape(recorded[-1]) == key


def test_the_key_tells_programs_apart(directory, recorded):
    x = torch.rand(6, 6)
    programs: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x + x,
        lambda x: x * x,
        lambda x: x.sum(0),
        lambda x: x.sum(1),
        lambda x: x.pow(3),
        lambda x: x.pow(4),
        lambda x: x[1:4] + x[1:4],
        lambda x: x[2:5] + x[2:5],
        lambda x: x.t() + x,
        lambda x: x.double() + 1,
        lambda x: (x.exp(), x.exp().exp())[1],
    ]
    for program in programs:
        ran(program, x)
    keys = [key_of_tape(description) for description in recorded]
    assert None not in keys
    assert len(set(keys)) == len(keys) >= len(programs)
    other_outputs = recorded[-1] | {"outputs": [*recorded[-1]["outputs"], 1]}
    assert key_of_tape(other_outputs) != key_of_tape(recorded[-1])
    donating = recorded[-1] | {"donated": recorded[-1]["inputs"]}
    assert key_of_tape(donating) != key_of_tape(recorded[-1])


def test_the_options_that_a_program_is_compiled_with_are_in_its_key(directory, recorded):
    from tpu_backend.runtime import program_key
    from tpu_backend.runtime.target import target_of

    here = target_of(0)
    options = (
        None,
        {"xla_cpu_experimental_ynn_fusion_type": ""},
        {"xla_cpu_experimental_ynn_fusion_type": "DOT"},
    )
    lowered = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((3,), np.float32))
    assert len({program_key.key_of_text(lowered, (), each, here) for each in options}) == len(options)
    ran(lambda x: x.asinh(), torch.rand(5, 2))
    assert len({program_key.key_of_tape(recorded[-1], each, here) for each in options}) == len(options)


def test_a_user_s_function_is_known_by_its_program_and_not_by_its_name(directory, recorded):
    large = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    other = large.copy()
    other[50_000] += 1  # where a printer of constants would have left something out
    x, results, loaded = torch.rand(100_000), [], []
    for constant in (large, large.copy(), other):
        operator = jax_op(lambda values, constant=constant: values * constant, name="scaled")
        results.append(ran(operator, x))
        loaded.append(compiled_again(recorded[-1]).from_disk)
        assert torch.equal(results[-1], x * torch.from_numpy(constant))
    assert key_of_tape(recorded[-1]) is None
    assert loaded == [True, True, True]
    assert len(programs_in(directory)) == 2


def test_a_program_that_calls_this_process_is_not_kept(directory, recorded):
    calls: list[int] = []

    def count(values: np.ndarray) -> np.ndarray:
        calls.append(1)
        return values + 1

    def function(values: jax.Array) -> jax.Array:
        return jax.pure_callback(count, jax.ShapeDtypeStruct(values.shape, values.dtype), values)

    assert torch.equal(ran(jax_op(function, name="counting"), torch.zeros(9)), torch.ones(9))
    assert calls
    assert not compiled_again(recorded[-1]).from_disk


@pytest.fixture
def jax_cache(tmp_path) -> Iterator[Path]:
    """JAX's own compilation cache, on."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path / "jax"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: jax.config.values[name] for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path / "jax"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_what_comes_from_jax_s_own_cache_is_not_passed_on(directory, recorded, jax_cache):
    x = torch.rand(64, 65)
    expected = ran(lambda x: torch.softmax(x, 1).log().cumsum(0).sin(), x)
    description = recorded[-1]
    torch.tpu.set_executable_cache(None)
    compiled_again(description)
    assert list(jax_cache.iterdir()), "without a cache of ours JAX's is as it was"
    torch.tpu.set_executable_cache(directory.with_name("another"))
    assert not compiled_again(description).from_disk
    executable = compiled_again(description)
    assert executable.from_disk
    (result,) = executable.execute([to_jax(x.to("tpu"))], with_tokens=True).consume_with_handlers(
        executable.handlers
    )
    assert torch.equal(from_jax(result).cpu(), expected)
    assert jax.config.values["jax_enable_compilation_cache"]


def test_the_directory_is_chosen_and_asked_for(tmp_path, monkeypatch):
    assert torch.tpu.get_executable_cache() is None
    monkeypatch.chdir(tmp_path)
    torch.tpu.set_executable_cache("programs")
    assert torch.tpu.get_executable_cache() == tmp_path / "programs"
    torch.tpu.set_executable_cache(None)
    assert torch.tpu.get_executable_cache() is None
    for said, meant in ((str(tmp_path / "c"), tmp_path / "c"), ("none", None), ("", None)):
        monkeypatch.setenv("TPU_CACHE_DIR", said)
        executable_cache.use_environment()
        assert torch.tpu.get_executable_cache() == meant


@pytest.mark.parametrize("environment", [{}, {"TPU_CACHE_DIR": "none"}])
def test_a_script_keeps_its_programs_at_home_unless_it_is_told_not_to(tmp_path, environment):
    script = "import torch; print((torch.ones(3, device='tpu') + 1).sum().item())"
    unasked = {} if environment else {"TPU_CACHE_DIR": None}
    done = run_python(script, HOME=str(tmp_path), TPU_PLATFORM="cpu", **environment, **unasked)
    assert done.stdout == "6.0\n", done.stderr
    kept = tmp_path / ".cache" / "tputrain" / "executables"
    assert kept.exists() == (not environment)
    if not environment:
        assert kept.stat().st_mode & 0o777 == 0o700
        assert list(kept.glob("*.executable"))


def test_without_a_home_or_room_in_it_a_script_goes_on(tmp_path):
    script = """
        import os, pathlib, torch
        from tpu_backend import executable_cache
        def homeless(self): raise RuntimeError("Could not determine home directory.")
        if os.environ.pop("IS_HOMELESS", None):
            pathlib.Path.expanduser = homeless
            executable_cache.use_environment()
        print(torch.tpu.get_executable_cache() is None, (torch.ones(3, device="tpu") + 1).sum().item())
    """
    done = run_python(script, TPU_CACHE_DIR=None, TPU_PLATFORM="cpu", IS_HOMELESS="1")
    assert done.stdout == "True 6.0\n", done.stderr
    home = tmp_path / "a file"
    home.touch()
    done = run_python(script, HOME=str(home), TPU_CACHE_DIR=None, TPU_PLATFORM="cpu")
    assert done.stdout == "False 6.0\n", done.stderr
    assert done.stderr.count("executable cache:") == 1


def test_all_files_are_looked_at_now_and_then_only(tmp_path, monkeypatch):
    cache, looks = ExecutableCache(tmp_path / "programs", max_bytes=2**20), []
    monkeypatch.setattr(cache, "_remove_oldest", lambda: looks.append(1))
    for number in range(200):
        cache.write(f"{number:064x}", {}, bytes(1000))
    assert 10 <= len(looks) <= 20


# ---- another process ---------------------------------------------------------------------------------------

TRAINING = """
import json
import jax, torch, torch.nn.functional as F
from tpu_backend import jax_op

torch.manual_seed(0)
layers = torch.nn.Embedding(11, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 11)
model = torch.nn.Sequential(*layers).to("tpu")
gate = jax_op(lambda x, *, slope: x * jax.nn.sigmoid(slope * x), name="gate")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
tokens = torch.arange(24).reshape(4, 6) % 11
losses = []
for step in range(3):
    torch.tpu.flush()
    tokens_there = tokens.to("tpu")
    hidden = gate(model(tokens_there), slope=1.5)
    loss = F.cross_entropy(hidden.flatten(0, 1), tokens_there.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float.hex(loss.item()))
losses.append(torch.linalg.lu_factor(torch.eye(3, device="tpu") + 1)[0].tolist())
try:
    model(torch.full((4, 6), 11).to("tpu"))
    torch.tpu.synchronize()
except IndexError as error:
    losses.append(str(error))
weights = [each.detach().cpu().view(torch.int32).tolist() for each in model.parameters()]
temporary = torch.tpu.memory_stats()["executable_temp_bytes"]
print(json.dumps([losses, weights, torch.tpu.compile_stats(), temporary]))
"""


def test_a_second_process_compiles_nothing_and_computes_the_same_bits(tmp_path):
    def train(seed: int) -> Any:
        done = run_python(TRAINING, TPU_CACHE_DIR=str(tmp_path), TPU_PLATFORM="cpu", PYTHONHASHSEED=str(seed))
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    losses, weights, cold, temporary = train(1)
    assert cold["compilations"] >= 3
    assert cold["disk_hits"] == 0
    assert "index out of range" in losses[-1]
    again, same_weights, warm, same_temporary = train(2)
    assert (warm["compilations"], warm["disk_hits"]) == (0, cold["compilations"])
    assert warm["compile_seconds"] == 0
    assert (again, same_weights, same_temporary) == (losses, weights, temporary)
