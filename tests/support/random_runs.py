"""Random runs of `terrace train`, drawn by a number, and the documents that each of their steps trains on.

A batch is a whole epoch, so that the order of samples, which the docs leave open, does not matter.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from random import Random
from string import ascii_letters
from typing import Any

import torch

from tests.support.independent import IGNORED, Document
from tests.support.random_plans import Case, draw

END_OF_TEXT, VOCABULARY = 256, 257  # of the tokenizer "bytes"
NUM_STEPS = 4
WAYS = ("join", "separate", "whole")
RATES = ("cosine", "linear", "constant", "wsd")


@dataclass(frozen=True)
class Run:
    """A case that `terrace train` runs: texts, the way to make sequences of them, tables `[train]` and `[balance]`."""

    case: Case
    texts: tuple[str, ...]
    documents: str
    train: Mapping[str, Any]
    balance: Mapping[str, float] = field(default_factory=dict)

    def kinds(self) -> set[str]:
        """The choices of the case that a run keeps, and its own."""
        return self.case.kinds() - {"packed"} | {
            f"documents {self.documents}",
            f"rate {self.train['schedule']}",
            *self.balance,
        }

    def epoch(self) -> list[Document]:
        """The documents of every step, or the parts of them that share a sequence."""
        ids = [[*text.encode(), END_OF_TEXT] for text in self.texts]
        if self.documents == "whole":
            return [_part(document, 0, len(document) - 1, len(document)) for document in ids]
        stream = [token for document in ids for token in document]
        ends = [0, *accumulate(len(document) for document in ids)]
        size, found = self.case.sequence, []
        for start in range(0, self.case.batch * size, size):
            if self.documents == "join":
                found.append(_part(stream, start, start + size, len(stream)))
                continue
            cuts = sorted({start, start + size, *(end for end in ends if start < end < start + size)})
            for first, last in pairwise(cuts):
                own_end = min(end for end in ends if end > first)
                found.append(_part(stream, first, last, own_end))
        return found


def _part(stream: list[int], first: int, last: int, end: int) -> Document:
    """Tokens first ... last - 1 of a document that ends before token `end`."""
    labels = [stream[place] if place < end else IGNORED for place in range(first + 1, last + 1)]
    return torch.tensor(stream[first:last]), torch.tensor(labels)


def draw_run(seed: int) -> Run:
    random = Random(f"run {seed}")
    case = draw(next(number for number in range(1000 * seed, 1000 * seed + 1000) if draw(number).own))
    model = {**case.model, "vocab_size": VOCABULARY}
    plan = {**case.plan, "balance": random.choice(("tokens", "cost"))}
    case = replace(case, model=model, plan=plan, sequence=random.choice((12, 16)), frozen=())
    documents = random.choice(WAYS)
    schedule = random.choice(RATES)
    train: dict[str, Any] = {
        "steps": NUM_STEPS,
        "batch": case.batch,
        "sequence": case.sequence,
        "warmup_steps": random.randint(0, 2),
        "schedule": schedule,
    }
    if schedule != "constant":
        train["final_lr_fraction"] = random.choice((0.1, 0.3))
    if schedule == "wsd":
        train |= {"decay_steps": random.randint(1, 2), "decay": random.choice(("sqrt", "linear"))}
    return Run(case, _texts(random, case, documents), documents, train)


def _texts(random: Random, case: Case, documents: str) -> tuple[str, ...]:
    """Texts of one epoch: of documents that are packed whole, each pair fills a sequence."""
    sizes: list[int] = []
    if documents == "whole":
        for _ in range(case.batch):
            first = random.randint(case.sequence // 2, case.sequence - 1)
            sizes += [first, case.sequence - first]
    else:
        wanted = case.batch * case.sequence + 1 + random.randrange(case.sequence)  # with an end after each text
        while wanted:
            size = random.randint(1, 2 * case.sequence)
            size = size if wanted - size - 1 > 1 else wanted - 1
            sizes.append(size)
            wanted -= size + 1
    return tuple("".join(random.choice(ascii_letters) for _ in range(size)) for size in sizes)
