"""A recipe: a YAML file, the pieces it includes and overrides on top, made into one checked config.

Every mistake is one line: which file, which key, which value, what was expected. A recipe can name code only
where it says trust_code=true.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from tputrain.batch_size import BatchConfig
from tputrain.callbacks.sample_text import SampleConfig
from tputrain.config import RunConfig
from tputrain.config_checks import described_type, expect, nearest
from tputrain.data import DataConfig
from tputrain.errors import UserError, first_line
from tputrain.kinds import Family, foreign
from tputrain.models import LoraConfig, ModelConfig
from tputrain.models.recompute import OFFLOAD
from tputrain.parallel.cluster import hosts
from tputrain.recipe_keys import unknown_key
from tputrain.recipe_layers import (
    COMMAND_LINE,
    Layer,
    layers_of_file,
    leaves,
    override_layer,
    shown,
)


@dataclass(frozen=True)
class RecipeConfig(RunConfig):
    """A complete job: a run, its model and its data."""

    trust_code: bool = False
    """Whether model.name=import may import and run the code that model.path names."""
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_what_is_read()
        self.batch.micro_batches(self.data.sequence_length)
        if self.parallel.processes > 1 and not self.parallel.auto:
            self.batch.check_divides(self.parallel.data_ranks(self.parallel.processes * hosts().size))
        expect(
            self.trust_code or not self.model.runs_code,
            "model.name",
            self.model.name,
            "trust_code=true with it: the recipe names code, which is run",
        )
        expect(
            "next_token_accuracy" not in self.trainer.metrics,
            "trainer.metrics",
            "next_token_accuracy",
            "accuracy: in a recipe the labels are the next tokens already",
        )
        form = self.execution.train
        expect(
            OFFLOAD not in (self.model.recomputes or "").split(",") or form in ("fused", "captured"),
            "model.activation_checkpointing",
            self.model.recomputes,
            f"layers or products with execution.train={form}: the host keeps inputs within one program",
        )
        self.check_limits(*self.model.limits())

    def check_limits(self, positions: int | None, vocab_size: int | None) -> None:
        """Raise UserError where the model has fewer positions or entries than the data asks for."""
        length, trained = self.data.sequence_length, self.data.trained_vocab_size
        expect(
            positions is None or length is None or length <= positions,
            "data.sequence_length",
            length,
            f"at most {positions}, the positions of the model",
        )
        expect(
            trained is None or vocab_size is None or trained <= vocab_size,
            "data.vocab_size",
            trained,
            f"at most model.vocab_size={vocab_size}",
        )

    def _check_what_is_read(self) -> None:
        is_images, condition = not self.data.is_text, f"with data.source={self.data.source}"
        kind = "vit-digits or import" if is_images else "a model of language"
        fits = self.model.reads_text in (None, self.data.is_text)
        expect(fits, "model.name", self.model.name, f"{kind} {condition}")
        samples, kind = self.batch.samples, "a number of images" if is_images else "nothing (batch.tokens)"
        expect(is_images == (samples is not None), "batch.samples", samples, f"{kind} {condition}")


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> RecipeConfig:
    """The checked configuration of the recipe at `path`, with `key=value` overrides on top."""
    return _build_overridden(layers_of_file(path), overrides)


def config_from_json(values: dict[str, Any], source: str, overrides: Sequence[str] = ()) -> RecipeConfig:
    """The configuration that a checkpoint's state.json holds; `source` names it in errors."""
    return _build_overridden([Layer(source, values, is_stored=True)], overrides)


def _build_overridden(layers: list[Layer], overrides: Sequence[str]) -> RecipeConfig:
    """`layers` with `overrides` on top. A mistake that goes away without one of those is blamed on it, also
    where the value that then does not fit stands in a file.
    """
    hints = _known_of_any_kind()
    given = [override_layer(text, hints) for text in overrides]
    try:
        return _build([*layers, *given])
    except UserError as error:
        if str(error).startswith(f"{COMMAND_LINE}: "):
            raise
        for index, text in enumerate(overrides):
            if _is_valid([*layers, *given[:index], *given[index + 1 :]]):
                raise UserError(f"{COMMAND_LINE}: {text} does not fit {error}") from None
        raise


def _is_valid(layers: list[Layer]) -> bool:
    try:
        _build(layers)
    except UserError:
        return False
    return True


