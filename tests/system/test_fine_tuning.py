"""Fine-tuning on conversations: only the assistant's messages are trained on, the same under every plan.

The reference runs every conversation alone, in fp64, in plain PyTorch: no rows, no packing, no positions. Its loss is
over the assistant's bytes and nothing else.
"""

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrace.cli.main import main
from terrace.cluster.cluster import Cluster
from terrace.data.batches import Batches, Source
from terrace.data.chat_tokens import prepare_chat
from terrace.data.tokenizer import ByteTokenizer
from terrace.launch.start import LocalPool, World
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig, parse_model
from terrace.model.decoder import build_blocks, token_loss
from terrace.model.init import initialise
from terrace.runtime.batch import Batch
from terrace.runtime.engine import Engine
from terrace.runtime.setup import Blocks, RankSetup, Training, Workload
from tests.support.chats import CHATML, write_lines
from tests.support.nightly import nightly
from tests.support.parity import ADAMW, exact, make_adamw, trainable
from tests.support.tiny_runs import MODEL, losses, one_line, terrace, write_run
from tests.support.toys import cluster_of, run_blocks

pytestmark = pytest.mark.timeout(360)
pytest.importorskip("jinja2")

SEQUENCE, BATCH, NUM_STEPS = 96, 8, 2
Talk = list[dict[str, str]]


def talks() -> list[Talk]:
    rng = np.random.default_rng(0)
    made = []
    for number in range(40):
        turns: Talk = []
        for _ in range(rng.integers(1, 3)):
            turns.append({"role": "user", "content": f"{number}?" + "u" * int(rng.integers(0, 9))})
            turns.append({"role": "assistant", "content": "a" * int(rng.integers(1, 9)) + "."})
        made.append(turns)
    return [talk for talk in made if len(rendered(talk)[0]) <= SEQUENCE + 1]


def rendered(talk: Talk) -> tuple[bytes, list[bool]]:
    """The bytes of a conversation and which are the assistant's, turn by turn."""
    text, said = b"", []
    for turn in talk:
        head = f"<|im_start|>{turn['role']}\n".encode()
        body = f"{turn['content']}<|im_end|>\n".encode()
        text += head + body
        said += [False] * len(head) + [turn["role"] == "assistant"] * len(body)
    return text, said


def config() -> ModelConfig:
    return parse_model(MODEL | {"max_position_embeddings": SEQUENCE})


def blocks_of() -> list[nn.Module]:
    blocks = build_blocks(config(), dtype=torch.float64)
    initialise(blocks, config(), seed=0, dtype=torch.float64)
    return blocks


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    folder = tmp_path_factory.mktemp("chat")
    (folder / "chat.jinja").write_text(CHATML)
    data = write_lines(folder / "chat.jsonl", [{"messages": talk} for talk in talks()])
    tokens = prepare_chat(data, ByteTokenizer(), "bytes", folder / "chat.jinja", folder / "cache")
    return Source(tokens=tokens, documents="whole")


def fine_tune(
    world: World, cluster: Cluster, plan: Any, source: Source, micro_batch: int
) -> tuple[list[float], list[float], list[int]]:
    """Train on one rank; return losses, gradient norms and numbers of trained tokens."""
    blocks, batches = blocks_of(), Batches([source], SEQUENCE, BATCH, seed=3)
    num_micros = BATCH // (cluster.world_size * micro_batch)
    engine = Engine(
        Blocks(blocks, declared=block_specs(config())),
        Workload(cluster=cluster, plan=plan, num_micros=num_micros, sequence=SEQUENCE),
        token_loss,
        Training(optimizer=ADAMW),
        RankSetup(rank=world.rank),
    )
    place, degree = engine.program.layout.data_rank(world.rank), engine.program.layout.data_degree
    results = []
    for step in range(NUM_STEPS):
        rows = batches.micro_batches(step, place, degree, micro_batch)
        micros = [Batch(*map(torch.from_numpy, arrays)) for arrays in rows]
        results.append(engine.step(micros, ADAMW.lr))
    engine.close()
    return [r.loss for r in results], [r.grad_norm for r in results], [r.num_tokens for r in results]


@cache
def talks_of_steps(source: Source) -> list[list[bytes]]:
    """The conversations in the global batch of each step, read off its rows."""
    found = []
    for step in range(NUM_STEPS):
        inputs, labels, positions = Batches([source], SEQUENCE, BATCH, seed=3).rows(step, np.arange(BATCH))
        texts = []
        for row in range(BATCH):
            begins = [*np.flatnonzero(positions[row] == 0).tolist(), SEQUENCE]
            for first, end in pairwise(begins):
                if (labels[row, first:end] != -100).any():
                    texts.append(bytes(inputs[row, first:end].astype(np.uint8)) + b"\n")  # the last is a label only
        found.append(texts)
    return found


