"""The two commands that a finished run suggests next, with its folder filled in."""

from shlex import quote

from terrace.data.chat_tokens import holds_conversations
from terrace.model.facts import has_scalar_head, looks_ahead
from terrace.train.job import RunJob

_LONGEST = 40  # characters of a prompt in a command


def next_commands(job: RunJob) -> tuple[str, str]:
    """Two commands: the page of the run, and a use of its model."""
    run, folder = job.run, quote(str(job.folder))
    report = f"{job.command} report {folder}"
    # A model with a score in place of logits generates no text, nor does one whose experts depend on later tokens.
    if has_scalar_head(run.model) or looks_ahead(run.model):
        return report, f"{job.command} export {folder} {quote(f'{job.folder}-model')}"
    spec, prompt = run.data.sources()[0], run.train.prompt or ""
    is_chat = spec.format == "chat" and holds_conversations(spec.path, spec.split)
    if not prompt or len(prompt) > _LONGEST or not prompt.isprintable():
        prompt = "Hello" if is_chat else "The "
    return report, f"{job.command} generate {folder} {'--chat ' * is_chat}--prompt {quote(prompt)}"
