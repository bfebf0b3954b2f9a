"""Presets of B200 and GB200 against published rates of single kernels and collectives, and a search on eight B200."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from terrace.cluster.cluster import Device
from terrace.cluster.presets import load_cluster
from terrace.model.attention_kernel import AttentionKernel
from terrace.plan.presets import preset
from terrace.simulate.bands import band_of, generation_of
from terrace.simulate.kernels import attention_s, gemm_s, memory_s
from terrace.simulate.links import hop_s
from terrace.train.resolve import resolve
from tests.support.command_line import CommandLine

MIB = 2**20
LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
# Keys of a row: TFLOP/s forward and backward, causal, heads of 128 (cudnn-frontend, benchmark/sdpa_benchmark_training
# and benchmark/attention_training, llama3.1).
CUDNN_GB200 = {
    4096: [(1386, 1054), (1319, 1102)],
    8192: [(1584, 1211), (1559, 1297)],
    16384: [(1668, 1304), (1609, 1287)],
    32768: [(1681, 1348), (1593, 1221)],
}
FLASH2 = {
    "gb200-nvl72": {2048: (336, 268), 4096: (387, 311), 8192: (414, 338), 16384: (430, 352), 32768: (438, 360)},
    "dgx-b200": {4096: (325, 256), 8192: (373, 299), 16384: (394, 320), 32768: (404, 331), 131072: (411, 336)},
}
# MiB: GB/s of the bus.
RING_OF_4_GB200 = {16: 331, 64: 551, 128: 574, 256: 594, 512: 619, 1024: 647, 4096: 673, 8192: 680}  # Azure
GATHER_OF_8_B200 = {64: 416, 256: 565, 1024: 604, 4096: 648, 16384: 667}  # mit-orcd/orcd-benchmarks, b200-nodes
REDUCTION_OF_8_B200 = {64: 419, 256: 572, 1024: 635, 4096: 674, 16384: 692}  # the same


def _device(name: str) -> Device:
    return replace(load_cluster(name).device, spread=0.0)


def _attention(name: str, keys: int, kernel: AttentionKernel) -> tuple[float, float]:
    """TFLOP/s forward and backward of 128 heads."""
    found = attention_s(_device(name), batch=1, heads=128, queries=keys, keys=keys, head_dim=128, kernel=kernel)
    flops = 2 * 128 * keys * keys * 128
    return flops / found[0] / 1e12, 2.5 * flops / found[1] / 1e12


@pytest.mark.parametrize("keys", CUDNN_GB200)
def test_attention_of_a_gb200_is_that_of_cudnn(keys: int) -> None:
    """Versions 9.17 and 9.27; torch 2.13 has 9.20."""
    found = _attention("gb200-nvl72", keys, "sdpa")
    for measured in CUDNN_GB200[keys]:
        assert found == pytest.approx(measured, rel=0.09)


@pytest.mark.parametrize(("name", "keys"), [(name, keys) for name, rows in FLASH2.items() for keys in rows])
def test_flash_attention_2_is_that_of_torch(name: str, keys: int) -> None:
    assert _attention(name, keys, "varlen") == pytest.approx(FLASH2[name][keys], rel=0.09 if keys < 8192 else 0.03)


def test_flash_attention_4_has_one_share_of_either_peak() -> None:
    """So the shares of a GB200 are a B200's: 1576 TFLOP/s there, 1418 here (flash-attention, pull request 2280)."""
    assert pytest.approx(1418 / 2250, rel=0.01) == 1576 / 2500
    kernels = (_device("dgx-b200").kernels, _device("gb200-nvl72").kernels)
    assert kernels[0].attention_share(128, 8192) == kernels[1].attention_share(128, 8192)
    assert _attention("dgx-b200", 8192, "sdpa")[0] == pytest.approx(1418, rel=0.03)


@pytest.mark.parametrize(
    ("name", "side", "measured", "within"),
    [
        ("dgx-b200", 8192, 1420, 0.02),  # torchao, pull request 2427
        ("dgx-b200", 6144, 1450, 0.07),  # the same
        ("gb200-nvl72", 8192, 1626, 0.05),  # the first one, times 2877 / 2524: products in fp8 on both
    ],
)
def test_large_products_are_held_at_the_power_of_the_device(
    name: str, side: int, measured: float, within: float
) -> None:
    assert 2 * side**3 / gemm_s(_device(name), side, side, side) / 1e12 == pytest.approx(measured, rel=within)


def test_norms_of_torch_pass_over_memory_as_fast() -> None:
    """RMSNorm of 65536 x 4096 values in fp16, read and written (pytorch, pull request 159682)."""
    assert memory_s(_device("dgx-b200"), 2 * 2 * 65536 * 4096) == pytest.approx(0.167e-3, rel=0.08)


@pytest.mark.parametrize(
    ("name", "members", "rows", "within"),
    [
        ("gb200-nvl72", 4, RING_OF_4_GB200, 0.055),
        ("dgx-b200", 8, GATHER_OF_8_B200, 0.065),
        ("dgx-b200", 8, REDUCTION_OF_8_B200, 0.065),
    ],
)
def test_collectives_inside_a_node(name: str, members: int, rows: dict[int, float], within: float) -> None:
    """Both halves of an all-reduce along a ring take as long as the gather."""
    cluster = load_cluster(name)
    for mebibytes, measured in rows.items():
        sent = mebibytes * MIB * (members - 1) / members
        assert sent / hop_s(cluster, 0, members, sent) / 1e9 == pytest.approx(measured, rel=within)


def test_eight_b200_have_the_bands_of_their_generation() -> None:
    cluster = load_cluster("dgx-b200").resized(1)
    assert generation_of(cluster.device.name) == generation_of("NVIDIA B200") == "Blackwell"
    assert "1 published source on Blackwell" in band_of(cluster, preset("ddp", cluster)).words


def test_a_search_on_eight_b200_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("llama.json").write_text(json.dumps(LLAMA_8B))
    task = ("--model", "llama.json", "--cluster", "dgx-b200", "--nodes", 1, "--batch", 64, "--sequence", 8192)
    code, out, _ = CommandLine(tmp_path, capsys).call("plan", *task)
    assert code == 0
    assert "1 system x 8 node = 8 x NVIDIA B200 SXM" in out
    assert "of 181.9 GB (191.5 GB less a headroom of 5%)" in " ".join(out.split())
    run = resolve(None, {"plan": "plan.toml"}, {})
    assert run.cluster == load_cluster("dgx-b200").resized(1)
    (share,) = re.findall(r"^MFU ([\d.]+) %", out, re.M)
    assert 30 < float(share) < 100 * run.cluster.device.kernels.gemm, "no faster than its products"