def directly(source: Source) -> tuple[list[float], list[float], list[int], Tensor]:
    """Train in this process on one conversation after the other; the last is the gradient of the first step."""
    said = dict(rendered(talk) for talk in talks())
    blocks = blocks_of()
    parameters = trainable(blocks)
    optimizer = make_adamw(parameters)
    all_losses, norms, counts, first = [], [], [], torch.empty(0)
    for texts in talks_of_steps(source):
        count = sum(sum(said[text]) for text in texts)
        optimizer.zero_grad()
        total = 0.0
        for text in texts:
            ids = torch.tensor(list(text))
            each = F.cross_entropy(run_blocks(blocks, ids[None, :-1])[0], ids[1:], reduction="none")
            loss = each[torch.tensor(said[text][1:])].sum() / count
            torch.autograd.backward(loss)
            total += float(loss.detach())
        if not first.numel():
            first = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        norms.append(float(nn.utils.clip_grad_norm_(parameters, ADAMW.clip)))
        optimizer.step()
        all_losses.append(total)
        counts.append(count)
    return all_losses, norms, counts, first


@pytest.mark.parametrize(
    ("sizes", "preset", "micro_batch"), [((2,), "zero3", 2), *nightly(((1,), "ddp", 4), ((2, 2), "three-level", 1))]
)
def test_a_global_batch_gives_the_same_loss_and_gradient_under_any_ranks(
    pool: LocalPool, source: Source, sizes: tuple[int, ...], preset: str, micro_batch: int
) -> None:
    expected_losses, expected_norms, expected_counts, _ = directly(source)
    cluster = cluster_of(*sizes)
    plan = exact(preset, cluster, micro_batch=micro_batch)
    for found in pool.run(cluster.world_size, fine_tune, cluster, plan, source, micro_batch, timeout_s=200.0):
        assert found[0] == pytest.approx(expected_losses, abs=1e-10, rel=0)
        assert found[1] == pytest.approx(expected_norms, abs=1e-10, rel=0)
        assert found[2] == expected_counts


def test_a_prompt_contributes_no_gradient(source: Source) -> None:
    """Rows through the model in one backward, against every conversation's assistant bytes alone."""
    inputs, labels, positions = map(
        torch.from_numpy, Batches([source], SEQUENCE, BATCH, seed=3).rows(0, np.arange(BATCH))
    )
    blocks = blocks_of()
    parameters = trainable(blocks)

    def gradient(labels: Tensor) -> Tensor:
        for parameter in parameters:
            parameter.grad = None
        torch.autograd.backward(token_loss(run_blocks(blocks, inputs, positions), labels) / (labels != -100).sum())
        return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])

    direct = directly(source)[3]
    assert (gradient(labels) - direct).abs().max() < 1e-12
    # With the prompts' labels put back, the comparison sees them.
    everything = torch.where(positions[:, 1:] > 0, inputs[:, 1:], -100)
    assert (gradient(F.pad(everything, (0, 1), value=-100)) - direct).abs().max() > 1e-3


def write_chat_run(folder: Path, **data: Any) -> None:
    """A run of `terrace train` on conversations, two ranks."""
    run = write_run(folder, 2, sequence=SEQUENCE, steps=4, batch=4)
    write_lines(folder / "chat.jsonl", [{"messages": talk} for talk in talks()])
    (folder / "chat.jinja").write_text(CHATML)
    table = {"path": "chat.jsonl", "format": "chat", "chat_template": "chat.jinja", "cache": "cache"} | data
    lines = run.read_text().split("[data]")
    rest = lines[1].split("\n[", 1)[1]
    keys = "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items() if not isinstance(value, list))
    mixed = "".join(
        "\n[[data.mixture]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in entry.items())
        for entry in table.get("mixture", [])
    )
    run.write_text(f"{lines[0]}[data]\n{keys}{mixed}\n[{rest}")
    (folder / "config.json").write_text(json.dumps(MODEL | {"max_position_embeddings": SEQUENCE}))


def test_chats_beside_text_are_trained_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    mixture = [
        {"path": "chat.jsonl", "weight": 3, "name": "talk"},
        {"path": "text.txt", "weight": 1, "format": "text", "name": "prose"},
    ]
    write_chat_run(tmp_path, path="stdlib", mixture=mixture, holdout=0.1)
    done = terrace("train", "--config", "run.toml", "--folder", "run", "--verbose", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "of 2 sources" in done.stdout
    assert "talk: 75.0% of the sequences" in done.stdout
    assert "prose: 25.0% of the sequences" in done.stdout
    assert f"talk: {len(talks())} documents packed whole into" in done.stdout
    assert "% of them padding" in done.stdout
    assert len(losses(tmp_path / "run")) == 4
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(0 <= record["time_s"]["data"] < record["step_s"] for record in records)
    assert all(0 < record["num_tokens"] < 4 * SEQUENCE for record in records)
    for words, said in (
        (["--data.mixture.talk.weight", "2"], "data.weight of talk = 3.0, now it is 2.0"),
        (["--data.mixture.talk.documents", "separate"], "data.documents of talk = 'whole', now it is 'separate'"),
        (["--data.holdout", "0"], "data.holdout = 0.1, now it is 0"),
        (
            ["--data.mixture", '[{path="chat.jsonl", name="talk"}]'],
            "number of data sources = 2, now it is 1",
        ),
    ):
        assert main(["train", "--resume", "run", "--train.steps", "6", *words]) == 2
        assert said in one_line(capsys.readouterr().err)
