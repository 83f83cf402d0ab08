"""Models of transformers by directory, and models by import path."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.tputrain.test_lora import Batches, train
from tputrain import LogConfig, RunConfig, Trainer, TrainerConfig
from tputrain.checkpoint.configuration import padding_of, write_configuration
from tputrain.cli import main
from tputrain.data import Tokenizer
from tputrain.data.pretrained_tokenizer import PretrainedTokenizer
from tputrain.errors import UserError
from tputrain.job import Recipe, build_trained_model
from tputrain.models import (
    LoraConfig,
    ModelConfig,
    add_lora,
    huggingface,
    load_huggingface,
)
from tputrain.models.huggingface import build_huggingface, limits_said
from tputrain.recipe import read_recipe


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(params=["gpt2", "llama"])
def directory(request, tmp_path: Path) -> Path:
    """A small model that transformers itself has saved."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if request.param == "gpt2":
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        shape = GPT2Config(vocab_size=300, n_embd=16, n_layer=1, n_head=2, n_positions=32, **off)
        model = GPT2LMHeadModel(shape)
    else:
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=300,
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=32,
            )
        )
    model.save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def test_it_computes_what_transformers_does_with_labels_that_are_next_tokens(directory):
    from transformers import AutoModelForCausalLM

    ours, theirs = load_huggingface(str(directory)), AutoModelForCausalLM.from_pretrained(directory)
    ids = torch.randint(300, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits)
        torch.testing.assert_close(ours(ids[:, :-1], ids[:, 1:]), theirs(ids, labels=ids).loss)


def test_documents_in_a_sequence_do_not_see_each_other(directory):
    model = load_huggingface(str(directory)).eval()
    ids = torch.randint(300, (1, 10), generator=torch.Generator().manual_seed(2))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    documents = torch.tensor([[0] * 4 + [1] * 6])
    with torch.no_grad():
        packed = model(ids, position_ids=positions, document_ids=documents)
        torch.testing.assert_close(packed[:, 4:], model(ids[:, 4:]), atol=1e-5, rtol=1e-4)


WINDOW = 6
SIZES_WITH_WINDOW = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 50,
    "pad_token_id": 0,
    "sliding_window": WINDOW,
}
BOTH_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("mistral", {}),
        ("phi3", {}),
        ("qwen3", BOTH_KINDS | {"use_sliding_window": True}),
        ("gemma3_text", BOTH_KINDS | {"head_dim": 8}),
        ("gemma2", BOTH_KINDS | {"head_dim": 8}),
        ("olmo3", BOTH_KINDS),
    ],
)
def test_layers_with_a_window_see_so_many_tokens(kind: str, settings: dict[str, Any]) -> None:
    config = {"model_type": kind, **SIZES_WITH_WINDOW, **settings}
    model = build_huggingface(config).eval()
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**config), dtype=torch.float32
    ).eval()
    theirs.load_state_dict(model.state_dict())
    ids = torch.randint(50, (2, 3 * WINDOW), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), theirs(ids, use_cache=False).logits)
        assert limits_said(model.config.to_dict())[1] == 50


def test_a_window_of_other_kinds_of_layers_is_refused_where_it_would_cut() -> None:
    config = {"model_type": "qwen3", **SIZES_WITH_WINDOW, **BOTH_KINDS, "use_sliding_window": True}
    model = build_huggingface(config)
    model.config.layer_types = ["sliding_attention", "linear_attention"]
    refusing, ids = huggingface._adapted(model, False), torch.arange(WINDOW + 1)[None]
    with pytest.raises(UserError, match="a sequence of 7: expected at most 6, its config's sliding_window"):
        refusing(ids)


EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 16},
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 4},
}