def _build(layers: list[Layer]) -> RecipeConfig:
    """Merge layer by layer, so that each mistake is blamed on the source it came from."""
    kinds, layers = _chosen(layers)
    merged = OmegaConf.structured(RecipeConfig)
    # The dataclasses are frozen for their readers, not for this merge.
    OmegaConf.set_readonly(merged, False)
    for family, kind in kinds.items():
        merged[family.group] = OmegaConf.structured(kind)
        OmegaConf.set_readonly(merged[family.group], False)
    sources: dict[str, str] = {}
    known = _known_keys(RecipeConfig, kinds)
    for layer in layers:
        for key, value in leaves(layer.values):
            _check_key(layer.source, key, value, known)
            sources[key] = layer.source
        merged = _merge(merged, layer, known)
    cfg = _to_config(merged, sources)
    micro_batches = cfg.batch.micro_batches(cfg.data.sequence_length)
    set_in, accumulate = sources.get("trainer.accumulate"), cfg.trainer.accumulate
    if set_in is not None and accumulate != micro_batches:
        raise UserError(
            f"{set_in}: trainer.accumulate={accumulate}: expected nothing, "
            f"it follows from batch.tokens in a recipe (here {micro_batches})"
        )
    return replace(cfg, trainer=replace(cfg.trainer, accumulate=micro_batches))


Kinds = dict[type[Family], type[Family]]
"""The kind that was chosen, of each family."""


def kind_keys() -> list[str]:
    """The keys that choose a kind, such as optim.name."""
    return [f"{family.group}.{family.by}" for family in _families()]


def _families() -> list[type[Family]]:
    hints = get_type_hints(RecipeConfig).values()
    return [hint for hint in hints if isinstance(hint, type) and issubclass(hint, Family)]


def _chosen(layers: list[Layer]) -> tuple[Kinds, list[Layer]]:
    """The kind of each family that the last layer to name one names, and the layers without settings of
    other kinds, as far as a layer below left them behind or a run wrote them.

    Raises UserError for such a setting in the layer that names the kind, or above it.
    """
    kinds: Kinds = {}
    for family in _families():
        named, chooser = getattr(family, family.by), -1
        for index, layer in enumerate(layers):
            group = layer.values.get(family.group)
            if isinstance(group, dict) and family.by in group:
                named, chooser = group[family.by], index
        try:
            if isinstance(named, str) and "${" in named:
                named = _interpolated(f"{family.group}.{family.by}", named, layers)
            kinds[family] = family.kind_of(named)
        except UserError as error:
            raise UserError(f"{layers[chooser].source}: {error}") from None
        chosen_in = layers[chooser].source if chooser >= 0 else None
        layers = [
            _without_foreign(
                layer, family, named, layer.is_stored or (i < chooser and layer.source != chosen_in)
            )
            for i, layer in enumerate(layers)
        ]
    return kinds, layers


def _interpolated(key: str, text: str, layers: list[Layer]) -> Any:
    """What `text`, the value of `key`, stands for: `${seed}` for another key, `${oc.env:NAME}` for a variable
    of the environment. UserError where it stands for nothing.
    """
    defaults = OmegaConf.to_container(OmegaConf.structured(RecipeConfig))
    try:
        return OmegaConf.select(OmegaConf.merge(defaults, *(layer.values for layer in layers)), key)
    except OmegaConfBaseException as error:
        raise UserError(f"{key}={text}: {first_line(error)}") from None


def _without_foreign(layer: Layer, family: type[Family], name: str, is_left_behind: bool) -> Layer:
    """`layer` without the settings of other kinds than `name`; UserError unless they are left behind."""
    group = layer.values.get(family.group)
    if not isinstance(group, dict):
        return layer
    others = {key: owners for key in group if name not in (owners := family.owners(key)) and owners}
    if others and not is_left_behind:
        key, owners = next(iter(others.items()))
        error = foreign(
            f"{family.group}.{key}", shown(group[key]), f"{family.group}.{family.by}={name}", owners
        )
        raise UserError(f"{layer.source}: {error}")
    kept = {key: value for key, value in group.items() if key not in others}
    return replace(layer, values=layer.values | {family.group: kept})


