"""GRPO on the task `sort` against TRL's `GRPOTrainer`: `python -m bench.against_trl`, with the extra `trl`.

Both take the same supervised start, the same prompts in the same order, 64 of them with 8 responses a step, two updates
of 256, and the same rates, clips and optimizer; their samples differ. Each has a process of its own, one thread and
fp32, and they take turns step by step. TRL runs in its two forms, with `transformers`' generation of a padded batch and
with its continuous batching over pages; the faster one is the rival. Time is processor time of a whole step. Rewards
are those of the responses drawn, so of equally many samples.
"""

import contextlib
import io
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.claims import Claim, compared, judge, print_table, ratio_words, versioned
from bench.common import bench_parser
from bench.contest import Work, take_turns
from terrace.checkpoint.layout import latest
from terrace.checkpoint.reading import Checkpoint
from terrace.rl import sort_task
from terrace.rl.calls.inline import InlineRuntime
from terrace.rl.config import RlConfig
from terrace.rl.making import started
from terrace.rl.resolve import resolve
from terrace.rl.run import START, Run, RunInputs
from terrace.train.export import export

SECONDS_TARGET = 1 / 3
_ONE_RANK = {"cluster": {"tiers": {name: {"size": 1} for name in ("package", "node", "system")}}}
_PLAN = {"mapping": {"system": {"pipeline": 1}}, "schedule": None, "micro_batch": 128}


def config_of(steps: int, start: Path | None) -> RlConfig:
    """A run of the task on one rank, from the weights of a folder or with its supervised start."""
    table: dict[str, Any] = {"run": {"rows": 1, "steps": steps, "evaluate_every": 0, "reference": False}}
    if start is not None:
        # At the task's own rate, for which so small a policy is.
        table |= {"weights": str(start), "optimizer": {"lr": 1e-4}}
        table["run"] |= {"start_steps": 0, "high_lr": True}
    return resolve("sort", None, {}, {**_ONE_RANK, "plan": _PLAN, **table})


def run_of(config: RlConfig, runtime: InlineRuntime, folder: Path) -> Run:
    """A run of the task in this process."""
    task = sort_task.SortPrompts(config.run.seed)
    stops = frozenset({sort_task.END})
    inputs = RunInputs(
        config=config, prompts=task, tokenizer=sort_task.SortTokenizer(), stops=stops, examples=task.examples
    )
    return started(inputs, runtime, folder, print)


def write_start(folder: Path) -> None:
    """A Hugging Face folder of the policy after the task's supervised start."""
    with tempfile.TemporaryDirectory() as name, InlineRuntime() as runtime:
        run_of(config_of(1, None), runtime, Path(name))
        written = latest(Path(name) / START)
        assert written is not None, "the run has a supervised start"
        export(Checkpoint(written), folder, "fp32", 1 << 30, None, sort_task.END)


def own(start: Path, steps: int) -> Work:
    """Terrace: a step for each call, which returns the rewards so far."""
    folder = tempfile.mkdtemp()
    runs = run_of(config_of(steps, start), InlineRuntime(), Path(folder)).steps()
    rewards: list[float] = []

    def work() -> list[float]:
        _, found = next(runs)
        rewards.append(found["reward/mean"])
        return rewards

    return work


def theirs(start: Path, steps: int, is_paged: bool) -> Work:
    """TRL: its trainer runs in a thread and waits before each step until it is called."""
    rewards: list[float] = []
    go, done = threading.Semaphore(0), threading.Semaphore(0)

    def train() -> None:
        torch.set_num_threads(1)
        with contextlib.redirect_stdout(io.StringIO()):
            _trainer(start, steps, is_paged, rewards, go, done).train()

    threading.Thread(target=train, daemon=True).start()

    def work() -> list[float]:
        go.release()
        done.acquire()
        return rewards

    return work