@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_training_adds_the_router_s_loss_where_the_config_asks_for_it(
    kind: str, recomputes: bool, device: str
) -> None:
    from transformers import AutoModelForCausalLM

    sizes = {"vocab_size": 128, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    asked = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    model = build_huggingface(
        {"model_type": kind, **sizes, **heads, **asked, **EXPERTS[kind]}, activation_checkpointing=recomputes
    )
    theirs = AutoModelForCausalLM.from_config(model.config)
    theirs.load_state_dict(model.state_dict())
    model.to(device)
    tokens = torch.randint(128, (2, 9), generator=torch.Generator().manual_seed(0))
    ids, labels = tokens[:, :-1].to(device), tokens[:, 1:].to(device)

    loss = model(ids, labels=labels)
    loss.backward()
    outputs = theirs(tokens[:, :-1])
    of_tokens, of_router = cross_entropy(outputs.logits.mT, tokens[:, 1:]), 0.5 * outputs.aux_loss
    expected = of_tokens + of_router
    expected.backward()
    torch.testing.assert_close(loss.cpu(), expected, rtol=1e-5, atol=1e-5)
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.cpu(), gradients[name], rtol=1e-3, atol=1e-5)

    model.eval()  # evaluations are of the tokens alone
    with torch.no_grad():
        torch.testing.assert_close(model(ids, labels=labels).cpu(), of_tokens, rtol=1e-5, atol=1e-5)


def test_random_values_depend_on_the_seed_and_leave_the_generator_alone(directory):
    state = torch.get_rng_state()
    first, again, other = (load_huggingface(str(directory), "random", seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    name, value = next(iter(first.named_parameters()))
    assert torch.equal(value, again.get_parameter(name))
    assert not torch.equal(value, other.get_parameter(name))


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_it_trains_and_its_checkpoint_is_a_directory_that_transformers_reads(directory, device, tmp_path):
    from transformers import AutoModelForCausalLM

    if device == "tpu":
        torch.tpu.reset_fallback_stats()
    trainer = train(load_huggingface(str(directory)), device, 3, tmp_path / "run")
    if device == "tpu":
        assert torch.tpu.fallback_stats() == {}
    checkpoint = tmp_path / "run" / "checkpoints" / "step-3"
    theirs, loading = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not any(loading.values()), loading
    ids = Batches().batch_at(9, 0)["input_ids"]
    with torch.no_grad():
        ours = trainer.model(ids.to(device)).cpu()
        torch.testing.assert_close(theirs(ids).logits, ours, atol=1e-4, rtol=1e-4)


class Asked(Batches):
    """Batches for a model that shifts the labels itself."""

    def batch_at(self, step: int, micro: int) -> dict[str, torch.Tensor]:
        ids = super().batch_at(step, micro)["input_ids"]
        return {"input_ids": ids, "labels": ids}


def their_tokenizer(**special: str):
    from tokenizers import Tokenizer as Fast
    from tokenizers import models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(40)} | {
        "<s>": 40,
        "</s>": 41,
        "<pad>": 42,
        "<far>": 900,
    }
    return PreTrainedTokenizerFast(tokenizer_object=Fast(models.WordLevel(words, unk_token="w0")), **special)


def test_a_model_of_transformers_given_in_python_has_checkpoints_that_it_reads(directory, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory)
    model.generation_config.temperature = 0.5  # without do_sample, which its own saving refuses
    model.generation_config.eos_token_id = [7, 41]
    before = model.config.to_dict()
    cfg = RunConfig(device="cpu", run_dir=str(tmp_path / "run"), trainer=TrainerConfig(steps=2))
    tokenizer = their_tokenizer(bos_token="<s>", eos_token="</s>", pad_token="<far>")
    trainer = Trainer(model, cfg, train_loader=Asked(), tokenizer=tokenizer)
    trainer.fit()
    assert model.config.to_dict() == before
    checkpoint = tmp_path / "run" / "checkpoints" / "step-2"
    theirs, loading = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not any(loading.values()), loading
    assert type(theirs) is type(model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], tensor), name
    assert (theirs.config.bos_token_id, theirs.config.eos_token_id) == (40, 41)
    assert theirs.config.pad_token_id is None  # the model's vocabulary has no such token
    generation = theirs.generation_config
    assert (generation.temperature, generation.bos_token_id, generation.eos_token_id) == (0.5, 40, [7, 41])
    assert AutoTokenizer.from_pretrained(checkpoint).eos_token_id == 41


