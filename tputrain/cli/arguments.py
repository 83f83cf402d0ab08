"""What may be typed: every verb with its arguments and examples. Importing this imports nothing heavy."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

import shtab

from tputrain.shipped import shipped_names
from tputrain.versions import __version__

_EXAMPLES = """tputrain run llama                             a recipe that comes with tputrain
tputrain run recipes/llama.yaml trainer.steps=1000 device=cpu
tputrain cp llama my.yaml                      a recipe of your own to edit
tputrain ls                                    the runs below runs/
tputrain resume runs/llama trainer.steps=2000  make a run longer
tputrain report runs/llama                     its curves, as one HTML page
tputrain doctor                                what is wrong with this installation

tputrain VERB --help explains one verb, with examples."""


@dataclass(frozen=True)
class Verb:
    """A verb as `--help` and completion see it."""

    name: str
    help: str
    examples: str
    """One a line, each a command and what it is for."""
    add_arguments: Callable[[argparse.ArgumentParser], None]
    takes_overrides: bool = False
    required: tuple[str, ...] = ()
    """Options that must be given. argparse would miss them before it names a misspelt one."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as everything else here does."""

    def error(self, message: str, verb: str = "") -> NoReturn:
        # argparse lists what may be left out among what is missing.
        message = message.replace(", key=value", "").replace("argument VERB: invalid choice", "no such verb")
        self.exit(2, f"{self.prog}: {message}; {self.prog}{verb and f' {verb}'} --help explains\n")


