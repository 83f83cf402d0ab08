"""`tputrain import`: a run directory whose one checkpoint, step 0, holds weights from elsewhere."""

from pathlib import Path

from tputrain.announce import announced, say
from tputrain.batch_size import BatchConfig
from tputrain.checkpoint.dcp_files import DcpFiles
from tputrain.checkpoint.rows import read_into
from tputrain.checkpoint.tensor_files import DCP_INDEX
from tputrain.cli.early_mistakes import new_directory
from tputrain.data import TextFilesConfig, Tokenizer
from tputrain.errors import UserError
from tputrain.models.hf_llama import load_weights, model_config_of
from tputrain.recipe import RecipeConfig
from tputrain.trainer import Trainer


def import_directory(hf_directory: str, out: str) -> int:
    """Make the run directory `out`, which sample and validate read and resume trains further."""
    source = Path(hf_directory)
    directory = new_directory(out)
    model_config = model_config_of(source)
    try:
        tokenizer = Tokenizer.load(source)
    except ValueError as error:
        raise UserError(f"{error}; only a byte-level BPE with that token can be imported") from None
    usual = TextFilesConfig.sequence_length
    length = min(usual, model_config.limits()[0] or usual)
    cfg = RecipeConfig(
        run_dir=str(directory),
        model=model_config,
        data=TextFilesConfig(vocab_size=tokenizer.vocab_size, sequence_length=length),
        batch=BatchConfig(tokens=BatchConfig.sequences * length),
    )
    model = cfg.model.build_empty()
    with announced(f"reading {source}"):
        load_weights(model, source)
    trainer = Trainer(model, cfg, tokenizer=tokenizer)
    if (source / DCP_INDEX).is_file():
        say(_take_optimizer_state(trainer, DcpFiles(source, of_optimizer=True)))
    trainer.save()
    say(f'sample   tputrain sample {directory} --prompt "def "')
    say(f"train    tputrain resume {directory} data.files='notes/*.txt' trainer.steps=200")
    return 0


def _take_optimizer_state(trainer: Trainer, files: DcpFiles) -> str:
    """Give the optimizer the state that the directory has, all of it or nothing; returns a line to say."""
    own = {
        f"{name}.{key}": value
        for name, parameter in trainer.model.named_parameters()
        for key, value in trainer.optimizer.state[parameter].items()
    }
    missing = sorted(own.keys() - set(files.names()))
    if missing:
        return f"optimizer  begins anew: {files.first} has no {missing[0]}"
    for name, value in own.items():
        if files.shape(name) != tuple(value.shape):
            raise UserError(
                f"{files.first}: {name} has the shape {files.shape(name)}: expected {tuple(value.shape)}"
            )
        read_into(value, files, name)
    return f"optimizer  goes on, with {len(own):,} tensors of its state"