def test_another_module_around_it_is_not_passed_off_as_one_of_transformers(directory, tmp_path):
    from transformers import AutoModelForCausalLM

    around = nn.Sequential(AutoModelForCausalLM.from_pretrained(directory))
    write_configuration(around, None, tmp_path)
    assert list(tmp_path.glob("*.json")) == []


@pytest.mark.parametrize("kind", ["ours", "theirs"])
def test_config_json_names_the_special_tokens_of_the_run_s_tokenizer(tmp_path, directory, kind):
    with torch.device("meta"):  # which has the ids of Llama 3 by its name
        ours = ModelConfig("llama-1b").build_empty()
    model = ours if kind == "ours" else load_huggingface(str(directory))
    for special, expected in (
        ({"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}, (40, 41, 42)),
        ({"eos_token": "</s>"}, (41, 41, None)),  # which opens documents too
    ):
        write_configuration(model, PretrainedTokenizer(their_tokenizer(**special)), tmp_path)
        for name in ("config.json", "generation_config.json"):
            said = json.loads((tmp_path / name).read_text())
            assert tuple(said.get(f"{each}_token_id") for each in ("bos", "eos", "pad")) == expected, name


def test_a_resume_takes_no_gradient_from_the_padding_token_of_the_tokenizer(directory, tmp_path):
    """config.json names it after the run's first save: transformers would build another embedding by that."""
    model = load_huggingface(str(directory))
    assert padding_of(model) is None
    cfg = RunConfig(device="cpu", run_dir=str(tmp_path / "run"), log=LogConfig(progress="none"))
    tokenizer = PretrainedTokenizer(their_tokenizer(eos_token="</s>", pad_token="</s>"))
    checkpoint = Trainer(model, cfg, tokenizer=tokenizer).save()
    assert json.loads((checkpoint / "config.json").read_text())["pad_token_id"] == 41
    recipe = tmp_path / "my.yaml"
    recipe.write_text(
        f"device: cpu\nmodel: {{name: huggingface, path: {directory}}}\n"
        "batch: {tokens: 256, sequences: 8}\ndata: {sequence_length: 32, vocab_size: 300}"
    )
    built, _, _ = build_trained_model(read_recipe(recipe), checkpoint)
    assert padding_of(built) is None


def test_lora_finds_its_layers_by_name(tmp_path, directory):
    model = load_huggingface(str(directory))
    if type(model).__name__ == "GPT2LMHeadModel":
        with pytest.raises(UserError, match=r"^lora\.match=\*_proj: expected a pattern .* such as lm_head"):
            add_lora(model, LoraConfig(rank=2), seed=0)
        return
    add_lora(model, LoraConfig(rank=2, match=["*.q_proj"]), seed=0)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == [
        "model.layers.0.self_attn.q_proj.lora_a",
        "model.layers.0.self_attn.q_proj.lora_b",
    ]


def test_a_recipe_names_a_directory_and_knows_its_limits(directory, tmp_path):
    recipe = tmp_path / "my.yaml"
    text = f"model: {{name: huggingface, path: {directory}}}\nbatch: {{tokens: 256, sequences: 8}}\n"
    recipe.write_text(text + "data: {sequence_length: 32, vocab_size: 300}")
    assert isinstance(read_recipe(recipe).model.build(seed=0), nn.Module)
    recipe.write_text(text + "data: {sequence_length: 32, vocab_size: 301}")
    cfg = read_recipe(recipe)  # reads nothing of the directory
    with pytest.raises(UserError, match=r"data\.vocab_size=301: expected at most model\.vocab_size=300"):
        Recipe(cfg).build_from(None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"name": "huggingface"},
            r"^model\.path=null: expected a directory, a run or a name with model\.name=h",
        ),
        (
            {"name": "vit-digits", "path": "x"},
            r"^model\.path=x: expected nothing with model\.name=vit-digits",
        ),
        (
            {"name": "vit-digits", "head_dim": 4},
            r"^model\.head_dim=4: expected nothing with model\.name=vit-d",
        ),
        ({"config": {"a": 1}}, r"^model\.config=\{'a': 1\}: expected nothing with model\.name=llama-5m"),
        (
            {"name": "huggingface", "path": "x", "config": {"model_type": "gpt2"}},
            r"^model\.config=\{'model_type': 'gpt2'\}: expected nothing beside model\.path=x",
        ),
        ({"name": "huggingface", "path": "x", "init": "zero"}, r"^model\.init=zero: expected one of weights"),
        (
            {"name": "huggingface", "path": "x", "head_dim": 4},
            r"^model\.head_dim=4: expected nothing with model\.name=huggingface",
        ),
    ],
)
def test_a_mistake_in_the_model_is_one_line(fields, message):
    with pytest.raises(UserError, match=message):
        ModelConfig(**fields)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "gtp2"},
            r"^model\.config\.model_type=gtp2: expected one that .*; did you mean gpt2\?",
        ),
        (
            {"n_embd": 8},
            r"^model\.config\.model_type=null: expected one that transformers knows, such as gpt2$",
        ),
        (
            {"model_type": "gpt2", "n_layrs": 2},
            r"^model\.config\.n_layrs=2: unknown to gpt2; expected one of its settings; did you mean n_layer",
        ),
        (
            {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "head_dim": 8},
            r"^model\.config\.head_dim=8: unknown to gpt2; expected one of its settings",
        ),
        (
            {"model_type": "gpt2", "n_embd": 9, "n_layer": 1},
            r"^model\.config: transformers makes no gpt2 of it \(",
        ),
        ({"model_type": "gpt2", "n_layer": "many"}, r"^model\.config: transformers makes no gpt2 of it \("),
    ],
)
def test_a_mistake_in_the_configuration_of_a_model_is_one_line(config, message):
    with pytest.raises(UserError, match=message) as caught:
        build_huggingface(config)
    assert "\n" not in str(caught.value)