def _check_key(source: str, key: str, value: Any, known: dict[str, Any]) -> None:
    if _is_free(key, value, known):
        return
    if key in known:
        if is_dataclass(known[key]):
            if value == {}:
                return
            raise UserError(
                f"{source}: {key}={shown(value)}: expected keys below it, such as {_first_below(key, known)}"
            )
        if isinstance(value, dict):
            raise UserError(f"{source}: {key}={shown(value)}: expected {described_type(known[key])}")
        _check_elements(source, key, value, known[key])
        return
    raise unknown_key(source, key, value, known)


def _is_free(key: str, value: Any, known: dict[str, Any]) -> bool:
    """Whether the key is one of keys and values that somebody else has to know, or one below it."""
    free = [name for name, hint in known.items() if get_origin(hint) is dict]
    return any(key.startswith(f"{name}.") or (key == name and isinstance(value, dict)) for name in free)


def _check_elements(source: str, key: str, value: Any, hint: Any) -> None:
    """The elements of a list of dataclasses are mappings of their fields."""
    element = next(iter(get_args(hint)), None)
    if not (get_origin(hint) is list and is_dataclass(element) and isinstance(value, list)):
        return
    names = [option.name for option in fields(element)]
    for index, entry in enumerate(value):
        if not isinstance(entry, dict):
            expected = f"{{{', '.join(names)}}}"
            raise UserError(f"{source}: {key}[{index}]={shown(entry)}: expected {expected}")
        for name in entry:
            if name not in names:
                known = nearest(str(name), names) or ", ".join(names)
                raise UserError(f"{source}: {key}[{index}].{name}: unknown key; nearest known key: {known}")
        for name, given in entry.items():
            try:
                OmegaConf.merge(OmegaConf.structured(element), {name: given})
            except OmegaConfBaseException:
                expected = described_type(get_type_hints(element)[name])
                raise UserError(
                    f"{source}: {key}[{index}].{name}={shown(given)}: expected {expected}"
                ) from None


def _merge(merged: DictConfig, layer: Layer, known: dict[str, Any]) -> DictConfig:
    try:
        return OmegaConf.merge(merged, layer.values)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        key = str(error.full_key or "")
        value = dict(leaves(layer.values)).get(key)
        if key not in known or isinstance(error, ConfigKeyError):
            raise UserError(f"{layer.source}: {key}={shown(value)}: {first_line(error)}") from None
        raise UserError(
            f"{layer.source}: {key}={shown(value)}: expected {described_type(known[key])}"
        ) from None


def _to_config(merged: DictConfig, sources: dict[str, str]) -> RecipeConfig:
    """A value or a check that fails is blamed on the file its key came from."""
    try:
        return OmegaConf.to_object(merged)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        key = error.full_key or ""
        of_list = key.rpartition("[")[0]
        source = sources.get(key) or sources.get(of_list) or sources.get(key.partition("[")[0], "defaults")
        missing = "expected a value in place of ???" if isinstance(error, MissingMandatoryValue) else None
        raise UserError(f"{source}: {key}: {missing or first_line(error)}") from None
    except UserError as error:
        key = str(error).partition("=")[0]
        key = key if key in sources else key.rpartition(".")[0]  # of a list's element: the list
        # The culprit may be a default that does not fit what was set: blame what was set last.
        source = sources.get(key) or next(reversed(sources.values()), "defaults")
        raise UserError(f"{source}: {error}") from None


def _hints(kind: type, kinds: Kinds) -> dict[str, Any]:
    """The fields of a dataclass to their types: of a family, the kind that was chosen."""
    hints = get_type_hints(kind)
    return {entry.name: kinds.get(hints[entry.name], hints[entry.name]) for entry in fields(kind)}


def _known_keys(kind: type, kinds: Kinds, prefix: str = "") -> dict[str, Any]:
    """Every dotted key, groups included, to its type."""
    known: dict[str, Any] = {}
    for name, hint in _hints(kind, kinds).items():
        key = prefix + name
        known[key] = hint
        if is_dataclass(hint):
            known |= _known_keys(hint, kinds, key + ".")  # type: ignore[arg-type]
    return known


def _known_of_any_kind() -> dict[str, Any]:
    """Every dotted key that some kind has, to its type."""
    known = _known_keys(RecipeConfig, {})
    for family in _families():
        for kind in family.kinds.values():
            known |= _known_keys(kind, {}, f"{family.group}.")
    return known


def _first_below(key: str, known: dict[str, Any]) -> str:
    return next(name for name in known if name.startswith(key + "."))
