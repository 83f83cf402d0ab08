"""The verbs around a run: ls, cp, resume, export, import, completion, and what --help teaches."""

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.tputrain.tiny_run import finish_a_run
from tputrain import RunConfig, Trainer, TrainerConfig
from tputrain.checkpoint.integrity import seal, verify
from tputrain.cli import main
from tputrain.cli.arguments import VERBS, build_parser
from tputrain.loggers.jsonl import read_jsonl
from tputrain.run_lock import RunLock


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A directory with a recipe, its text, and the run that it leads to."""
    return finish_a_run(tmp_path_factory.mktemp("finished"))


@pytest.fixture(autouse=True)
def workplace(finished, tmp_path, monkeypatch) -> Path:
    """A copy of it, to be spoilt."""
    directory = tmp_path / "work"
    shutil.copytree(finished, directory)
    monkeypatch.chdir(directory)
    return directory


def refused(capsys, *arguments: str) -> str:
    """The one line that a mistake of the user gives."""
    assert main(list(arguments)) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


# -- ls ------------------------------------------------------------------------------------------------------


def test_ls_lists_runs_with_step_loss_and_state(capsys):
    shutil.copytree("runs/tiny", "runs/deep/er/half")
    half = Path("runs/deep/er/half")
    shutil.rmtree(half / "checkpoints" / "step-4")
    (half / "metrics.jsonl").write_text(Path("runs/tiny/metrics.jsonl").read_text().splitlines(True)[0])
    Path("runs/no-run").mkdir()
    with RunLock(Path("runs/tiny")):
        assert main(["ls"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "step", "loss", "evaluation", "state", "written"]
    found = {row.split()[0]: row.split()[1:] for row in rows}
    assert found.keys() == {"tiny", "deep/er/half"}
    evaluated = read_jsonl("runs/tiny/evaluations.jsonl")[-1]["loss"]
    trained = read_jsonl("runs/tiny/metrics.jsonl")[-1]["loss"]
    assert found["tiny"][:4] == ["4/4", f"{trained:.4f}", f"{evaluated:.4f}", "running"]
    assert found["deep/er/half"][0] == "2/4"
    assert found["deep/er/half"][3] == "stopped"


def test_ls_shows_a_loss_that_is_no_number(capsys):
    with Path("runs/tiny/metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": null, "loss_hex": "nan"}\n')
    assert main(["ls"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[2] == "nan"


def test_ls_says_what_it_cannot_read_and_lists_the_rest(capsys):
    shutil.copytree("runs/tiny", "runs/newer")
    Path("runs/newer/events.jsonl").unlink()
    state = Path("runs/newer/checkpoints/step-4/state.json")
    state.write_text(state.read_text().replace('"format": 1', '"format": 99'))
    assert main(["ls", "runs"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1].startswith("tiny ")
    assert out[2].startswith(
        "unreadable: runs/newer/checkpoints/step-4/state.json: format 99, written by tputrain"
    )


def test_ls_of_nothing_is_a_mistake(capsys):
    assert "none: no such directory; `tputrain run llama` makes one in runs/llama" in refused(
        capsys, "ls", "none"
    )
    assert "cache: no run in it; `tputrain run llama` makes one" in refused(capsys, "ls", "cache")


# -- cp ------------------------------------------------------------------------------------------------------


def test_cp_gives_a_recipe_that_is_valid_where_it_lies(capsys):
    assert main(["cp", "llama"]) == 0
    assert "tputrain run llama.yaml" in capsys.readouterr().out
    assert main(["cp", "llama", "mine.yaml"]) == 0
    assert Path("mine.yaml").read_text() == Path("llama.yaml").read_text()
    assert main(["validate", "mine.yaml"]) == 0
    capsys.readouterr()
    assert "mine.yaml: there already; choose another name" in refused(capsys, "cp", "llama", "mine.yaml")
    assert "lama: no shipped recipe (there are: " in refused(capsys, "cp", "lama")
    assert "none/x.yaml: cannot be written" in refused(capsys, "cp", "llama", "none/x.yaml")


# -- resume --------------------------------------------------------------------------------------------------


def test_resume_needs_no_recipe_and_names_what_is_different(capsys):
    os.remove("tiny.yaml")
    assert main(["resume", "runs/tiny", "trainer.steps=6", "optim.learning_rate=1e-4"]) == 0
    out = capsys.readouterr().out
    assert "note: trainer.steps is 6 from here on, it was 4" in out
    assert "note: optim.learning_rate is 0.0001 from here on, it was 0.001" in out
    assert (
        out.splitlines()[-1]
        == "resume      tputrain resume runs/tiny optim.learning_rate=1e-4 trainer.steps=12"
    )
    assert [record["step"] for record in read_jsonl("runs/tiny/metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def forms_of(checkpoint: Path) -> tuple[str, str]:
    execution = json.loads((checkpoint / "state.json").read_text())["config"]["execution"]
    return execution["train"], execution["validate"]


@pytest.mark.parametrize(("chosen", "form"), [("compile", "compile"), ("fused", "fused"), (None, "fused")])
def test_a_run_saved_with_auto_goes_on_in_the_form_that_it_had_chosen(chosen, form, capsys):
    forms = [f"execution.train={form}", f"execution.validate={form}"]
    assert main(["run", "tiny.yaml", "device=tpu", "run_dir=runs/plain", *forms]) == 0
    shutil.copytree("runs/plain", "runs/auto")
    checkpoint = Path("runs/auto/checkpoints/step-4")
    state = json.loads((checkpoint / "state.json").read_text())
    state["config"]["execution"] |= {"train": "auto", "validate": "auto"}
    state["execution"] = {"begun_at": 0, "ready_at": 2, "form": "compile", "seconds": {}, "chosen": chosen}
    (checkpoint / "state.json").write_text(json.dumps(state))
    for name in ("COMPLETE", "checksums.json"):
        (checkpoint / name).unlink()
    seal(checkpoint)
    shutil.copytree("runs/auto", "runs/changed")
    capsys.readouterr()
    assert main(["resume", "runs/plain", "trainer.steps=6"]) == 0
    assert "note: execution" not in capsys.readouterr().out
    assert main(["resume", "runs/auto", "trainer.steps=6"]) == 0
    replaced = f"note: execution.train was auto, which is gone; {form} takes its place"
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: execution")]
    assert notes == [replaced]
    assert forms_of(Path("runs/auto/checkpoints/step-6")) == (form, form)
    losses = [
        [record["loss_hex"] for record in read_jsonl(f"runs/{name}/metrics.jsonl")]
        for name in ("plain", "auto")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6
    assert main(["resume", "runs/changed", "trainer.steps=6", "execution.train=strict"]) == 0
    said = capsys.readouterr().out
    assert replaced in said
    assert f"note: execution.train is strict from here on, it was {form}" in said


def test_resume_goes_on_in_the_directory_it_is_given(capsys):
    os.rename("runs/tiny", "moved")
    assert main(["resume", "moved", "trainer.steps=6"]) == 0
    assert "step 6" in Path("moved/events.jsonl").read_text() or Path("moved/checkpoints/step-6").is_dir()
    assert not Path("runs/tiny").exists()


@pytest.mark.parametrize("verb", ["resume", "validate"])
def test_a_run_that_a_script_made_is_left_to_that_script(capsys, verb):
    cfg = RunConfig(run_dir="runs/mine", device="cpu", trainer=TrainerConfig(steps=1))
    loader = [(torch.ones(2, 4), torch.zeros(2, dtype=torch.int64))]
    Trainer(torch.nn.Linear(4, 2), cfg, train_loader=loader).fit()
    capsys.readouterr()
    assert "runs/mine: a script made this run" in refused(capsys, verb, "runs/mine")


def test_a_run_directory_that_is_a_file_is_refused(capsys):
    Path("runs/file").write_text("something")
    said = refused(capsys, "run", "llama", "run_dir=runs/file")
    assert "run_dir=runs/file is a file: expected a directory" in said


def test_resume_of_a_finished_run_leaves_it_alone(capsys):
    assert main(["resume", "runs/tiny"]) == 0
    assert "runs/tiny is finished: it has done its 4 steps" in capsys.readouterr().out


@pytest.mark.parametrize("command", [("run", "tiny.yaml"), ("resume", "runs/tiny")])
def test_the_last_checkpoint_of_a_finished_run_that_its_mirror_lacks_is_copied(command, tmp_path, capsys):
    assert main([*command, f"checkpoint.mirror=file://{tmp_path}/mirror"]) == 0
    out = capsys.readouterr().out
    assert f"copying checkpoint step-4 to file://{tmp_path}/mirror" in out
    assert "runs/tiny is finished: it has done its 4 steps" in out
    verify(tmp_path / "mirror" / "checkpoints" / "step-4")


@pytest.mark.parametrize(
    ("override", "was"),
    [
        ("model.hidden_size=32", "16"),
        ("data.vocab_size=290", "280"),
        ("data.files=other.txt", "text.txt"),
        ("data.validation_fraction=0.2", "0.05"),
        ("batch.tokens=256", "128"),
        ("seed=3", "0"),
        ("optim.name=sgd", "adamw"),
    ],
)
def test_resume_refuses_what_would_make_it_another_run(capsys, override, was):
    assert main(["resume", "runs/tiny", "trainer.steps=6", "optim.weight_decay=0.2", override]) == 2
    captured = capsys.readouterr()
    key, _, value = override.partition("=")
    assert f"refused: {key} would be {value}, it was {was}" in captured.out
    assert captured.err == (
        f"tputrain: {override}: runs/tiny/checkpoints/step-4 was made with {key}={was}; set it back, "
        "or choose another run_dir\n"
    )
    assert not Path("runs/tiny/checkpoints/step-6").exists()


def test_resume_names_all_that_makes_it_another_run(capsys):
    line = refused(capsys, "resume", "runs/tiny", "seed=3", "batch.tokens=256")
    assert "seed=3" in line.partition(": runs/")[0]
    assert "batch.tokens=256" in line.partition(": runs/")[0]
    assert line.rstrip().endswith("; set them back, or choose another run_dir")


def test_resume_refuses_another_kind_before_what_does_not_fit_it(capsys):
    line = refused(capsys, "resume", "runs/tiny", "optim.name=sgd", "optim.beta1=0.8")
    assert "optim.name=sgd: runs/tiny/checkpoints/step-4 was made with optim.name=adamw; set it back" in line
    line = refused(capsys, "resume", "runs/tiny", "optim.name=adamw", "optim.momentum=0.8")
    assert "command line: optim.momentum=0.8: expected nothing with optim.name=adamw" in line


def test_a_run_goes_on_in_micro_batches_of_another_size_with_the_same_samples(capsys):
    shutil.copytree("runs/tiny", "runs/same")
    losses = {}
    for name, sequences in (("same", 4), ("tiny", 2)):
        settings = ["trainer.steps=8", "trainer.evaluate_batches=null", f"batch.sequences={sequences}"]
        assert main(["resume", f"runs/{name}", *settings]) == 0
        records = read_jsonl(f"runs/{name}/metrics.jsonl") + read_jsonl(f"runs/{name}/evaluations.jsonl")
        losses[name] = [record["loss"] for record in records]
    assert "note: batch.sequences is 2 from here on, it was 4" in capsys.readouterr().out
    assert losses["tiny"] != losses["same"]  # in the last digits
    assert losses["tiny"] == pytest.approx(losses["same"], rel=1e-5)


def test_resume_does_not_take_another_directory(capsys):
    assert "run_dir=x: resume goes on in runs/tiny" in refused(capsys, "resume", "runs/tiny", "run_dir=x")
    assert "none: no such directory" in refused(capsys, "resume", "none")
    Path("empty").mkdir()
    assert "empty: no whole checkpoint" in refused(capsys, "resume", "empty")


def test_events_tell_when_processes_started_saved_and_ended():
    assert main(["resume", "runs/tiny", "trainer.steps=6"]) == 0
    events = read_jsonl("runs/tiny/events.jsonl")
    assert [(event["event"], event["step"]) for event in events] == [
        ("started", 0), ("saved", 2), ("saved", 4), ("ended", 4), ("started", 4), ("saved", 6), ("ended", 6),
    ]  # fmt: skip
    assert events[0]["environment"]["device"] == "cpu"
    assert [event["config"]["trainer"]["steps"] for event in events if "config" in event] == [4, 6]
    assert sorted(event["time"] for event in events) == [event["time"] for event in events]


# -- export and import ---------------------------------------------------------------------------------------


def test_what_is_exported_is_what_transformers_loads(capsys):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert main(["export", "runs/tiny", "out"]) == 0
    assert not {"state.json", "optimizer.safetensors", "COMPLETE"} & set(os.listdir("out"))
    model, loading = AutoModelForCausalLM.from_pretrained("out", output_loading_info=True)
    assert not any(loading.values()), loading
    saved = load_file("runs/tiny/checkpoints/step-4/model.safetensors")
    for name, tensor in saved.items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert AutoTokenizer.from_pretrained("out")("def add(").input_ids


def test_nothing_is_exported_that_only_training_needs():
    """With averages of the weights, a checkpoint also holds those that training goes on with."""
    averaged = ["optim.ema_decay=0.9", "trainer.steps=1", "run_dir=runs/averaged"]
    assert main(["run", "tiny.yaml", *averaged]) == 0
    assert Path("runs/averaged/checkpoints/step-1/trained.safetensors").exists()
    assert main(["export", "runs/averaged", "out"]) == 0
    assert set(os.listdir("out")) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_export_takes_the_newest_whole_checkpoint_or_the_one_named(capsys):
    with Path("runs/tiny/checkpoints/step-4/model.safetensors").open("r+b") as file:
        file.write(b"\0\0\0\0")
    assert main(["export", "runs/tiny", "newest"]) == 0
    assert "step-4 refused: model.safetensors: damaged" in capsys.readouterr().out
    assert main(["export", "runs/tiny/checkpoints/step-2", "named"]) == 0
    assert Path("newest/model.safetensors").read_bytes() == Path("named/model.safetensors").read_bytes()
    capsys.readouterr()
    said = refused(capsys, "export", "runs/tiny/checkpoints/step-4", "third")
    assert "step-4 cannot be exported: model.safetensors: damaged" in said
    assert "named: there already" in refused(capsys, "export", "runs/tiny", "named")
    assert "nowhere: no such directory" in refused(capsys, "export", "nowhere", "third")
    assert "runs: no checkpoint in it" in refused(capsys, "export", "runs", "third")
    assert "text.txt/x: cannot be written" in refused(
        capsys, "export", "runs/tiny/checkpoints/step-2", "text.txt/x"
    )
    assert not Path("third").exists()


def test_a_model_without_a_config_is_not_exported_as_if_it_had_one(capsys):
    checkpoint = Path("runs/tiny/checkpoints/step-4")
    for name in ("config.json", "COMPLETE", "checksums.json"):
        (checkpoint / name).unlink()
    seal(checkpoint)
    assert "its model wrote no config.json" in refused(capsys, "export", "runs/tiny", "out")


def test_an_imported_directory_gives_equal_logits_and_trains_further(capsys):
    from transformers import AutoModelForCausalLM

    from tputrain.models.hf_llama import model_config_of
    from tputrain.snapshot.contents import load_model

    assert main(["export", "runs/tiny", "hf"]) == 0
    theirs = AutoModelForCausalLM.from_pretrained("hf").eval()
    theirs.save_pretrained("theirs", max_shard_size="20KB")  # as transformers writes it, in several files
    shutil.copy("hf/tokenizer.json", "theirs/tokenizer.json")
    assert len(list(Path("theirs").glob("*.safetensors"))) > 1

    assert main(["import", "theirs", "runs/imported"]) == 0
    ours = model_config_of(Path("theirs")).build_empty().eval()
    load_model(ours, Path("runs/imported/checkpoints/step-0"))
    ids = torch.randint(0, 280, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-5, rtol=0)

    more = [
        "device=cpu",
        "data.sequence_length=16",
        "batch.tokens=64",
        "batch.sequences=4",
        "sample.max_new_tokens=0",
    ]
    more += ["data.files=text.txt", "data.cache_dir=cache", "trainer.steps=2", "trainer.evaluate_batches=2"]
    assert main(["resume", "runs/imported", *more]) == 0
    assert [record["step"] for record in read_jsonl("runs/imported/metrics.jsonl")] == [1, 2]
    exported = read_jsonl("runs/tiny/evaluations.jsonl")[-1]
    imported = read_jsonl("runs/imported/evaluations.jsonl")[0]
    assert (exported["step"], imported["step"]) == (4, 0)
    assert imported["loss"] == pytest.approx(exported["loss"], abs=1e-5)
    capsys.readouterr()
    assert "data.files=null: runs/imported/checkpoints/step-2 was made with" in refused(
        capsys, "resume", "runs/imported", "data.files=null", "trainer.steps=3"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2': expected 'llama'"),
        ({"attention_bias": True}, "attention_bias=True: expected False"),
        ({"hidden_size": "16"}, "hidden_size='16': expected a whole number"),
        ({"hidden_size": 24}, "has shape (300, 16), config.json asks for (300, 24)"),
        ({"num_hidden_layers": 2}, "the weights lack model.layers.1."),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope type 'yarn': expected 'default' or 'llama3'"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small': expected a number"),
    ],
)
def test_a_directory_that_is_no_llama_of_ours_is_refused(capsys, change, message):
    assert main(["export", "runs/tiny", "hf"]) == 0
    config = json.loads(Path("hf/config.json").read_text())
    Path("hf/config.json").write_text(json.dumps(config | change))
    assert message in refused(capsys, "import", "hf", "runs/imported")
    assert not Path("runs/imported/checkpoints").exists()


def test_weights_that_would_have_to_be_unpickled_are_refused(capsys):
    assert main(["export", "runs/tiny", "hf"]) == 0
    os.rename("hf/model.safetensors", "hf/pytorch_model.bin")
    assert "save them as safetensors first" in refused(capsys, "import", "hf", "runs/imported")
    Path("hf/model.safetensors.index.json").write_text('{"weight_map": {"a": "../../secret.safetensors"}}')
    assert "expected the name of a file beside it" in refused(capsys, "import", "hf", "runs/imported")


# -- help and completion -------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", [verb.name for verb in VERBS])
def test_every_verb_s_help_has_examples_that_parse(verb, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([verb, "--help"])
    examples = capsys.readouterr().out.partition("examples:\n")[2].splitlines()
    assert examples
    commands = [re.split(r"\s{2,}", line.strip())[0] for line in examples]
    ours = [command for command in commands if re.match(r"(TPU_PLATFORM=tpu )?tputrain ", command)]
    assert ours
    parsed = set()
    for command in ours:
        words = shlex.split(re.split(r" (?:&&|>) ", command)[0])
        parsed.add(build_parser().parse_known_args(words[words.index("tputrain") + 1 :])[0].verb)
    assert verb in parsed


def test_arguments_that_a_verb_does_not_take_are_refused(capsys):
    for arguments in (["ls", "runs", "trainer.steps=3"], ["doctor", "now"], ["completion", "fish"]):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        assert capsys.readouterr().err.count("\n") == 1


def completed(line: str, tmp_path: Path) -> list[str]:
    """What bash offers at the end of `line`."""
    script = tmp_path / "completion.bash"
    words = line.split(" ")
    program = f"""
    source {script}
    COMP_WORDS=({" ".join(shlex.quote(word) for word in words)}); COMP_CWORD={len(words) - 1}
    function_of=$(complete -p tputrain | sed 's/.*-F \\([^ ]*\\).*/\\1/')
    $function_of; printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_bash_completes_verbs_options_and_directories(tmp_path, capsys):
    assert main(["completion", "bash"]) == 0
    (tmp_path / "completion.bash").write_text(capsys.readouterr().out)
    assert completed("tputrain re", tmp_path) == ["resume", "report"]
    assert "--max-new-tokens" in completed("tputrain sample --max", tmp_path)
    assert any("runs" in found for found in completed("tputrain report ru", tmp_path))


def test_zsh_gets_a_script_with_every_verb(capsys):
    assert main(["completion", "zsh"]) == 0
    script = capsys.readouterr().out
    assert script.startswith("#compdef tputrain")
    for verb in VERBS:
        assert f"{verb.name}:" in script
