"""The headroom of a device: a share of its memory or bytes of it, and presets that state what a process gets."""

from dataclasses import replace

import pytest

from terrace.base.errors import ClusterError
from terrace.cluster.device import DEFAULT_HEADROOM, headroom_bytes, room_words
from terrace.cluster.presets import load_cluster, preset_names


@pytest.mark.parametrize(
    ("headroom", "kept"),
    [("0%", 0.0), ("10%", 8e9), ("2.5%", 2e9), ("6GB", 6e9), ("6 GB", 6e9), ("512MiB", 2.0**29)],
)
def test_a_share_or_bytes(headroom: str, kept: float) -> None:
    assert headroom_bytes(headroom, 80e9) == kept


@pytest.mark.parametrize("headroom", ["", "6", "0.1", "-1%", "6gb", "ten", "100%", "1TB", "1e9B", "nan%"])
def test_a_headroom_without_a_unit_or_room_is_refused(headroom: str) -> None:
    device = load_cluster("dgx-h100").device
    with pytest.raises(ClusterError, match=r"device.headroom = .* (write 5% or 4GB|give less)"):
        replace(load_cluster("dgx-h100"), device=replace(device, headroom=headroom))


def test_the_memory_that_a_plan_may_take() -> None:
    device = replace(load_cluster("dgx-h100").device, memory_bytes=80e9, headroom="10%")
    assert device.usable_bytes == 72e9
    assert device.room_words == "72 GB (80 GB less a headroom of 10%)"
    assert room_words(80e9, "0GB") == "80 GB"


# What nvidia-smi shows in MiB, which is more than a process gets, and the size in the name of the part in GB.
SHOWN = {
    "NVIDIA A100 SXM 40GB": (40960, 40),
    "NVIDIA A100 SXM 80GB": (81920, 80),
    "NVIDIA A100 PCIe 80GB": (81920, 80),
    "NVIDIA H100 SXM": (81559, 80),
    "NVIDIA H200 SXM": (143771, 141),
    "NVIDIA GH200 (96 GB)": (97871, 96),
}


@pytest.mark.parametrize("name", preset_names())
def test_presets_state_what_a_process_gets(name: str) -> None:
    device = load_cluster(name).device
    assert device.headroom == DEFAULT_HEADROOM
    assert device.usable_bytes == pytest.approx(0.95 * device.memory_bytes)
    if device.name in SHOWN:
        mebibytes, named = SHOWN[device.name]
        assert 1e9 * named < device.memory_bytes < mebibytes * 2**20 < 1.02 * device.memory_bytes
