"""`terrace eval` against lm-eval itself, on the same exports and texts.

Needs lm-eval beside Terrace and its tests (docs/generating.md says how); skipped without.
"""

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest

from terrace.cli.main import main
from tests.support.chats import write_lines, write_tokenizer
from tests.support.tiny_runs import MODEL, terrace, write_run

os.environ["HF_HUB_OFFLINE"] = "1"
logging.getLogger("lm_eval").setLevel(logging.ERROR)

lm_eval = pytest.importorskip("lm_eval")

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]

DOCS = Path(__file__).parents[2] / "docs" / "generating.md"
SEQUENCE, POSITIONS = 16, 64
TEXTS = [
    "a",
    "What is a tier?",
    "A level of the cluster — naïve, but true 🙂. " * 20,  # several windows, the last one not whole
    "the " * 300,  # repeats itself, so that windows have equal tokens
    " begins with a blank\n\nand ends with lines\n\n",
    "",
]
SIZES = {"vocab_size": 404, "max_position_embeddings": POSITIONS}
GPT2 = {"model_type": "gpt2", "vocab_size": 404, "n_positions": POSITIONS, "n_embd": 16, "n_layer": 2, "n_head": 2}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
# Model, what the tokenizer's folder declares, data.bos, and how near lm-eval is in fp64: transformers computes rotary
# angles in fp32 whatever the dtype.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str, float]] = {
    "llama, the run puts a BOS": (MODEL | SIZES, {}, "<s>", 1e-7),
    "qwen, no BOS": (MODEL | SIZES | {"model_type": "qwen2"}, {"bos_token": None}, "auto", 1e-7),
    "gpt2, a BOS that no text begins with": (GPT2, {}, "auto", 1e-12),
    "gpt2, the class's own BOS": (GPT2, {"bos_token": ..., "tokenizer_class": "GPT2Tokenizer"}, "auto", 1e-12),
}


def trained(folder: Path, model: dict[str, Any], declared: dict[str, Any], bos: str) -> Path:
    """A run of six steps; returns its folder."""
    config = write_run(folder, 1, sequence=SEQUENCE)
    (folder / "config.json").write_text(json.dumps(model))
    tokenizer = write_tokenizer(folder / "tokenizer")
    table = json.loads((tokenizer / "tokenizer_config.json").read_text()) | declared
    kept = {key: value for key, value in table.items() if value is not ...}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(kept))
    words: list[str | Path] = [
        "--data.tokenizer",
        tokenizer / "tokenizer.json",
        "--data.bos",
        bos,
        "--data.eos",
        "<|im_start|>",
    ]
    done = terrace("train", "--config", config, "--folder", folder / "run", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def write_task(folder: Path, texts: list[str]) -> Path:
    """The task that the docs show, for these texts."""
    write_lines(folder / "text.jsonl", [{"text": text} for text in texts])
    (block,) = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.S)
    text = block.replace("text.jsonl", str(folder / "text.jsonl"))
    # Its copy of the texts, which else goes to the home folder.
    text = text.replace("dataset_kwargs:\n", f"dataset_kwargs:\n  cache_dir: {folder / 'cache'}\n")
    (folder / "task.yaml").write_text(text)
    return folder


def by_lm_eval(export: Path, task: Path, **given: Any) -> dict[str, float]:
    """Log-likelihood of all texts, byte perplexity and bits per byte."""
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(export), **given},
        tasks=["local_text"],
        task_manager=lm_eval.tasks.TaskManager(include_path=str(task), include_defaults=False),
        device="cpu",
        bootstrap_iters=0,
    )
    samples = found["samples"]["local_text"]
    figures = {name: found["results"]["local_text"][f"{name},none"] for name in ("byte_perplexity", "bits_per_byte")}
    return {"nats": -sum(each["filtered_resps"][0] for each in samples), **figures}


@pytest.mark.parametrize("case", CASES)
def test_an_export_has_the_figures_of_lm_eval(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, declared, bos, near = CASES[case]
    run, export, task = trained(tmp_path, model, declared, bos), tmp_path / "export", write_task(tmp_path, TEXTS)
    assert main(["export", str(run), str(export), "--dtype", "fp32"]) == 0
    # By default lm-eval 0.4.13 also predicts the BOS that a tokenizer puts before a text, behind another BOS, and takes
    # logits from the wrong tokens where windows have equal input and count different numbers of tokens.
    corrected = {"add_bos_token": False, "logits_cache": False}
    for dtype, tolerance in (("fp64", near), ("fp32", 1e-6)):
        for folder, length in ((export, POSITIONS), (run, SEQUENCE)):
            capsys.readouterr()
            words = ["eval", str(folder), "--data", str(tmp_path / "text.jsonl"), "--dtype", dtype, "--json"]
            assert main(words) == 0
            ours = json.loads(capsys.readouterr().out)
            more = {} if folder == export else {"max_length": length}
            name = {"fp64": "float64", "fp32": "float32"}[dtype]
            theirs = by_lm_eval(export, task, dtype=name, batch_size=4, **more, **corrected)
            assert ours["loss"] * ours["num_tokens"] == pytest.approx(theirs["nats"], rel=tolerance)
            assert 2 ** ours["bits_per_byte"] == pytest.approx(theirs["byte_perplexity"], rel=tolerance)
            assert ours["bits_per_byte"] == pytest.approx(theirs["bits_per_byte"], rel=tolerance)
    assert ours["num_bytes"] == len("".join(TEXTS).encode())
    assert ours["num_tokens"] > 8 * POSITIONS
