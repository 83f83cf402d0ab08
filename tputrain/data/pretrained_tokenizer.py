"""Any fast tokenizer of Hugging Face, by directory or name, and its chat template."""

import json
import re
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from tputrain.checkpoint.named_directory import model_directory
from tputrain.checkpoint.state import STATE
from tputrain.config_checks import did_you_mean
from tputrain.data.config import DataError
from tputrain.data.files import nearest_path
from tputrain.data.tokenizer import Tokenizer
from tputrain.errors import first_line
from tputrain.hub import asking_hub, is_path

MARK = "tputrain_tokenizer.json"
"""Tells a directory that `PretrainedTokenizer.save` wrote from one of `Tokenizer.save`."""
_FILES = (
    STATE,
    MARK,
    Tokenizer.FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
"""Of a checkpoint; the others may be large."""
_EXPECTED = "expected a directory with tokenizer.json, or a name on the Hugging Face hub (and a network)"
_ONE_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def load_tokenizer(directory: Path | str) -> Tokenizer:
    """Read what either kind of tokenizer saved. Raises ValueError where it is missing or damaged."""
    if (Path(directory) / MARK).is_file():
        return PretrainedTokenizer.load(directory)
    return Tokenizer.load(directory)


def find_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that data.tokenizer names. Raises DataError, one line, where there is none to use."""
    directory = model_directory(name, only=_FILES)
    try:
        if directory is None:
            return _on_hub(name)
        if (directory / STATE).is_file():
            return load_tokenizer(directory)  # a checkpoint of our own
        if not any(directory.glob("*token*")) and not any(directory.glob("*vocab*")):
            raise ValueError(
                f"no tokenizer in {directory} (a run has one with its first checkpoint); {_EXPECTED}"
            )
        return PretrainedTokenizer.load(directory)
    except ValueError as error:
        hint = None if Path(name).exists() else nearest_path(name)
        raise DataError(f"data.tokenizer={name}: {error}{did_you_mean(hint)}") from None


def _on_hub(name: str) -> Tokenizer:
    if is_path(name):
        raise ValueError(f"no such directory; {_EXPECTED}")
    try:
        with asking_hub(f"data.tokenizer={name}"):
            return PretrainedTokenizer.load(name)
    except OSError as error:
        raise ValueError(f"{error}; {_EXPECTED}") from None


def check_vocabulary(tokenizer: Tokenizer, num_embeddings: int) -> None:
    """Raise DataError, one line, where a model of `num_embeddings` entries lacks some of the tokenizer's."""
    if tokenizer.vocab_size > num_embeddings:
        raise DataError(
            f"model.vocab_size={num_embeddings}: expected at least the tokenizer's {tokenizer.vocab_size} "
            "entries; raise it, or choose another data.tokenizer"
        )


class PretrainedTokenizer(Tokenizer):
    """A tokenizer that was trained elsewhere.

    A document is opened by its beginning-of-text token, where it has one, and closed by its end-of-text
    token, which it must have.
    """

    def __init__(self, pretrained: Any):
        """`pretrained`: a fast tokenizer of `transformers`. Raises ValueError where it has no end-of-text."""
        if not getattr(pretrained, "is_fast", False):
            raise ValueError("it is a slow tokenizer; expected one with a tokenizer.json")
        if pretrained.eos_token is None:
            raise ValueError("it has no eos_token, which ends documents; add one to tokenizer_config.json")
        self._pretrained = pretrained
        self.has_chat_template = pretrained.chat_template is not None
        # Two of our own: for texts, in which a special token's spelling is text, and for rendered
        # conversations, in which it is the token. What is saved stays as it was loaded.
        spelled = pretrained.backend_tokenizer.to_str()
        self._rendered = _plain(spelled)
        super().__init__(_plain(spelled), pretrained.eos_token, pretrained.bos_token)

    @classmethod
    def load(cls, directory: Path | str) -> "PretrainedTokenizer":
        """Read a directory, or what is known by that name on the hub. Raises ValueError, one line."""
        try:
            import transformers  # seconds, and only who names a tokenizer needs it
        except ImportError:
            raise ValueError(
                "a tokenizer of Hugging Face needs transformers: pip install transformers"
            ) from None
        try:
            pretrained = transformers.AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False)
        except Exception as error:  # the library raises no narrower type
            raise ValueError(f"no tokenizer there: {first_line(error)}; {_EXPECTED}") from None
        return cls(pretrained)

    def save(self, directory: Path | str) -> None:
        """Write the files of Hugging Face's `save_pretrained` into an existing directory."""
        self._pretrained.save_pretrained(str(directory))
        (Path(directory) / MARK).write_text(json.dumps({"kind": "pretrained"}) + "\n")

    @property
    def pad_token_id(self) -> int | None:
        """The id of the padding token, if it has one."""
        return self._pretrained.pad_token_id

    @property
    def vocab_size(self) -> int:
        """The largest id, and one: what the model needs, also where ids are left out in between."""
        return max(self._tokenizer.get_vocab().values()) + 1

    def render(self, messages: Sequence[dict[str, str]], asks: bool = False) -> str:
        """A conversation as the chat template writes it; `asks`: up to where the next answer begins."""
        try:
            return self._pretrained.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=asks
            )
        except Exception as error:  # a template may raise what it likes
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(
                f"data.tokenizer: its chat template refuses messages of the roles {roles}: "
                f"{first_line(error)}"
            ) from None

    def encode_rendered(self, text: str) -> tokenizers.Encoding:
        """Ids and offsets (in characters) of what `render` wrote."""
        return self._rendered.encode(text, add_special_tokens=False)

    def is_special(self, id: int) -> bool:
        """Whether this is no text, but a token such as the end of a message."""
        added = self._tokenizer.get_added_tokens_decoder()
        return id in added and added[id].special

    def digest(self) -> str:
        """A hash of the vocabulary, of what opens and closes documents and of the chat template."""
        parts = [super().digest(), self.start_of_text_id, self.end_of_text_id, self._pretrained.chat_template]
        return blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()

    def token_bytes(self) -> np.ndarray:
        """How many bytes of text each id stands for, int64 of length `vocab_size`; 0 for special tokens.

        Of a tokenizer that is not byte-level: of the text that it decodes to.
        """
        vocabulary = self._tokenizer.get_vocab()
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        added = self._tokenizer.get_added_tokens_decoder()
        is_byte_level = "ByteLevel" in json.dumps(json.loads(self._tokenizer.to_str())["decoder"])
        # After another token: the first one of a text may lose its leading space.
        anchor = next(index for token, index in vocabulary.items() if index not in added and token.isascii())
        before = len(self._tokenizer.decode([anchor]).encode())
        for token, index in vocabulary.items():
            if index in added:
                lengths[index] = 0 if added[index].special else len(token.encode())
            elif is_byte_level:
                lengths[index] = len(token)  # the vocabulary spells a byte as one character
            elif _ONE_BYTE.fullmatch(token):
                lengths[index] = 1
            else:
                lengths[index] = len(self._tokenizer.decode([anchor, index]).encode()) - before
        return lengths


def _plain(spelled: str) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_str(spelled)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
