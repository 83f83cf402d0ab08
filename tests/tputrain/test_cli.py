"""The command line: verbs, exit codes, and how soon it speaks."""

import contextlib
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tputrain.tiny_run import finish_a_run
from tputrain.checkpoint import integrity
from tputrain.checkpoint.store import CheckpointStore
from tputrain.cli import main
from tputrain.cli.verbs import _quoted
from tputrain.loggers.jsonl import read_jsonl
from tputrain.run_lock import RunLock
from tputrain.signals import SignalWatch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A directory with a recipe, its text, and the run that it leads to."""
    return finish_a_run(tmp_path_factory.mktemp("workplace"))


@pytest.fixture(autouse=True)
def _there(workplace, monkeypatch):
    monkeypatch.chdir(workplace)


def test_a_run_is_where_it_is_said_to_be_and_says_what_comes_next(workplace, capsys):
    assert main(["run", "tiny.yaml", "run_dir=runs/thither", "trainer.steps=2", "run_dir=runs/other"]) == 0
    out = capsys.readouterr().out
    assert "batch: 128 tokens a step = 4 sequences x 16 tokens x 2 micro-batches" in out
    assert out.splitlines()[-3:] == [
        "checkpoint  runs/other/checkpoints/step-2",
        'sample      tputrain sample runs/other --prompt "def "',
        "resume      tputrain run tiny.yaml run_dir=runs/other trainer.steps=4",
    ]
    assert [record["step"] for record in read_jsonl(workplace / "runs/tiny/metrics.jsonl")] == [1, 2, 3, 4]
    for record in read_jsonl(workplace / "runs/tiny/evaluations.jsonl"):
        assert record.keys() >= {"loss", "perplexity", "bits_per_byte"}
    assert "sample: def " in out


def test_a_finished_run_says_how_to_make_it_longer_and_stays_as_it_is(workplace, capsys):
    def stamps():
        return {path: path.stat().st_mtime_ns for path in (workplace / "runs" / "tiny").rglob("*")}

    before = stamps()
    assert main(["run", "tiny.yaml"]) == 0
    out = capsys.readouterr().out
    assert "runs/tiny is finished: it has done its 4 steps" in out
    assert "tputrain run tiny.yaml trainer.steps=8" in out
    assert stamps() == before


def test_a_run_that_has_done_more_than_is_asked_for_says_so(capsys):
    assert main(["run", "tiny.yaml", "trainer.steps=3"]) == 0
    out = capsys.readouterr().out
    assert "runs/tiny is finished: it has done 4 steps, more than trainer.steps=3. To make it longer:" in out
    assert "tputrain run tiny.yaml trainer.steps=8" in out


def test_changing_what_a_run_is_made_of_is_refused_and_the_rest_is_told(copy, capsys):
    assert main(["run", "tiny.yaml", "trainer.steps=6", "model.hidden_size=32"]) == 2
    assert "model.hidden_size=32: runs/tiny/checkpoints/step-4 was made with model.hidden_size=16" in (
        capsys.readouterr().err
    )
    assert main(["run", "tiny.yaml", "trainer.steps=6", "optim.name=sgd"]) == 2
    assert "optim.name=sgd: runs/tiny/checkpoints/step-4 was made with optim.name=adamw; set it back" in (
        capsys.readouterr().err
    )
    assert main(["run", "tiny.yaml", "run_dir=runs/copy", "trainer.steps=5", "optim.beta2=0.9"]) == 0
    assert "note: optim.beta2 is 0.9 from here on, it was 0.95" in capsys.readouterr().out


def test_validate_evaluates_a_run_and_checks_a_recipe(capsys):
    assert main(["validate", "runs/tiny", "trainer.evaluate_batches=null"]) == 0
    out = capsys.readouterr().out
    assert "loss: " in out
    assert "bits per byte: " in out
    assert main(["validate", "llama"]) == 0
    assert "valid; 500 steps" in capsys.readouterr().out
    assert main(["validate", "llama", "data.files=nope.txt"]) == 2
    assert "data.files='nope.txt': no file matches" in capsys.readouterr().err


@pytest.fixture
def copy(workplace) -> Iterator[Path]:
    """A copy of the finished run, to be spoilt."""
    run_dir = workplace / "runs" / "copy"
    shutil.copytree(workplace / "runs" / "tiny", run_dir)
    yield run_dir
    shutil.rmtree(run_dir)


@pytest.fixture
def _edited(workplace) -> Iterator[None]:
    """The text of the run, after somebody wrote in it."""
    text = (workplace / "text.txt").read_text()
    (workplace / "text.txt").write_text(text + "class More:\n    pass\n" * 20)
    yield
    (workplace / "text.txt").write_text(text)


@pytest.fixture
def _no_training_of_tokenizers(workplace, monkeypatch) -> None:
    def fail(*arguments):
        raise AssertionError("a tokenizer is being trained, and the run has its own")

    monkeypatch.setattr("tputrain.data.tokenizer.Tokenizer.train", fail)
    shutil.rmtree(workplace / "cache", ignore_errors=True)


GO_ON = ["run", "tiny.yaml", "run_dir=runs/copy", "trainer.steps=6"]


@pytest.mark.usefixtures("copy", "_edited", "_no_training_of_tokenizers")
def test_a_run_whose_text_was_edited_is_not_gone_on_with(capsys):
    assert main(GO_ON) == 2
    assert capsys.readouterr().err == (
        "tputrain: data.files='text.txt': the text there is not what this run was started with; "
        "restore the files, or choose another run_dir\n"
    )


@pytest.mark.usefixtures("_no_training_of_tokenizers")
def test_a_run_goes_on_with_its_own_tokenizer(copy):
    assert main(GO_ON) == 0
    assert [record["step"] for record in read_jsonl(copy / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.usefixtures("_no_training_of_tokenizers", "_edited", "copy")
def test_other_text_is_evaluated_with_the_run_s_own_tokenizer(capsys):
    assert main(["validate", "runs/copy"]) == 0
    assert "note: text.txt is not the text that the run was started with" in capsys.readouterr().out


def hashed(monkeypatch) -> list[str]:
    """Gets the name of every file that is read for its checksum from here on."""
    names: list[str] = []
    sha256 = integrity._sha256

    def counting(path: Path, *pace: Callable[[], None]) -> str:
        names.append(f"{path.parent.name}/{path.name}")
        return sha256(path, *pace)

    monkeypatch.setattr(integrity, "_sha256", counting)
    return names


@pytest.mark.usefixtures("copy")
@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "tiny.yaml", "run_dir=runs/copy"],
        GO_ON,
        ["validate", "runs/copy"],
        ["sample", "runs/copy", "--prompt", "x", "--max-new-tokens", "1"],
    ],
    ids=["finished", "resumed", "validate", "sample"],
)
def test_a_checkpoint_is_read_for_its_checksum_once(monkeypatch, arguments):
    names = hashed(monkeypatch)
    assert main(arguments) == 0
    assert names.count("step-4/model.safetensors") == 1
    assert names.count("step-4/optimizer.safetensors") == 1


def test_checking_a_large_checkpoint_is_announced(capsys, monkeypatch):
    monkeypatch.setattr("tputrain.checkpoint.store._BYTES_TO_ANNOUNCE", 1000)
    assert main(["run", "tiny.yaml"]) == 0
    assert re.search(
        r"checking runs/tiny/checkpoints/step-4 \(0.0 GB\) ... \d+\.\d s\n", capsys.readouterr().out
    )


def test_sample_writes_text_that_begins_with_the_prompt(capsys):
    command = ["sample", "runs/tiny", "--prompt", "def add(", "--max-new-tokens", "5", "device=cpu"]
    assert main(command) == 0
    first = capsys.readouterr()
    assert first.out.startswith("def add(")  # and nothing before it: it may go into a file
    assert "writing ..." in first.err
    assert re.search(r"^prefill \d+ tokens, \S+ tokens/s; decoding \S+ tokens/s", first.err, re.MULTILINE)
    assert main(command) == 0
    assert capsys.readouterr().out == first.out


def mistakes(err: str, arguments: list[str]) -> str:
    """Standard error without what `sample` says there while it works: its output is the text alone."""
    if arguments[0] != "sample":
        return err
    said = re.compile(r"tputrain sample .*\n|loading PyTorch \.\.\.( [\d.]+ s)?\n")
    return said.sub("", err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "lama"], "lama: no such file, and no shipped recipe"),
        (["run", "tiny.yaml", "trainer.stepz=3"], "command line: trainer.stepz=3: unknown key"),
        (
            ["run", "tiny.yaml", "data.files=none-*.txt", "run_dir=x"],
            "data.files='none-*.txt': no file matches",
        ),
        (["run", "tiny.yaml", "run_dir=text.txt/run"], "run_dir=text.txt/run: cannot write there"),
        (
            ["sample", "nowhere", "--prompt", "x"],
            "nowhere: no such directory; expected the directory",
        ),
        (
            ["sample", "runs/tiny", "--prompt", "x", "--max-new-tokens", "0"],
            "--max-new-tokens=0: expected 1 or more",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, arguments, message):
    assert main(arguments) == 2
    err = mistakes(capsys.readouterr().err, arguments)
    assert err.startswith("tputrain: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_failure_is_exit_code_1_and_a_traceback_only_with_debug(capsys, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("the disk\nis full")

    monkeypatch.setattr("tputrain.cli.verbs.load_recipe", fail)
    assert main(["run", "tiny.yaml"]) == 1
    assert capsys.readouterr().err == "tputrain: RuntimeError: the disk is full (--debug shows where)\n"
    assert main(["run", "tiny.yaml", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_disk_that_fills_up_in_a_run_is_a_failure_in_words(workplace, capsys, monkeypatch):
    def write(store, *_: object):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(store.directory))

    monkeypatch.setattr(CheckpointStore, "write", write)
    assert main(["run", "tiny.yaml", "run_dir=runs/full"]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert "runs/full/checkpoints/step-4 cannot be saved (No space left on device): " in line


def test_a_run_directory_that_takes_nothing_at_the_start_is_a_mistake(workplace, capsys):
    (workplace / "in-the-way").write_text("a file")
    assert main(["run", "tiny.yaml", "run_dir=in-the-way/run"]) == 2
    assert capsys.readouterr().err == (
        "tputrain: run_dir=in-the-way/run: cannot write there (Not a directory); mend that or take another\n"
    )


def test_a_batch_larger_than_the_text_and_a_small_vocabulary_are_noted_once(capsys):
    large = ["run_dir=runs/large", "batch.tokens=2048", "batch.sequences=128", "data.vocab_size=4096"]
    command = ["run", "tiny.yaml", *large, "model.vocab_size=4096", "sample.max_new_tokens=0"]
    assert main([*command, "trainer.steps=1"]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert re.fullmatch(
        r"note: the tokenizer found 2\d\d entries in this text, data.vocab_size=4096 asks for 4,096: .*; "
        r"give more text, or lower data.vocab_size and model.vocab_size",
        notes[0],
    )
    assert re.fullmatch(
        r"note: a step takes 128 sequences, and there are \d\d to train on: an epoch is less than a step; "
        r"lower batch.tokens, or give more data",
        notes[1],
    )
    assert len(notes) == 2
    assert main([*command, "trainer.steps=2"]) == 0
    assert "note: the tokenizer" not in capsys.readouterr().out


def test_what_the_system_refuses_is_said_in_words(capsys, monkeypatch):
    def fail(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO), "some/file")

    monkeypatch.setattr("tputrain.cli.verbs.load_recipe", fail)
    assert main(["run", "tiny.yaml"]) == 1
    assert capsys.readouterr().err == "tputrain: some/file: Input/output error (--debug shows where)\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "tiny.yaml"], "interrupted before training began; nothing to save"),
        (["validate", "runs/tiny"], "interrupted"),
        (["sample", "runs/tiny", "--prompt", "x"], "interrupted"),
    ],
)
def test_a_key_pressed_outside_training_is_one_line(capsys, monkeypatch, arguments, message):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"tputrain.cli.verbs.{arguments[0]}", interrupt)
    assert main(arguments) == 130
    assert mistakes(capsys.readouterr().err, arguments) == f"tputrain: {message}\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("has_begun", [False, True])
def test_a_signal_that_somebody_swallows_is_acted_on_all_the_same(monkeypatch, has_begun, number):
    seen: list[int | None] = []
    acted = threading.Event()

    def swallow(*arguments) -> int:
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            os.kill(os.getpid(), number)
            time.sleep(1)
        with SignalWatch() if has_begun else contextlib.nullcontext() as watch:
            until = time.monotonic() + 30
            while not acted.is_set() and time.monotonic() < until:
                time.sleep(0.01)
                if has_begun and watch.received is not None:
                    seen.append(watch.received)
                    acted.set()
        return 0

    monkeypatch.setattr("tputrain.cli.verbs.run", swallow)
    monkeypatch.setattr("tputrain.cli.command._TIDYING_SECONDS", 0.2)
    monkeypatch.setattr(os, "_exit", lambda code: (seen.append(code), acted.set()))
    main(["run", "llama"])
    assert seen == [number if has_begun else 128 + number]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_pytorch_is_imported_is_not_swallowed(tmp_path, number, code):
    # PyTorch's C++ takes whatever NumPy's import raises for a no.
    (tmp_path / "numpy.py").write_text(f"import os\nos.kill(os.getpid(), {int(number)})\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    command = [sys.executable, "-m", "tputrain.cli", "run", "llama", f"run_dir={tmp_path}/run"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code
    assert done.stderr.strip() == "tputrain: interrupted before training began; nothing to save"


@pytest.mark.parametrize(
    "arguments", [["run"], ["fly", "x"], ["run", "llama", "steps"], ["run", "llama", "--fast"]]
)
def test_wrong_arguments_are_exit_code_2(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_the_first_line_comes_before_pytorch_is_imported():
    command = [sys.executable, "-m", "tputrain", "validate", "llama"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    started = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "tputrain validate llama\n"
        assert time.monotonic() - started < 2.0
        process.kill()


PLAN = ["plan", "llama", "--topology", "v5e:2x2"]
EARLY = [
    (["run", "lama"], "lama: no such file, and no shipped recipe .*did you mean llama"),
    (["run", "llama", "optim.lr=1"], "command line: optim.lr=1: unknown key; .*: optim.learning_rate$"),
    (["run", "typo.yaml"], "typo.yaml: trainer.stepz=3: unknown key; nearest known key: trainer.steps$"),
    (["run", "broken.yaml"], "broken.yaml: line 2, column 1: not valid YAML"),
    (["lr-find", "tiny.yaml", "--steps", "3"], "--steps=3: expected 20 or more"),
    (["plan", "llama", "--topology", "v9e:2x2"], "v9e"),
    (["plan", "llama", "--topology", "v5e:2x2", "seeds=1"], "command line: seeds=1: unknown key; .*: seed$"),
    (
        [*PLAN, "--html", "/none/x.html"],
        r"--html=/none/x.html: cannot be written \(no such directory: /none",
    ),
    ([*PLAN, "--html", "."], r"--html=.: cannot be written \(it is a directory\)"),
    ([*PLAN, "--html", "-"], "--html=-: expected the name of a file"),
    (["validate", "runs/none"], "runs/none: no such run directory or recipe file"),
    (["resume", "runs/none"], "runs/none: no such directory; expected the directory of a run"),
    (["resume", "runs/tiny", "trainer.stepz=9"], "command line: trainer.stepz=9: unknown key"),
    (["resume", "runs/tiny", "run_dir=x"], "command line: run_dir=x: resume goes on in runs/tiny"),
    (["sample", "runs/none", "--prompt", "x"], "runs/none: no such directory"),
    (["sample", "runs/tiny", "--prompt", "x", "--temperature", "-1"], "--temperature=-1.0: expected 0.0"),
    (["import", "nowhere", "new"], "nowhere: no such directory; expected one with config.json"),
    (["import", "runs", "runs"], "runs: there already"),
    (["export", "nowhere", "new"], "nowhere: no such directory; expected a run"),
]


def test_a_mistake_is_answered_before_pytorch_is_loaded(workplace):
    (workplace / "typo.yaml").write_text("trainer: {stepz: 3}\n")
    (workplace / "broken.yaml").write_text("a: [1\n")
    code = (
        "import sys\nfrom tputrain.cli import main\n"
        f"codes = [main(arguments) for arguments in {[arguments for arguments, _ in EARLY]}]\n"
        "print(codes, sorted({'torch', 'jax', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    *lines, last = done.stderr.splitlines()
    assert last == f"{[2] * len(EARLY)} []"
    said = [line for line in lines if line.startswith("tputrain: ")]
    for (_, expected), line in zip(EARLY, said, strict=True):
        assert re.search(f"^tputrain: .*{expected}", line), line


def test_nothing_heavy_is_imported_for_the_help():
    code = (
        "import sys, tputrain, tputrain.cli; print(sorted({'torch', 'jax', 'omegaconf'} & set(sys.modules)))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "the following arguments are required: VERB"),
        (["fly"], "no such verb: 'fly'"),
        (["run"], "the following arguments are required: RECIPE;"),
        (["run", "llama", "--fast"], "'--fast': run has no such option"),
        (["plan", "llama", "--topologie", "v6e:4x4"], "did you mean --topology?"),
        (["plan", "llama"], "plan needs --topology"),
        (["plan", "--topologie", "v6e:4x4", "llama"], "did you mean --topology?"),
        (["ls", "--al"], "'--al': ls has no such option"),
        (["sample", "runs/tiny"], "sample needs --prompt"),
        (
            ["sample", "runs/tiny", "--promt", "x"],
            "'--promt': sample has no such option; did you mean --prompt?",
        ),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], said: str, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1


def test_a_device_that_cannot_be_loaded_is_one_line(tmp_path: Path, monkeypatch, capsys):
    def register() -> None:
        raise ImportError("tpu_backend's C++ extension is not built")

    monkeypatch.setattr("tpu_backend.register", register)
    assert main(["run", "llama", f"run_dir={tmp_path}"]) == 2
    said = "device=auto cannot be loaded: tpu_backend's C++ extension is not built; or set device=cpu"
    assert capsys.readouterr().err.splitlines()[-1] == f"tputrain: {said}"


@pytest.mark.parametrize("arguments", [["validate", "runs/none"], ["sample", "runs/none", "--prompt", "x"]])
def test_a_run_directory_that_is_not_there_is_named(arguments: list[str], capsys):
    assert main(arguments) == 2
    assert "runs/none: no such" in capsys.readouterr().err


@pytest.mark.parametrize("prompt", ["def ", "it's", 'a "b" c', 'it\'s "so"\n\tyes\\n', "été $HOME `x`"])
def test_the_prompt_in_the_command_that_is_suggested_is_the_shell_s_word_for_it(prompt):
    word = _quoted(prompt)
    assert "\n" not in word
    said = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, text=True, check=True)
    assert said.stdout == prompt


def test_a_full_disk_behind_standard_output_does_not_change_the_exit_code(workplace):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tputrain.cli", "ls", "runs"],
            cwd=workplace,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_run_whose_start_would_write_is_locked_first(workplace, capsys):
    unfinished = workplace / "runs" / "tiny" / "checkpoints" / ".unfinished-step-99"
    unfinished.mkdir()
    try:
        with RunLock(workplace / "runs" / "tiny"):
            assert main(["run", "tiny.yaml"]) == 2
        assert "another process" in capsys.readouterr().err
        assert main(["run", "tiny.yaml"]) == 0
        assert "is finished" in capsys.readouterr().out
    finally:
        unfinished.rmdir()


def test_settings_of_samples_during_training_are_refused_by_sample(capsys):
    assert main(["sample", "runs/tiny", "--prompt", "a", "sample.max_new_tokens=2"]) == 2
    assert (
        "sample.max_new_tokens=2: it is of the samples during training; expected --prompt"
        in capsys.readouterr().err
    )
