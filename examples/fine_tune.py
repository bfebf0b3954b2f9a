"""Fine-tune a Hugging Face folder on chats with LoRA, export it, and load the export in `transformers`.

    python -m examples.fine_tune

The model is tiny and made here; put a downloaded folder in its place. Each step is a command, which is printed before
it runs.
"""

import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.tiny_model import write_tiny_model

QUESTION, ANSWER = "Which animal jumps?", "The fox."


def write_chats(path: Path) -> None:
    """One conversation a line."""
    talk = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    path.write_text((json.dumps({"messages": talk}) + "\n") * 64, encoding="utf-8")


def commands(folder: Path) -> Iterator[list[str]]:
    """The words after `terrace` of each step: train adapters, export the model with them, generate an answer."""
    train = f"""
        train --model {folder / "base"} --data {folder / "chats.jsonl"} --data.format chat --folder {folder / "run"}
        --lora.rank 8 --ranks 2 --plan zero3 --data.cache {folder / "cache"} --optimizer.lr 3e-2 --train.high_lr true
        --train.steps 30 --train.batch 8 --train.sequence 64 --train.warmup_steps 3
    """
    # A trained model would be destroyed by this rate; the random weights of this example need it.
    yield shlex.split(train)
    yield ["export", str(folder / "run"), str(folder / "tuned")]
    yield ["generate", str(folder / "tuned"), "--chat", "--prompt", QUESTION, "--tokens", "16", "--temperature", "0"]


def answer(folder: Path) -> str:
    """The answer of an exported model, by `transformers` alone."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    talk = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    return str(tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        write_tiny_model(work / "base")
        write_chats(work / "chats.jsonl")
        for words in commands(work):
            print(f"\n$ terrace {shlex.join(words)}", flush=True)
            subprocess.run([sys.executable, "-m", "terrace", *words], check=True)
        print(f"\ntransformers answers: {answer(work / 'tuned')}")