def _trainer(
    start: Path, steps: int, is_paged: bool, rewards: list[float], go: threading.Semaphore, done: threading.Semaphore
) -> Any:
    import datasets
    import transformers
    import trl

    config = config_of(steps, start)
    run, optimizer = config.run, config.optimizer
    samples = run.prompts * run.responses
    updates = samples // run.mini_batch

    class Turns(transformers.TrainerCallback):  # type: ignore[misc]  # its types are not read
        def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if state.global_step % updates == 0:
                go.acquire()

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if state.global_step % updates == 0:
                done.release()

    def reward(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **rest: Any) -> list[float]:
        found = [reward_of(*each) for each in zip(prompts, completion_ids, strict=True)]
        rewards.append(statistics.fmean(found))
        return found

    task = sort_task.SortPrompts(run.seed)
    prompts = [{"prompt": task.prompt(place).text} for place in range(steps * run.prompts)]
    arguments = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
        per_device_train_batch_size=run.mini_batch,
        gradient_accumulation_steps=1,
        steps_per_generation=updates,
        num_generations=run.responses,
        max_completion_length=run.max_response,
        max_steps=steps * updates,
        shuffle_dataset=False,
        use_transformers_continuous_batching=is_paged,
        temperature=1.0,
        beta=0.0,
        loss_type="dapo",  # the mean over tokens of the batch, as ours
        epsilon=config.algorithm.clip_low,
        epsilon_high=config.algorithm.clip_high,
        learning_rate=optimizer.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=run.warmup_steps * updates,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.clip,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=run.seed,
    )
    return trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32),
        reward_funcs=reward,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(prompts),
        processing_class=tokenizer(),
        callbacks=[Turns()],
    )


def tokenizer() -> Any:
    """The task's tokenizer for `transformers`."""
    import tokenizers
    import transformers

    end = "<end>"
    words = {sort_task.SortTokenizer().decode([token]): token for token in range(sort_task.END)}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel({**words, end: sort_task.END}, unk_token=end))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    made: Any = transformers.PreTrainedTokenizerFast
    return made(tokenizer_object=plain, eos_token=end, pad_token=end, padding_side="left")


def reward_of(prompt: str, tokens: list[int]) -> float:
    """The task's reward of a response as TRL has it: ids without padding."""
    ended = bool(tokens) and tokens[-1] == sort_task.END
    text = sort_task.SortTokenizer().decode(tokens)
    return float(ended and sort_task.END not in tokens[:-1] and text == sort_task.answer(prompt))


def _rivals() -> Iterator[tuple[str, Any]]:
    yield "TRL, padded batch", partial(theirs, is_paged=False)
    yield "TRL, continuous batching", partial(theirs, is_paged=True)


def main() -> int:
    """Print the table; return 1 when --check is given and a target is missed."""
    options = bench_parser(__doc__, rounds=20).parse_args()
    steps = options.rounds + 1  # take_turns has one round to warm up
    with tempfile.TemporaryDirectory() as name:
        start = Path(name) / "start"
        write_start(start)
        names = ["Terrace", *(name for name, _ in _rivals())]
        makers = [own, *(make for _, make in _rivals())]
        turns = {name: (make, (start, steps)) for name, make in zip(names, makers, strict=True)}
        seconds, rewards = take_turns(turns, options.rounds)
    rows = []
    for name in names:
        late = statistics.fmean(rewards[name][steps // 2 :])
        median = statistics.median(seconds[name])
        against = ratio_words(seconds["Terrace"], seconds[name])
        rows.append([name, f"{median:.2f}", against, f"{rewards[name][0]:.3f}", f"{late:.3f}"])
    rival = min(names[1:], key=lambda name: statistics.median(seconds[name]))
    print_table(["trainer", "CPU s a step", "Terrace to it", "first reward", "mean of the second half"], rows)
    called = f"{versioned('trl')}{rival.removeprefix('TRL')}"
    ours, other = (rewards[name][steps // 2 :] for name in ("Terrace", rival))
    claims = [
        compared(
            "GRPO on sort, a step, processor time",
            seconds["Terrace"],
            seconds[rival],
            SECONDS_TARGET,
            rival=called,
            bound="products of matrices alone take half of our step, a quarter of the rival's",
        ),
        _learned(statistics.fmean(ours), statistics.fmean(other), called),
    ]
    return judge(claims, options)


def _learned(ours: float, theirs: float, rival: str) -> Claim:
    name = "GRPO on sort, reward of the second half, equal samples"
    found = ours / theirs
    return Claim(name=name, found=found, low=found, high=found, goal=1.0, at_least=True, rival=rival)


if __name__ == "__main__":
    sys.exit(main())
