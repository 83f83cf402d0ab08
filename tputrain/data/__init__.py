"""Text and images: sources, tokenizer, packing. `build_data(DataConfig(), 0)` needs no network."""

from tputrain.batches import IGNORED_LABEL
from tputrain.data.config import DataConfig, DataError
from tputrain.data.images import ImageBatches, ImageData, ImageEvaluation, build_images
from tputrain.data.loading import TrainingBatches, ValidationBatches
from tputrain.data.packing import PackedSequences
from tputrain.data.padding import PaddedSequences
from tputrain.data.pretrained_tokenizer import PretrainedTokenizer, check_vocabulary, load_tokenizer
from tputrain.data.streaming import StreamedBatches, StreamedText, build_stream
from tputrain.data.text import TextData, build_data
from tputrain.data.tokenizer import END_OF_TEXT, Tokenizer

__all__ = [
    "END_OF_TEXT",
    "IGNORED_LABEL",
    "DataConfig",
    "DataError",
    "ImageBatches",
    "ImageData",
    "ImageEvaluation",
    "PackedSequences",
    "PaddedSequences",
    "PretrainedTokenizer",
    "StreamedBatches",
    "StreamedText",
    "TextData",
    "Tokenizer",
    "TrainingBatches",
    "ValidationBatches",
    "build_data",
    "build_images",
    "build_stream",
    "check_vocabulary",
    "load_tokenizer",
]
