"""The text that a run generates at its end."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from terrace.base.errors import DataError
from terrace.data.batches import Source
from terrace.data.chat_prompt import chat_ids
from terrace.data.chat_tokens import holds_conversations
from terrace.data.documents import open_documents
from terrace.data.ends import ends_of
from terrace.data.tokenizer import Tokenizer, load_tokenizer
from terrace.train.config import RunConfig
from terrace.train.folder import SOURCE
from terrace.train.generate import generate
from terrace.train.job import RunJob

_PROMPT_TOKENS, _SAMPLE_TOKENS = 24, 300


def closing_sample(job: RunJob, folder: Path) -> str:
    """The prompt of a run's sample, continued by the checkpoint in `folder`.

    Generated on one device, whatever the number of ranks.
    """
    data, train = job.run.data, job.run.train
    tokenizer = load_tokenizer(data.tokenizer, data.bos, data.eos)
    prompt = sample_prompt(job.run, job.sources, tokenizer)
    shown = prompt if isinstance(prompt, str) else tokenizer.decode(prompt, keep_special=True)
    return shown + generate(
        folder,
        tokenizer,
        prompt,
        num_tokens=_SAMPLE_TOKENS,
        temperature=0.8,
        window=train.sequence,
        stops=ends_of(tokenizer, data.tokenizer, data.chat_template, job.folder / SOURCE),
    )


def sample_prompt(run: RunConfig, sources: Sequence[Source], tokenizer: Tokenizer) -> str | list[int]:
    """The prompt of a run's closing sample: `train.prompt`, or by default the beginning of the first source.

    If that source holds chats, `train.prompt` becomes a user's message in the training's template, and the default ends
    before the assistant's first answer. Raises `DataError` for a message that does not fit into a chat.
    """
    spec = run.data.sources()[0]
    if run.train.prompt is not None:
        if spec.format != "chat" or not holds_conversations(spec.path, spec.split):
            return run.train.prompt
        try:
            return chat_ids(tokenizer, run.data.tokenizer, run.data.chat_template, run.train.prompt)
        except DataError as error:
            raise DataError(f"train.prompt = {run.train.prompt!r}: {error}") from error
    documents = open_documents(sources[0].tokens)
    end = min(_PROMPT_TOKENS, len(documents.ids))
    if spec.format == "chat" and documents.mask is not None:
        first = documents.starts[1] if documents.num_documents > 1 else len(documents.ids)
        documents.check(0, int(first))
        # Every conversation has a trained token.
        end = int(np.argmax(documents.mask[:first]))
    documents.check(0, end)
    begun: list[int] = documents.ids[:end].tolist()
    return begun