def build_parser() -> Parser:
    """The parser of the whole command line."""
    parser = Parser(
        prog="tputrain",
        description="Train PyTorch models on TPUs, and on the machine in front of you.",
        epilog=_epilog(_EXAMPLES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tputrain {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in VERBS:
        added = verbs.add_parser(
            verb.name,
            help=verb.help,
            description=verb.help[0].upper() + verb.help[1:] + ".",
            epilog=_epilog(verb.examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,  # --compil would begin a compilation
        )
        verb.add_arguments(added)
        if verb.takes_overrides:
            added.add_argument(
                "overrides", metavar="key=value", nargs="*", help="settings that win over the recipe's"
            )
        added.add_argument("--debug", action="store_true", help="show a traceback with an error")
    return parser


def verb_of(name: str) -> Verb:
    """The verb of this name."""
    return next(verb for verb in VERBS if verb.name == name)


def _epilog(examples: str) -> str:
    return "examples:\n" + "".join(f"  {line}".rstrip() + "\n" for line in examples.splitlines())


# -- the arguments of each verb ------------------------------------------------------------------------------


def _recipe(parser: argparse.ArgumentParser) -> None:
    shipped = ", ".join(shipped_names("recipes"))
    help = f"a recipe: a YAML file, or the name of a shipped one ({shipped})"
    _completed(parser.add_argument("target", metavar="RECIPE", help=help), shtab.FILE)


def _swept(parser: argparse.ArgumentParser) -> None:
    _recipe(parser)
    parser.add_argument("--lowest", type=float, default=1e-6, help="where it begins (default: 1e-6)")
    parser.add_argument("--highest", type=float, default=1.0, help="where it ends at the latest (default: 1)")
    parser.add_argument("--steps", type=int, default=100, help="training steps (default: 100)")


def _planned(parser: argparse.ArgumentParser) -> None:
    _recipe(parser)
    help = "where it is to run: v6e:16x16, v5p-128 (128 cores), '2x v5e:16x16' (two slices)"
    parser.add_argument("--topology", metavar="SLICE", help=f"{help} (required)")
    help = "have the TPU's compiler (libtpu) judge the plan: minutes, and no TPU"
    parser.add_argument("--compile", action="store_true", help=help)
    help = "compile the best candidates for so long, and take the fastest by the compiler's figures"
    parser.add_argument("--search", metavar="SECONDS", type=float, help=help)
    parser.add_argument("--json", action="store_true", help="every candidate with its figures, as JSON")
    help = "write a page with a picture of the torus, memory and the time line of a step"
    parser.add_argument("--html", metavar="FILE", help=help)


def _run_dir(parser: argparse.ArgumentParser) -> None:
    help = "a run directory, such as runs/llama"
    _completed(parser.add_argument("target", metavar="RUN_DIR", help=help), shtab.DIRECTORY)


def _validated(parser: argparse.ArgumentParser) -> None:
    help = "a run directory; or a recipe, which is then only checked"
    _completed(parser.add_argument("target", metavar="RUN_DIR", help=help), shtab.FILE)


def _sampled(parser: argparse.ArgumentParser) -> None:
    _run_dir(parser)
    parser.add_argument(
        "--prompt", help='the beginning, such as "def "; to a chat model, a question (required)'
    )
    parser.add_argument("--max-new-tokens", type=int, default=64, help="length of the text (default: 64)")
    parser.add_argument("--temperature", type=float, help="0: the likeliest token (default: the recipe's)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, another text (default: 0)")


def _listed(parser: argparse.ArgumentParser) -> None:
    help = "where to look for runs, at any depth (default: runs)"
    _completed(
        parser.add_argument("target", metavar="DIR", nargs="?", default="runs", help=help), shtab.DIRECTORY
    )


def _copied(parser: argparse.ArgumentParser) -> None:
    names = shipped_names("recipes")
    parser.add_argument(
        "target", metavar="RECIPE", help=f"a shipped recipe: {', '.join(names)}"
    ).choices = None
    help = "the new file, or a directory for it (default: RECIPE.yaml here)"
    _completed(parser.add_argument("path", metavar="PATH", nargs="?", help=help), shtab.FILE)


def _reported(parser: argparse.ArgumentParser) -> None:
    help = "run directories; several are compared"
    _completed(parser.add_argument("targets", metavar="RUN_DIR", nargs="+", help=help), shtab.DIRECTORY)
    help = "the HTML file (default: report.html in the one RUN_DIR, or here for several)"
    _completed(parser.add_argument("-o", "--output", metavar="FILE", help=help), shtab.FILE)


def _exported(parser: argparse.ArgumentParser) -> None:
    help = "a run directory, of which the newest whole checkpoint is taken, or a checkpoint"
    _completed(parser.add_argument("target", metavar="RUN_DIR|CHECKPOINT", help=help), shtab.DIRECTORY)
    _new_directory(parser)
    help = "hf: Hugging Face's; dcp: weights and optimizer for torch.distributed.checkpoint (default: hf)"
    parser.add_argument("--format", choices=("hf", "dcp"), default="hf", help=help)


def _imported(parser: argparse.ArgumentParser) -> None:
    help = "a Hugging Face directory: config.json, *.safetensors (or what dcp.save wrote), tokenizer.json"
    _completed(parser.add_argument("target", metavar="HF_DIR", help=help), shtab.DIRECTORY)
    _new_directory(parser)


def _new_directory(parser: argparse.ArgumentParser) -> None:
    help = "the directory to make; it must not hold anything yet"
    _completed(parser.add_argument("out", metavar="OUT", help=help), shtab.DIRECTORY)


def _nothing(parser: argparse.ArgumentParser) -> None:
    pass


def _shell(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh"), help="whose completion script to print")


def _completed(argument: argparse.Action, with_what: Mapping[str, object]) -> None:
    argument.complete = with_what  # type: ignore[attr-defined]  # where shtab looks


VERBS = (
    Verb(
        "run",
        "train, or go on training where the run stopped",
        """tputrain run llama
tputrain run llama trainer.steps=1000            longer; a finished run goes on
tputrain run my.yaml data.files='notes/*.txt'    your own text
tputrain run llama device=cpu run_dir=runs/cpu   another device, another directory""",
        _recipe,
        takes_overrides=True,
    ),
    Verb(
        "resume",
        "go on with a run as it was configured, without its recipe",
        """tputrain resume runs/llama                              after a crash or a signal
tputrain resume runs/llama trainer.steps=1000           make it longer
tputrain resume runs/llama optim.learning_rate=1e-3     changed settings are listed; what would make it
                                                        another run (model, data, batch, seed) is not""",
        _run_dir,
        takes_overrides=True,
    ),
    Verb(
        "validate",
        "evaluate the newest checkpoint of a run, or check a recipe",
        """tputrain validate runs/llama
tputrain validate runs/llama trainer.evaluate_batches=null    all the validation text
tputrain validate my.yaml                                     only checks the recipe""",
        _validated,
        takes_overrides=True,
    ),
    Verb(
        "sample",
        "write text with the newest checkpoint of a run",
        """tputrain sample runs/llama --prompt "def "
tputrain sample runs/llama --prompt "class " --temperature 0 --max-new-tokens 200""",
        _sampled,
        takes_overrides=True,
        required=("--prompt",),
    ),
    Verb(
        "lr-find",
        "find a learning rate: a short sweep, which leaves the run alone",
        """tputrain lr-find llama
tputrain lr-find my.yaml optim.name=muon --steps 200
tputrain lr-find llama --lowest 1e-4 --highest 0.1     closer""",
        _swept,
        takes_overrides=True,
    ),
    Verb(
        "plan",
        "say whether a recipe fits a TPU slice, how it is laid out there, and how fast a step is",
        """tputrain plan my.yaml --topology v6e:16x16
tputrain plan my.yaml --topology '2x v5e:16x16'    two slices, over the data center's network
tputrain plan my.yaml --topology v5e:2x2 --compile  what the TPU's compiler says, without a TPU
tputrain plan my.yaml --topology v5p-128 --json    every candidate, and why it was not taken""",
        _planned,
        takes_overrides=True,
        required=("--topology",),
    ),
    Verb(
        "ls",
        "list runs: step, loss, state, and when something was last written",
        """tputrain ls                  below runs/
tputrain ls /data/experiments""",
        _listed,
    ),
    Verb(
        "report",
        "write one HTML page with the curves of a run, or compare several",
        """tputrain report runs/llama                   writes runs/llama/report.html
tputrain report runs/a runs/b -o a-and-b.html  the same axes, and which settings differ""",
        _reported,
    ),
    Verb(
        "cp",
        "copy a shipped recipe to edit",
        """tputrain cp llama                 makes llama.yaml here
tputrain cp llama my.yaml && tputrain run my.yaml""",
        _copied,
    ),
    Verb(
        "export",
        "write a checkpoint as a Hugging Face directory, or for torch.distributed.checkpoint",
        """tputrain export runs/llama exported                             the newest whole checkpoint
tputrain export runs/llama/checkpoints/step-400 exported
tputrain export runs/llama exported --format dcp
python -c 'from transformers import AutoModelForCausalLM as M; M.from_pretrained("exported")'""",
        _exported,
    ),
    Verb(
        "import",
        "make a run that begins with the weights of a Hugging Face directory",
        """tputrain import SmolLM-135M runs/smol       a Llama from disk; nothing is downloaded
tputrain sample runs/smol --prompt "def "
tputrain resume runs/smol data.files='notes/*.txt' trainer.steps=200""",
        _imported,
    ),
    Verb(
        "doctor",
        "say what is wrong with this installation, and how to mend it",
        """tputrain doctor
TPU_PLATFORM=tpu tputrain doctor    is the TPU usable?""",
        _nothing,
    ),
    Verb(
        "completion",
        "print a completion script for the shell",
        """eval "$(tputrain completion bash)"                                            this shell
tputrain completion bash > ~/.local/share/bash-completion/completions/tputrain  every new one
tputrain completion zsh > "${fpath[1]}/_tputrain\"""",
        _shell,
    ),
)
