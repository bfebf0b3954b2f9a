"""Attention after a probe: a device that behaves as its preset keeps the preset's seconds, by every kernel."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import get_args

import pytest

from terrace.cluster.cluster import Device, Kernels
from terrace.cluster.presets import load_cluster
from terrace.model.attention_kernel import AttentionKernel
from terrace.probe.assemble import Probed, assemble
from terrace.simulate.kernels import attention_s
from tests.support.nightly import nightly
from tests.support.probed import attention_of, synthetic

KERNELS: tuple[AttentionKernel, ...] = get_args(AttentionKernel)


def _seconds(device: Device) -> Iterator[float]:
    """Attention without launches, which whole layers correct."""
    device = replace(device, kernels=replace(device.kernels, launch_s=0.0))
    for kernel, keys, head_dim in product(KERNELS, (512, 4096, 32768), (64, 128)):
        yield from attention_s(device, batch=1, heads=16, queries=keys, keys=keys, head_dim=head_dim, kernel=kernel)


def _probed(name: str, true: Kernels | None = None) -> tuple[Device, Probed]:
    """A device with the kernels `true`, the preset's by default, and a probe of it that starts at the preset."""
    start = load_cluster(name)
    machine = replace(start, device=replace(start.device, kernels=true or start.device.kernels))
    return machine.device, assemble(start, synthetic(machine))


@pytest.mark.parametrize("name", ["dgx-h100", *nightly("dgx-a100", "gb200-nvl72", "dgx-b200")])
def test_a_device_that_behaves_as_its_preset_keeps_its_attention_by_every_kernel(name: str) -> None:
    true, probed = _probed(name)
    assert list(_seconds(probed.cluster.device)) == pytest.approx(list(_seconds(true)), rel=0.03)


def test_the_rate_of_flash_attention_2_is_the_measured_one() -> None:
    preset = load_cluster("dgx-h100").device.kernels
    slower = replace(preset, flash2=0.2, flash2_backward=0.1, attention=0.4, attention_backward=0.3)
    true, probed = _probed("dgx-h100", slower)
    device = probed.cluster.device
    assert list(_seconds(device)) == pytest.approx(list(_seconds(true)), rel=0.03)
    assert (device.kernels.flash2, device.kernels.flash2_backward) == pytest.approx((0.2, 0.1), rel=0.03)
    assert device.marks["kernels.flash2"] == device.marks["kernels.flash2_backward"] == "fitted"
    rows = {row.name: row for row in probed.rows}
    assert rows["kernels.flash2"].before == preset.flash2
    assert rows["kernels.flash2"].now == device.kernels.flash2


def test_without_a_measurement_flash_attention_2_stays_that_of_the_preset() -> None:
    start = load_cluster("dgx-h100")
    others = {"cudnn": attention_of(start.device, 8192)}
    device = assemble(start, replace(synthetic(start), attention_kernels=others)).cluster.device
    assert (device.kernels.flash2, device.kernels.flash2_backward) == (0.355, 0.314)
    assert device.marks["kernels.flash2"] == "preset"


def test_torch_that_takes_flash_attention_2_itself_has_one_rate() -> None:
    """Another rate is kept where torch takes another kernel, though the description knows of none."""
    _, probed = _probed("dgx-a100")
    assert probed.cluster.device.kernels.flash2 == 0.0
    preset = load_cluster("dgx-a100").device.kernels
    _, probed = _probed("dgx-a100", replace(preset, flash2=0.5, flash2_backward=0.4))
    assert probed.cluster.device.kernels.flash2 == pytest.approx(0.5, rel=0.03)


def test_short_rows_tell_how_many_keys_reach_half_forward_and_backward() -> None:
    preset = load_cluster("dgx-h100").device.kernels
    true, probed = _probed("dgx-h100", replace(preset, attention_half_keys=150.0, attention_half_keys_backward=700.0))
    found = probed.cluster.device
    assert found.kernels.attention_half_keys == pytest.approx(150.0, rel=0.05)
    assert found.kernels.attention_half_keys_backward == pytest.approx(700.0, rel=0.05)
    assert found.marks["kernels.attention_half_keys_backward"] == "fitted"
    assert list(_seconds(found)) == pytest.approx(list(_seconds(true)), rel=0.03)


def test_rows_of_one_length_leave_the_keys_of_the_preset() -> None:
    start = load_cluster("dgx-h100")
    once = replace(synthetic(start), attention=(attention_of(replace(start.device), 4096),))
    device = assemble(start, once).cluster.device
    assert device.kernels.attention_half_keys == start.device.kernels.attention_half_keys
    assert device.kernels.attention == pytest.approx(start.device.kernels.attention, rel=0.01)
    assert device.marks["kernels.attention_half_keys"] == "preset"


def test_products_in_8_bits_stay_as_much_of_the_others_as_in_the_preset() -> None:
    preset = load_cluster("dgx-h100").device.kernels
    _, probed = _probed("dgx-h100", replace(preset, gemm=0.6))
    found = probed.cluster.device.kernels
    assert found.gemm == pytest.approx(0.6, rel=0.03)
    assert found.gemm_fp8 / found.gemm == pytest.approx(preset.gemm_fp8 / preset.gemm)
