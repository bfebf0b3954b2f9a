"""Tokenising a corpus into the cache, against the `tokenizers` library alone on the same texts.

    python -m bench.data [--megabytes 20 --rounds 3]

A byte-level BPE of 8,000 words is trained on a part of the standard library's source. Each round takes turns: the
library's `encode_batch_fast` on all documents at once, and `prepare_tokens` from a JSONL file to a complete cache.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

from terrace.data.corpus import read_documents
from terrace.data.tokenizer import load_tokenizer
from terrace.data.tokens import prepare_tokens


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    texts: list[str] = []
    size = 0
    for text in read_documents("stdlib"):
        texts.append(text)
        size += len(text)
        if size > options.megabytes * 1e6:
            break
    encoder = Tokenizer(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8000, special_tokens=["</s>"], initial_alphabet=alphabet)
    encoder.train_from_iterator(texts[:200], trainer)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        encoder.save(str(folder / "tokenizer.json"))
        lines = folder / "corpus.jsonl"
        lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        tokenizer = load_tokenizer(folder / "tokenizer.json")
        alone_s, ours_s, num_tokens = [], [], 0
        for number in range(options.rounds):
            begin = time.perf_counter()
            encoded = encoder.encode_batch_fast(texts, add_special_tokens=False)
            alone_s.append(time.perf_counter() - begin)
            num_tokens = sum(len(each.ids) for each in encoded)
            del encoded
            begin = time.perf_counter()
            prepare_tokens(lines, tokenizer, folder / f"cache-{number}")
            ours_s.append(time.perf_counter() - begin)
    row = {
        "tokens": num_tokens,
        "library_tokens_per_s": round(num_tokens / min(alone_s)),
        "ours_tokens_per_s": round(num_tokens / min(ours_s)),
        "ratio": round(min(alone_s) / min(ours_s), 3),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
