"""A byte-level BPE tokenizer: training, encoding, and the files that Hugging Face's AutoTokenizer reads."""

import json
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

END_OF_TEXT = "<|endoftext|>"
"""Opens and closes every document: something to start from, and the sign to stop."""


_LONGEST_PIECE = 2**24
"""Characters that are encoded at once. An encoding takes some hundred bytes a token."""

# A line begins where no token of a byte-level BPE crosses: white space before it belongs to one line's end.
_LINE_BEGINS = re.compile(r"(?<=\S\n)(?=\S)")


def pieces_of(text: str, longest: int) -> Iterator[str]:
    """`text` in pieces of about `longest` characters that give the tokens of the whole."""
    first = 0
    while len(text) - first > longest and (found := _LINE_BEGINS.search(text, first + longest)) is not None:
        yield text[first : found.start()]
        first = found.start()
    yield text[first:]


class Tokenizer:
    """Text to token ids and back, without loss for any text."""

    FILE = "tokenizer.json"
    """What `load` reads."""

    has_chat_template = False
    """Whether it knows how a conversation is written (`render`)."""

    start_of_text_id: int
    """Opens every document."""
    end_of_text_id: int
    """Closes every document, and is the sign to stop."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        end_of_text: str = END_OF_TEXT,
        start_of_text: str | None = None,
    ):
        """`start_of_text`: None: `end_of_text` opens documents too. Raises ValueError for unknown tokens."""
        self._tokenizer = tokenizer
        # A text that spells out "<|endoftext|>" is text: it must not end the document.
        tokenizer.encode_special_tokens = True
        self.end_of_text_id = self._id_of(end_of_text)
        self.start_of_text_id = self._id_of(start_of_text or end_of_text)

    def _id_of(self, token: str) -> int:
        index = self._tokenizer.token_to_id(token)
        if index is None:
            raise ValueError(f"the tokenizer has no {token} token")
        return index

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Learn at most `vocab_size` entries from `texts`; the same texts give the same tokenizer."""
        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer=trainer)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{END_OF_TEXT} $A",
            pair=f"{END_OF_TEXT} $A {END_OF_TEXT} $B",
            special_tokens=[(END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))],
        )
        return cls(tokenizer)

    @classmethod
    def load(cls, directory: Path | str) -> "Tokenizer":
        """Read what `save` wrote. Raises ValueError where tokenizer.json is missing or damaged."""
        path = Path(directory) / cls.FILE
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises no narrower type
            raise ValueError(f"{path} is not a tokenizer: {error}") from None

    def save(self, directory: Path | str) -> None:
        """Write tokenizer.json, tokenizer_config.json, special_tokens_map.json into an existing directory."""
        special = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
            **special,
        }
        directory = Path(directory)
        (directory / self.FILE).write_text(self._tokenizer.to_str(pretty=True), encoding="utf-8")
        (directory / "tokenizer_config.json").write_text(
            json.dumps(config, indent=2) + "\n", encoding="utf-8"
        )
        (directory / "special_tokens_map.json").write_text(
            json.dumps(special, indent=2) + "\n", encoding="utf-8"
        )

    # What Hugging Face calls them, for a checkpoint's config.json.

    @property
    def bos_token_id(self) -> int:
        """Opens every document."""
        return self.start_of_text_id

    @property
    def eos_token_id(self) -> int:
        """Closes every document."""
        return self.end_of_text_id

    @property
    def pad_token_id(self) -> int | None:
        """None: rows are filled up by what is marked as no document."""
        return None

    @property
    def vocab_size(self) -> int:
        """Entries learned; below what was asked for where the text is too short to need more."""
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` alone, with no special token around it."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_documents(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """Token ids of each document, with the tokens that open and close one."""
        start, end = self.start_of_text_id, self.end_of_text_id
        if any(len(text) > _LONGEST_PIECE for text in texts):
            return [self._encode_pieces(pieces_of(text, _LONGEST_PIECE)) for text in texts]
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [[start, *encoding.ids, end] for encoding in encodings]

    def _encode_pieces(self, pieces: Iterable[str]) -> Sequence[int]:
        ids = array("I", [self.start_of_text_id])  # 4 bytes a token, where a list takes 36
        for piece in pieces:
            (encoding,) = self._tokenizer.encode_batch_fast([piece], add_special_tokens=False)
            ids.extend(encoding.ids)
        ids.append(self.end_of_text_id)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, end-of-text tokens left out; bytes that are no UTF-8 become U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def digest(self) -> str:
        """A hash of the vocabulary with its ids: tokenizers that agree in it give equal ids."""
        # Not of tokenizer.json: another release of the library may write the same vocabulary differently.
        vocabulary = sorted(self._tokenizer.get_vocab().items(), key=lambda entry: entry[1])
        return blake2b(json.dumps(vocabulary).encode(), digest_size=8).hexdigest()

    def token_bytes(self) -> np.ndarray:
        """How many bytes of text each id stands for, int64 of length `vocab_size`; 0 for end-of-text."""
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, index in self._tokenizer.get_vocab().items():
            lengths[index] = len(token)  # the vocabulary spells a byte as one character
        lengths[self.end_of_text_id] = 0
        return lengths
