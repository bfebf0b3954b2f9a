"""`cluster = "auto"`: the cluster of a machine, from a faked machine."""

import argparse
import tomllib
from pathlib import Path
from typing import Any

import pytest

from terrace.base.errors import ClusterError
from terrace.cli import here, probing
from terrace.cli.first_screen import dtype_words
from terrace.cli.main import main
from terrace.cli.options import resolve_run
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import load_cluster, parse_cluster
from terrace.probe.auto import auto_cluster
from terrace.probe.environment import Ranks
from terrace.probe.gpus import Gpus, Link, look_for_gpus
from terrace.probe.machine import Gpu
from terrace.train.config import RunConfig, run_toml
from terrace.train.resolve import parse_run

GIB = 2**30
H100 = "NVIDIA H100 80GB HBM3"


def machine(number: int, name: str = H100, gib: int = 80, link: Link = "nvlink") -> Gpus:
    return Gpus(devices=(Gpu(name=name, memory_bytes=gib * GIB),) * number, link=link, source="nvidia-smi")


def cluster_of(gpus: Gpus, ranks: Ranks | None = None, cores: int = 16) -> tuple[Cluster, str]:
    found = auto_cluster(gpus, cores, 64 * GIB, ranks)
    return parse_cluster(dict(found.table)), "\n".join(found.words)


def sizes(cluster: Cluster) -> list[tuple[str, int]]:
    return [(tier.name, tier.size) for tier in cluster.tiers]


@pytest.mark.parametrize(
    ("name", "preset", "is_own"),
    [
        (H100, "dgx-h100", True),
        ("NVIDIA H100 PCIe", "dgx-h100", False),
        ("NVIDIA H200", "dgx-h200", True),
        ("NVIDIA GH200 120GB", "alps", True),
        ("NVIDIA A100-SXM4-80GB", "dgx-a100", True),
        ("NVIDIA A100-SXM4-40GB", "perlmutter", True),
        ("NVIDIA A100 80GB PCIe", "pcie-a100", True),
        ("NVIDIA B200", "dgx-b200", True),
        ("NVIDIA B300 SXM6 AC", "dgx-b200", False),
        ("NVIDIA GB200", "gb200-nvl72", True),
        ("NVIDIA GB300", "gb200-nvl72", False),
        ("AMD MI250X GCD (gfx90a)", "frontier", True),
        ("AMD Instinct MI300X", "mi300x", True),
        ("AMD gfx942", "mi300x", False),
        ("AMD gfx908", "frontier", False),
        ("NVIDIA GeForce RTX 4090", "pcie-a100", False),
    ],
)
@pytest.mark.parametrize("number", [1, 2, 3, 4, 8])
def test_devices_have_the_constants_of_a_preset(name: str, preset: str, is_own: bool, number: int) -> None:
    cluster, words = cluster_of(machine(number, name, gib=30, link=""))
    device, known = cluster.device, load_cluster(preset).device
    assert cluster.world_size == number
    assert (device.name, device.memory_bytes, device.kernels) == (name, 0.97 * 30 * GIB, known.kernels)
    assert device.peak_flops_per_s == known.peak_flops_per_s
    assert (f"of preset {preset}" in words, f"of the nearest preset, {preset}: terrace probe" in words)[not is_own]
    assert cluster.tiers[-2].name == "node" or number == 1
    assert ("links not probed" in words) == (number > 1)


