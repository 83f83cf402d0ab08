"""Text and images: sources, tokenizer, packing. `DataConfig().build(seed=0)` needs no network."""

from tputrain.batches import IGNORED_LABEL
from tputrain.data.best_fit import BestFitSequences
from tputrain.data.config import Data, DataConfig, DataError, RowsConfig, TextConfig
from tputrain.data.dataset_sources import FileRowsConfig, HubRowsConfig, SavedRowsConfig
from tputrain.data.images import DigitsConfig, ImageBatches, ImageData, ImageEvaluation
from tputrain.data.loading import TrainingBatches, ValidationBatches
from tputrain.data.mixture import MixtureConfig
from tputrain.data.packing import PackedSequences
from tputrain.data.padding import PaddedSequences
from tputrain.data.pretrained_tokenizer import PretrainedTokenizer, check_vocabulary, load_tokenizer
from tputrain.data.sources import DocstringsConfig, TextFilesConfig
from tputrain.data.streaming import StreamedBatches, StreamedText
from tputrain.data.text import TextData
from tputrain.data.tokenizer import END_OF_TEXT, Tokenizer

__all__ = [
    "END_OF_TEXT",
    "IGNORED_LABEL",
    "BestFitSequences",
    "Data",
    "DataConfig",
    "DataError",
    "DigitsConfig",
    "DocstringsConfig",
    "FileRowsConfig",
    "HubRowsConfig",
    "ImageBatches",
    "ImageData",
    "ImageEvaluation",
    "MixtureConfig",
    "PackedSequences",
    "PaddedSequences",
    "PretrainedTokenizer",
    "RowsConfig",
    "SavedRowsConfig",
    "StreamedBatches",
    "StreamedText",
    "TextConfig",
    "TextData",
    "TextFilesConfig",
    "Tokenizer",
    "TrainingBatches",
    "ValidationBatches",
    "check_vocabulary",
    "load_tokenizer",
]
