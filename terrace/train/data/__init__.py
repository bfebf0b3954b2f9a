"""Data: text to tokens once, then the batch of any step on any number of ranks."""

from terrace.train.data.batches import Batches, Source
from terrace.train.data.corpus import read_documents
from terrace.train.data.files import find_documents
from terrace.train.data.order import SampleOrder
from terrace.train.data.token_file import TokenFile
from terrace.train.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from terrace.train.data.tokens import prepare_tokens

__all__ = [
    "Batches",
    "ByteTokenizer",
    "SampleOrder",
    "Source",
    "TokenFile",
    "Tokenizer",
    "find_documents",
    "load_tokenizer",
    "prepare_tokens",
    "read_documents",
]