@pytest.mark.parametrize(
    ("name", "shown_mib", "process_bytes"),
    [
        ("NVIDIA A100-SXM4-80GB", 81920, 85.0e9),
        ("NVIDIA A100-SXM4-40GB", 40960, 42.3e9),
        (H100, 81559, 85.0e9),
        ("NVIDIA H200", 143771, 150.1e9),
        ("NVIDIA GH200 480GB", 97871, 101.5e9),
        ("NVIDIA B200", 183359, 191.5e9),
        ("NVIDIA GB200", 189471, 197.9e9),
        # Of a preset's name, but with another memory; of no preset.
        ("NVIDIA GH200 144G HBM3e", 147456, 0.97 * 147456 * 2**20),
        ("NVIDIA B300 SXM6 AC", 275040, 0.97 * 275040 * 2**20),
        ("Tesla T4", 15360, 0.97 * 15360 * 2**20),
        ("NVIDIA GB200", 0, 197.9e9),
    ],
)
def test_memory_is_what_a_process_gets(name: str, shown_mib: int, process_bytes: float) -> None:
    """Less than nvidia-smi's total, and never more than torch's; torch and AMD's driver tell it themselves."""
    shown = Gpus(devices=(Gpu(name=name, memory_bytes=shown_mib * 2**20),), source="nvidia-smi")
    cluster, words = cluster_of(shown)
    assert cluster.device.memory_bytes == pytest.approx(process_bytes, rel=1e-12)
    assert f"{process_bytes / 1e9:.1f} GB of memory for a process" in words
    for source in ("torch", "/sys/class/kfd"):
        exact = Gpus(devices=(Gpu(name="some device", memory_bytes=10**10),), source=source)
        assert cluster_of(exact)[0].device.memory_bytes == 1e10


def test_no_known_device_gets_less_than_auto_says() -> None:
    """Totals of nvidia-smi and of torch in MiB (`docs/clusters.md`; T4: 14.56 GiB)."""
    for name, shown_mib, torch_mib in (
        ("NVIDIA A100-SXM4-80GB", 81920, 81050),
        (H100, 81559, 81082),
        ("NVIDIA H200", 143771, 139.80 * 1024),
        ("NVIDIA GH200 480GB", 97871, 94.50 * 1024),
        ("NVIDIA B200", 183359, 182631),
        ("NVIDIA GB200", 189471, 184.31 * 1024),
        ("Tesla T4", 15360, 14.56 * 1024),
    ):
        shown = Gpus(devices=(Gpu(name=name, memory_bytes=shown_mib * 2**20),), source="nvidia-smi")
        assert cluster_of(shown)[0].device.memory_bytes <= 1.0005 * torch_mib * 2**20


def test_links_are_those_of_the_machine() -> None:
    nvlink, pcie = (cluster_of(machine(4, link=link))[0].tiers[0] for link in ("nvlink", "pcie"))
    assert nvlink.bandwidth_bytes_per_s == load_cluster("dgx-h100").tiers[0].bandwidth_bytes_per_s
    assert pcie.bandwidth_bytes_per_s == load_cluster("pcie-a100").tiers[0].bandwidth_bytes_per_s
    assert (
        "PCIe between some pairs by nvidia-smi, constants of preset pcie-a100" in cluster_of(machine(2, link="pcie"))[1]
    )
    bridged = cluster_of(machine(2, "NVIDIA A100 80GB PCIe"))[0].tiers[0]
    assert bridged.bandwidth_bytes_per_s == load_cluster("dgx-a100").tiers[0].bandwidth_bytes_per_s


def test_the_smallest_memory_counts_and_old_devices_have_no_bf16() -> None:
    mixed = Gpus(devices=(Gpu(name=H100, memory_bytes=80 * GIB), Gpu(name=H100, memory_bytes=40 * GIB)))
    assert cluster_of(mixed)[0].device.memory_bytes == 40 * GIB
    old, words = cluster_of(machine(2, "Tesla V100-SXM2-16GB"))
    assert set(old.device.peak_flops_per_s) == {"fp32"}
    assert "no units for bf16" in words


def test_under_a_launcher_nodes_are_ranks_by_local_ranks() -> None:
    assert sizes(cluster_of(machine(8), Ranks(world_size=32, local=8))[0]) == [("node", 8), ("system", 4)]
    # Each rank sees its own device alone.
    assert sizes(cluster_of(machine(1), Ranks(world_size=16, local=4))[0]) == [("node", 4), ("system", 4)]
    few, words = cluster_of(machine(8), Ranks(world_size=4, local=4))
    assert sizes(few) == [("node", 4), ("system", 1)]
    assert "4 ranks started on 8 GPUs" in words
    shared, whole = (cluster_of(machine(n, "AMD MI250X GCD (gfx90a)", 64, "xgmi"))[0].tiers[-1] for n in (1, 8))
    assert shared.bandwidth_bytes_per_s == 2 * whole.bandwidth_bytes_per_s
    with pytest.raises(ClusterError, match="9 ranks are no multiple of the 8"):
        cluster_of(machine(8), Ranks(world_size=9))


