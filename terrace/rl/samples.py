"""A few responses of a step, as text, for whoever reads the record of a run: its page, its trackers.

They are the first ones, not chosen by their reward: two to each of a few prompts of the step, and the likeliest
responses to the same held-out prompts each time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from terrace.data.tokenizer import Tokenizer
from terrace.rl.values.ragged import Ragged
from terrace.rl.values.rows import Rows

DRAWN, HELD_OUT = "drawn", "held out"
_DRAWN, _OF_A_PROMPT, _HELD_OUT = 6, 2, 4  # responses of each kind, and of those drawn, of a prompt
_EVERY = 10  # steps, in a run that evaluates nothing
_LONGEST, _END = 1000, 300  # characters of a text, and of these the last; all between are left out


@dataclass(frozen=True, kw_only=True)
class ShownSample:
    """A response and its numbers: `parts` of the reward by function or model where there are several.

    `advantage` is the mean over its tokens. A greedy response to a held-out prompt has neither this nor a cost.
    """

    kind: str
    prompt: str
    response: str
    finish: str
    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    cost: float | None = None
    advantage: float | None = None


class Samples:
    """Samples of the newest step, every `every` steps. `rewards` are the names of the parts of a reward, in order."""

    def __init__(self, tokenizer: Tokenizer, rewards: Sequence[str], every: int) -> None:
        self._tokenizer, self._rewards, self._every = tokenizer, _told_apart(rewards), every or _EVERY
        self._kept: dict[str, list[ShownSample]] = {}

    def drawn(self, rows: Rows, advantages: Ragged) -> None:
        """Keep some rows that a step learns from, with `advantages` of their tokens; those of a step before leave."""
        seen, chosen = dict[int, int](), list[int]()
        for row, group in enumerate(rows.tensor("groups").tolist()):
            seen[group] = seen.get(group, 0) + 1
            if seen[group] <= _OF_A_PROMPT and len(chosen) < _DRAWN:
                chosen.append(row)
        lengths = advantages.lengths.clamp(min=1)
        means = (advantages.sums() / lengths)[chosen].tolist()
        self._kept[DRAWN] = list(self._of(DRAWN, rows.take(chosen), means))

    def held_out(self, rows: Rows) -> None:
        """Keep some likeliest responses to prompts that are held out."""
        self._kept[HELD_OUT] = list(self._of(HELD_OUT, rows.part(0, min(_HELD_OUT, len(rows))), None))

    def taken(self, step: int, is_last: bool) -> list[dict[str, Any]]:
        """Samples since the last call, as tables: of steps 0 (the start), 1, each `every`th and the last, else none."""
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
        prompts, finish = rows.objects("prompt_texts"), rows.objects("finish")
        for row, tokens in enumerate(rows.ragged("responses").rows()):
            yield ShownSample(
                kind=kind,
                prompt=shortened(str(prompts[row])),
                response=shortened(self._tokenizer.decode(tokens.tolist())),
                finish=str(finish[row]),
                reward=rewards[row],
                parts={name: values[row] for name, values in parts.items()},
                cost=None if costs is None else costs[row],
                advantage=None if advantages is None else advantages[row],
            )


def shortened(text: str) -> str:
    """A text of bounded length: begin and end of a longer one, and how much lies between."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - _END]} [... {len(text) - _LONGEST} characters ...] {text[-_END:]}"


def _told_apart(names: Sequence[str]) -> list[str]:
    return [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names)]
