"""Adapters on the weights of a Hugging Face folder, through `terrace train` and out again, folded in or alone."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from terrace.checkpoint.layout import latest
from terrace.checkpoint.reading import Checkpoint
from terrace.cli.main import main
from terrace.model.hf.pretrained import Pretrained
from terrace.model.lora.config import is_adapter
from tests.support.hf_folder import write_folder
from tests.support.tiny_runs import one_line, terrace, write_run


def test_a_folder_is_adapted_and_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = write_folder(tmp_path / "base")
    path = write_run(tmp_path, 2, plan="zero3", steps=3)
    words = ("--config", str(path), "--model", "base", "--lora.rank", "3", "--lora.targets", '["*.mlp.up.*"]')
    done = terrace("train", *words, "--folder", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    checkpoint = Checkpoint(latest(tmp_path / "run"))  # type: ignore[arg-type]
    stored, own = {(b, n): v for b, n, v in checkpoint.parameters()}, Pretrained(base)
    adapters = {where: value for where, value in stored.items() if is_adapter(where[1])}
    assert len(adapters) == 2 * 3
    assert all(value.any() for value in adapters.values())
    for (block, name), value in stored.items():
        assert is_adapter(name) or torch.equal(value, own.value(block, name).to(value.dtype))

    assert main(["export", str(tmp_path / "run"), str(tmp_path / "whole"), "--dtype", "fp32"]) == 0
    merged = Pretrained(tmp_path / "whole")
    up, down = (adapters["layers.1", f"mlp.up.{name}"] for name in ("lora_b", "lora_a"))
    wanted = own.value("layers.1", "mlp.up.weight").float() + 16 / 3 * up @ down
    assert torch.allclose(merged.value("layers.1", "mlp.up.weight"), wanted, atol=1e-6)
    assert torch.equal(merged.value("head", "norm.weight"), own.value("head", "norm.weight").float())

    assert main(["export", str(tmp_path / "run"), str(tmp_path / "adapter"), "--adapter"]) == 0
    table = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (table["base_model_name_or_path"], table["target_modules"]) == (str(base), ["up_proj"])
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert torch.equal(tensors["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"], up)
    assert len(tensors) == len(adapters)

    capsys.readouterr()
    for options, message in (
        (("--adapter", "--dtype", "bf16"), "--dtype has no effect with --adapter"),
        (("--base", "x"), "--base x has no effect without --adapter"),
        (("--adapter",), "not an empty folder"),
    ):
        assert main(["export", str(tmp_path / "run"), str(tmp_path / "adapter"), *options]) == 2
        assert message in one_line(capsys.readouterr().err)


def test_a_run_without_adapters_has_none_to_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path, 1, plan="ddp", steps=1, warmup_steps=0)
    assert terrace("train", "--config", str(path), "--folder", "run", cwd=tmp_path).returncode == 0
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "adapter"), "--adapter"]) == 2
    assert "its run has no [lora]" in one_line(capsys.readouterr().err)