def test_a_configuration_gives_the_model_that_its_directory_would(directory):
    config = json.loads((directory / "config.json").read_text())
    names = {"gpt2": "n_embd n_layer n_head n_positions resid_pdrop embd_pdrop attn_pdrop"}.get(
        config["model_type"],
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
        "max_position_embeddings",
    )
    chosen = {name: config[name] for name in ("model_type", "vocab_size", *names.split())}
    ours, theirs = build_huggingface(chosen, seed=3), load_huggingface(str(directory), "random", 3)
    for (name, parameter), other in zip(ours.named_parameters(), theirs.parameters()):
        assert torch.equal(parameter, other), name


@pytest.mark.parametrize("device", ["cpu", "tpu"])
@pytest.mark.parametrize("kind", ["layers", "products"])
def test_layers_computed_again_give_the_same_gradients(directory, device, kind):
    forwards = 0

    def gradients(recomputes: bool | str) -> dict[str, torch.Tensor]:
        nonlocal forwards
        model = load_huggingface(str(directory), activation_checkpointing=recomputes).to(device).train()
        layer = next(
            module
            for module in model.modules()
            if hasattr(module, "input_layernorm") or hasattr(module, "ln_1")
        )
        mlp = layer.mlp.register_forward_pre_hook(lambda *_: count())
        batch = {name: tensor.to(device) for name, tensor in Batches().batch_at(0, 0).items()}
        model(**batch).backward()
        mlp.remove()
        return {name: p.grad.cpu() for name, p in model.named_parameters()}

    def count() -> None:
        nonlocal forwards
        forwards += 1

    expected = gradients(False)
    assert forwards == 1
    ours = gradients(kind)
    assert forwards == 3
    for name, gradient in expected.items():
        torch.testing.assert_close(ours[name], gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0}
        | {"embd_pdrop": 0.0, "attn_pdrop": 0.0},
        {"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
        | {"num_attention_heads": 2},
    ],
    ids=["gpt2", "llama"],
)
def test_layers_are_computed_again_as_their_kinds_say(config):
    model = build_huggingface(config | {"vocab_size": 300}, 0, ["none", "layers"]).train()
    layers = [each for each in model.modules() if hasattr(each, "recomputes")]
    assert [layer.recomputes for layer in layers] == ["none", "layers"]
    times = [0, 0]

    def counting(number):
        def count(*_):
            times[number] += 1

        return count

    for number, layer in enumerate(layers):
        layer.mlp.register_forward_pre_hook(counting(number))
    model(**Batches().batch_at(0, 0)).backward()
    assert times == [1, 2]
    plain = build_huggingface(config | {"vocab_size": 300}).train()
    plain(**Batches().batch_at(0, 0)).backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters()):
        assert torch.equal(ours.grad, theirs.grad), name


