"""The text that a run generates at its end."""

from pathlib import Path

from terrace.data.documents import open_documents
from terrace.data.tokenizer import load_tokenizer
from terrace.train.generate import generate
from terrace.train.job import RunJob

_PROMPT_TOKENS, _SAMPLE_TOKENS = 24, 300


def closing_sample(job: RunJob, folder: Path) -> str:
    """The prompt, by default the first tokens of the data, and its continuation by the checkpoint in `folder`.

    Generated on one device, whatever the number of ranks.
    """
    data, train = job.run.data, job.run.train
    tokenizer = load_tokenizer(data.tokenizer, data.bos, data.eos)
    documents = open_documents(job.sources[0].tokens)
    documents.check(0, min(_PROMPT_TOKENS, len(documents.ids)))
    begun: list[int] = documents.ids[:_PROMPT_TOKENS].tolist()
    prompt = begun if train.prompt is None else train.prompt
    shown = prompt if isinstance(prompt, str) else tokenizer.decode(prompt, keep_special=True)
    return shown + generate(
        folder, tokenizer, prompt, num_tokens=_SAMPLE_TOKENS, temperature=0.8, window=train.sequence
    )
