"""A few responses of a step, as text, for a run's page and trackers.

They are not selected by reward: the first two responses to each of the step's first prompts, and greedy responses to a
fixed set of held-out prompts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from terrace.data.tokenizer import Tokenizer
from terrace.rl.values.ragged import Ragged
from terrace.rl.values.rows import Rows, emitted_of

DRAWN, HELD_OUT = "drawn", "held out"
MODEL, ENVIRONMENT = "model", "environment"
_DRAWN, _OF_A_PROMPT, _HELD_OUT = 6, 2, 4  # drawn responses, at most this many per prompt; held-out responses
_EVERY = 10  # steps between samples, in a run without evaluation
_LONGEST, _END = 1000, 300  # characters shown of a text, and how many of them from its end


@dataclass(frozen=True, kw_only=True)
class ShownSample:
    """A response and its scores. `parts` are the rewards by function or model, if there are several.

    `advantage` is the mean over the tokens. Held-out responses have neither advantage nor cost.
    """

    kind: str
    prompt: str
    response: str
    finish: str
    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    cost: float | None = None
    advantage: float | None = None
    turns: list[list[str]] = field(default_factory=list)  # (who, text) of each, if an environment answered


class Samples:
    """Collects samples, every `every` steps. `rewards` are the names of the rewards, in order."""

    def __init__(self, tokenizer: Tokenizer, rewards: Sequence[str], every: int) -> None:
        self._tokenizer, self._rewards, self._every = tokenizer, _told_apart(rewards), every or _EVERY
        self._kept: dict[str, list[ShownSample]] = {}

    def drawn(self, rows: Rows, advantages: Ragged) -> None:
        """Keep some of a step's rows, with their token `advantages`, in place of the previous step's."""
        seen, chosen = dict[int, int](), list[int]()
        for row, group in enumerate(rows.tensor("groups").tolist()):
            seen[group] = seen.get(group, 0) + 1
            if seen[group] <= _OF_A_PROMPT and len(chosen) < _DRAWN:
                chosen.append(row)
        lengths = advantages.lengths.clamp(min=1)
        means = (advantages.sums() / lengths)[chosen].tolist()
        self._kept[DRAWN] = list(self._of(DRAWN, rows.take(chosen), means))

    def held_out(self, rows: Rows) -> None:
        """Keep some greedy responses to held-out prompts."""
        self._kept[HELD_OUT] = list(self._of(HELD_OUT, rows.part(0, min(_HELD_OUT, len(rows))), None))

    def taken(self, step: int, is_last: bool) -> list[dict[str, Any]]:
        """Take the kept samples as tables, at steps 0 (the start) and 1, every `every`th and the last; else empty."""
        kept, self._kept = self._kept, {}
        if step != 1 and step % self._every and not is_last:
            return []
        return [asdict(sample) for kind in (DRAWN, HELD_OUT) for sample in kept.get(kind, ())]

    def _of(self, kind: str, rows: Rows, advantages: Sequence[float] | None) -> Iterator[ShownSample]:
        rewards = rows.tensor("reward").tolist()
        costs = rows.tensor("cost").tolist() if "cost" in rows.columns else None
        parts = {
            name: rows.tensor(f"score/{number}").tolist()
            for number, name in enumerate(self._rewards)
            if f"score/{number}" in rows.columns
        }
        responses, masks = rows.ragged("responses"), emitted_of(rows).lists()
        prompts, finish = rows.objects("prompt_texts"), rows.objects("finish")
        for row, tokens in enumerate(responses.rows()):
            yield ShownSample(
                kind=kind,
                prompt=shortened(str(prompts[row])),
                response=shortened(self._tokenizer.decode(tokens.tolist())),
                finish=str(finish[row]),
                reward=rewards[row],
                parts={name: values[row] for name, values in parts.items()},
                cost=None if costs is None else costs[row],
                advantage=None if advantages is None else advantages[row],
                turns=self._turns(tokens.tolist(), masks[row]),
            )

    def _turns(self, tokens: Sequence[int], emitted: Sequence[bool]) -> list[list[str]]:
        found = list[list[str]]()
        for is_own, run in groupby(zip(emitted, tokens, strict=True), key=lambda each: each[0]):
            found.append([MODEL if is_own else ENVIRONMENT, shortened(self._tokenizer.decode([x for _, x in run]))])
        return found if len(found) > 1 else []


def shortened(text: str) -> str:
    """Shorten a text to its beginning and end, with the number of characters left out."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - _END]} [... {len(text) - _LONGEST} characters ...] {text[-_END:]}"


def _told_apart(names: Sequence[str]) -> list[str]:
    return [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names)]