def test_a_directory_without_a_model_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"^model\.path=.*: cannot be loaded: ") as caught:
        load_huggingface(str(tmp_path))
    assert "\n" not in str(caught.value)


CODE = """import json, sys, torch
def build():
    return torch.nn.Linear(2, 2)
number = int
def fails():
    raise RuntimeError("not today")
def lacks():
    return {}["width"]
def ends():
    sys.exit(7)
def reads():
    return json.loads("[")
def takes(width):
    return build()
"""


def test_a_plan_of_a_directory_reads_no_weights(directory, tmp_path, monkeypatch, capsys):
    def read(*arguments, **options):
        raise AssertionError("the weights were read")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", read)
    recipe = tmp_path / "my.yaml"
    recipe.write_text(
        f"model: {{name: huggingface, path: {directory}}}\n"
        "batch: {tokens: 256, sequences: 8}\ndata: {sequence_length: 32, vocab_size: 300}"
    )
    assert main(["plan", str(recipe), "--topology", "v6e:2x2"]) == 0
    assert capsys.readouterr().out.startswith(f"{directory}, ")


def test_code_is_imported_only_where_the_recipe_trusts_it(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(CODE)
    (tmp_path / "broken_models.py").write_text("\nimport nothing\n")
    (tmp_path / "worse_models.py").write_text("def (\n")
    monkeypatch.chdir(tmp_path)  # whose packages are found
    monkeypatch.setattr(sys, "path", [*sys.path])
    recipe = tmp_path / "my.yaml"
    text = "model: {name: import, path: 'my_models:build'}"
    recipe.write_text(text)
    with pytest.raises(UserError, match=r"model\.name=import: expected trust_code=true with it"):
        read_recipe(recipe)
    assert "my_models" not in sys.modules
    recipe.write_text(text + "\ntrust_code: true")
    cfg = read_recipe(recipe).model
    assert "my_models" not in sys.modules
    first, again = cfg.build(seed=4), cfg.build(seed=4)
    assert isinstance(first, nn.Linear)
    assert torch.equal(first.weight, again.weight)
    for path, message in (
        ("my_models:missing", "has no attribute 'missing'; expected package.module:function"),
        ("no_such_module:x", "No module named 'no_such_module'; expected"),
        ("my_models:number", "it returned a int, expected an nn.Module"),
        (
            "my_models:fails",
            r'RuntimeError: not today at .*my_models.py:6: raise RuntimeError\("not today"\)$',
        ),
        ("my_models:lacks", r"KeyError: 'width' at .*my_models.py:8: return"),
        ("my_models:ends", r"it ends the process: SystemExit: 7 at .*my_models.py:10: sys.exit\(7\)$"),
        ("my_models:reads", "JSONDecodeError: .* at .*my_models.py:12: return json.loads"),
        ("my_models:takes", "missing a required argument: 'width' at .*my_models.py:13; expected a function"),
        (
            "broken_models:build",
            "ModuleNotFoundError: .*'nothing' at .*broken_models.py:2: import",
        ),
        ("worse_models:build", r"SyntaxError: .* at .*worse_models.py:1: def \($"),
    ):
        with pytest.raises(UserError, match=f"^model.path={path}: .*{message}"):
            ModelConfig(name="import", path=path).build(seed=0)


def test_the_trained_model_of_a_run_comes_from_its_checkpoint(directory, tmp_path):
    trainer = train(load_huggingface(str(directory)), "cpu", 1, tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-1"
    recipe = tmp_path / "my.yaml"
    recipe.write_text(
        f"device: cpu\nmodel: {{name: huggingface, path: {directory}}}\n"
        "batch: {tokens: 256, sequences: 8}\ndata: {sequence_length: 32, vocab_size: 300}"
    )
    Tokenizer.train(["def x(): pass\n" * 9], 300).save(checkpoint)
    model, _, _ = build_trained_model(read_recipe(recipe), checkpoint)
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name
