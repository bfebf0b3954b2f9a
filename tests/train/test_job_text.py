"""A job as text: reading it returns the same job, and any other text is refused in one line."""

from dataclasses import fields
from pathlib import Path

import pytest

from terrace.base.errors import ConfigError
from terrace.data.batches import Source
from terrace.data.token_file import TokenFile
from terrace.train.job import RunJob, _JobText, job_text, read_job, read_sources, section_digests, sources_text
from terrace.train.resolve import resolve

PIPELINE = {"mapping": {"system": {"pipeline": 2}}, "stages": [3, 3], "recompute": ["layers.*"]}
OVERRIDES = {
    "plain": {},
    "pipeline": {"plan": PIPELINE, "train": {"batch": 64}},
    "adapters": {"lora": {"rank": 4}, "train": {"profile": "2-3", "target_loss": 1.5}},
}


def test_every_field_of_a_job_travels() -> None:
    """The inputs are inherited: a field that is added to `RunJob` alone would not be in the text."""
    assert [each.name for each in fields(_JobText)] == [each.name for each in fields(RunJob)]


def sources() -> tuple[Source, ...]:
    file = {"dtype": "uint16", "num_tokens": 9, "max_token": 7, "digest": "d", "num_documents": 2, "sums_digest": "s"}
    plain = TokenFile(path=Path("a.tokens"), starts=Path("a.starts"), **file)  # type: ignore[arg-type]
    chats = TokenFile(path=Path("b ü.tokens"), starts=Path("b"), mask=Path("b.mask"), **file)  # type: ignore[arg-type]
    return Source(tokens=plain), Source(tokens=chats, name="chats", weight=0.5, documents="whole", too_long="split")


@pytest.mark.parametrize("name", OVERRIDES)
def test_a_job_is_read_as_it_was_written(name: str) -> None:
    run = resolve(None, {}, OVERRIDES[name])
    job = RunJob(run=run, folder=Path("runs/ü"), sources=sources(), tokenizer_fingerprint="f")
    assert read_job(job_text(job)) == job
    resumed = RunJob(
        run=run,
        folder=Path("/runs/1"),
        sources=(),
        tokenizer_fingerprint="",
        resume=Path("/runs/1/checkpoints/step-00000004"),
        config="[train]\nsteps = 4\n",
        changes=("optimizer.lr 0.1 -> 0.2",),
    )
    assert read_job(job_text(resumed)) == resumed
    assert read_sources(sources_text(sources())) == (sources(), ())


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"run": "[", "folder": "", "sources": [], "tokenizer_fingerprint": ""}']
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        read_job(text)


def test_a_digest_tells_which_section_differs() -> None:
    one, other = (section_digests(resolve(None, {}, {"train": {"seed": seed}})) for seed in (0, 1))
    assert [name for name in one if one[name] != other[name]] == ["train"]