@pytest.mark.parametrize(("cores", "number"), [(1, 1), (2, 2), (6, 4), (16, 16), (256, 32)])
def test_without_a_gpu_there_is_a_process_a_core(cores: int, number: int) -> None:
    found = auto_cluster(Gpus(), cores, 33 * 10**9)
    cluster = parse_cluster(dict(found.table))
    assert sizes(cluster) == [("node", number), ("system", 1)]
    assert cluster.device.backend == "cpu"
    assert number * cluster.device.memory_bytes <= 33e9
    assert "no GPU" in found.words[0]


# ---- what a command makes of it


@pytest.fixture
def run_on(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(here, "launched_ranks", lambda: None)
    monkeypatch.setattr(here, "_torch_is_for_cpus", lambda: False)

    def resolved(gpus: Gpus, *words: str, cluster: str | None = None, ranks: int | None = None) -> RunConfig:
        monkeypatch.setattr(here, "gpus_here", lambda: gpus)
        options = argparse.Namespace(**dict.fromkeys(("config", "model", "plan", "data")), cluster=cluster, ranks=ranks)
        return resolve_run(options, words)

    return resolved


def test_a_gpu_makes_auto_the_default(run_on: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_on(machine(4))
    assert (run.cluster.name, run.cluster.world_size, run.plan.compute, run.plan.master) == ("auto", 4, "bf16", "fp32")
    assert "terrace: cluster auto: 4 GPUs by nvidia-smi, NVIDIA H100" in capsys.readouterr().err
    assert dtype_words(run) == [
        "computes in bf16 (989 TFLOP/s); --plan.compute fp32: 14.8 times as long, twice the bytes"
    ]
    links = "\n".join(dtype_words(run, verbose=True))
    for words in ("computes in bf16, at up to 989 TFLOP/s", "--plan.compute fp32 rounds less", "14.8 times as long"):
        assert words in links
    asked = run_on(machine(4), "--plan.compute", "fp32")
    assert asked.plan.compute == "fp32"
    links = dtype_words(asked, verbose=True)[1]
    assert links == "  --plan.compute bf16 halves the bytes: products at 989 TFLOP/s, 14.8 times as fast"
    # The folder of a run keeps the cluster itself.
    assert parse_run(tomllib.loads(run_toml(run))).cluster == run.cluster
    capsys.readouterr()
    assert run_on(machine(8), ranks=2).cluster.world_size == 2
    assert capsys.readouterr().err.count("--ranks 2 leave 6 of 8 GPUs idle") == 1
    assert run_on(machine(2, "Tesla V100-SXM2-16GB")).plan.compute == "fp32"


def test_other_machines_keep_their_default(run_on: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert run_on(Gpus()).cluster == load_cluster("local")
    assert run_on(machine(4), cluster="local").cluster.name == "local"
    assert capsys.readouterr().err == ""
    assert run_on(machine(1), ranks=2).cluster.device.backend == "cpu"
    assert "--ranks 2 are more than the GPUs of this machine, 1" in capsys.readouterr().err
    assert run_on(Gpus(), cluster="auto").cluster.name == "auto"
    monkeypatch.setattr(here, "_torch_is_for_cpus", lambda: True)
    assert run_on(machine(4)).cluster.name == "local"
    assert "torch is built for CPUs" in capsys.readouterr().err


def test_a_probe_starts_from_the_machine_it_measures(run_on: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    started: list[Cluster] = []

    def measured(cluster: Cluster, *_: object) -> None:
        started.append(cluster)

    monkeypatch.setattr(probing, "run", measured)
    for gpus, words in ((machine(4), ""), (machine(8), "--ranks 2"), (Gpus(), ""), (machine(4), "--cluster local")):
        run_on(gpus)
        assert main(["probe", *words.split()]) == 0
    capsys.readouterr()
    found = [(cluster.name, cluster.device.backend, cluster.world_size) for cluster in started]
    assert found == [("auto", "cuda", 4), ("auto", "cuda", 2), ("local", "cpu", 8), ("local", "cpu", 8)]
    assert started[0].device.memory_bytes == 85.0e9


def test_a_plan_is_searched_for_the_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(here, "gpus_here", lambda: machine(8))
    model = Path(__file__).parents[2] / "docs" / "gpt-350m.json"
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--model", str(model), "--cluster", "auto", "--batch", "64", "--sequence", "1024"]) == 0
    assert "cluster auto: 1 system x 8 node = 8 x NVIDIA H100" in capsys.readouterr().out


# ---- looking it up

TABLE = "".join(f"{index}, GPU-{index}abc, {H100}, 81559\n" for index in range(4))
NVLINK = "\x1b[4m\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\x1b[0m\n" + "".join(
    f"GPU{row}\t" + "\t".join(" X " if row == column else "NV18" for column in range(4)) + "\t0-31\n"
    for row in range(4)
)


@pytest.mark.parametrize(
    ("shown", "topology", "number", "link"),
    [
        (None, NVLINK, 4, "nvlink"),
        (None, NVLINK.replace("NV18", "SYS", 1), 4, "pcie"),
        ("1,2", NVLINK.replace("NV18", "SYS", 1), 2, "nvlink"),
        ("0,1", NVLINK.replace("NV18", "SYS", 1), 2, "pcie"),
        ("GPU-2,GPU-3", NVLINK, 2, "nvlink"),
        ("3", NVLINK, 1, ""),
        ("", NVLINK, 0, ""),
        ("0,-1,2", NVLINK, 1, ""),
        (None, None, 4, ""),
        (None, "nonsense", 4, ""),
    ],
)
def test_nvidia_is_asked(tmp_path: Path, shown: str | None, topology: str | None, number: int, link: str) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    variables = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
    found = look_for_gpus(variables, tmp_path, lambda *words: topology if "topo" in words else TABLE)
    assert (len(found.devices), found.link, found.source) == (number, link, "nvidia-smi")
    assert {each.memory_bytes for each in found.devices} <= {81559 * 2**20}
    assert look_for_gpus(variables, tmp_path / "none", lambda *_: TABLE) == Gpus()


@pytest.mark.parametrize("said", [None, "", "No devices were found"])
def test_without_an_answer_torch_is_asked(tmp_path: Path, said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    own = (Gpu(name=H100, memory_bytes=1),)
    monkeypatch.setattr("terrace.probe.gpus.torch_gpus", lambda: own)
    assert look_for_gpus({}, tmp_path, lambda *_: said) == Gpus(devices=own, source="torch")


def test_files_tell_of_amd(tmp_path: Path) -> None:
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for index, simds in enumerate([0, 440, 440]):  # node 0 is the CPU
        bank, joined = nodes / f"{index}/mem_banks/0", nodes / f"{index}/io_links/0"
        bank.mkdir(parents=True)
        joined.mkdir(parents=True)
        (nodes / f"{index}/properties").write_text(f"simd_count {simds}\ngfx_target_version 90010\n")
        (bank / "properties").write_text(f"heap_type 1\nsize_in_bytes {64 * GIB}\n")
        (joined / "properties").write_text(f"type {11 if simds else 2}\nnode_from {index}\nnode_to {3 - index}\n")
    found = look_for_gpus({}, tmp_path)
    assert found == Gpus(
        devices=(Gpu(name="AMD MI250X GCD (gfx90a)", memory_bytes=64 * GIB),) * 2, link="xgmi", source="/sys/class/kfd"
    )
    assert len(look_for_gpus({"ROCR_VISIBLE_DEVICES": "1"}, tmp_path).devices) == 1
