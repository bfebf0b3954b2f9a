"""The Triton kernels of the codecs equal the reference bit for bit: in Triton's interpreter, and on a GPU.

They are compiled here too, which needs no GPU: the interpreter runs Python and takes code that the compiler refuses.
"""

from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

from terrace.comm.codecs.layout import GRIDS, INF_BITS, MIN_SCALE_BITS, NAN_SCALE_BITS
from tests.support.codec_cases import compare_all
from tests.support.command_line import interpreted

ENCODE_SIGNATURE = {
    **dict.fromkeys(("values", "residual"), "*fp32"),
    "codes": "*i8",
    "scales": "*i16",
    **dict.fromkeys(("numel", "stride", "residual_stride", "message_stride", "codes_at", "first"), "i32"),
    "reciprocal": "fp32",
}
DECODE_SIGNATURE = {
    "out": "*fp32",
    "codes": "*i8",
    "scales": "*i16",
    **dict.fromkeys(("numel", "stride", "message_stride", "codes_at", "first"), "i32"),
}


def cuda_constants(codec: str, *, encode: bool) -> dict[str, int | bool]:
    """Return the constants of a kernel, as `terrace/comm/codecs/cuda.py` passes them; all blocks full in a decode."""
    grid = GRIDS[codec]
    kind = ("int8", "fp8", "int4").index(codec)
    common: dict[str, int | bool] = {"KIND": kind, "BLOCKS": 32, "BLOCK": 128, "FULL": not encode}
    if not encode:
        return {**common, "ADD": True, "SUMMED": 4}
    scales = {"MIN_SCALE": MIN_SCALE_BITS, "MAX_SCALE": grid.max_scale_bits, "NAN_SCALE": NAN_SCALE_BITS}
    return {**common, **scales, "FEEDBACK": True, "QMAX": int(grid.qmax), "INF": INF_BITS}


def compiled(name: str, signature: dict[str, str], constants: dict[str, int | bool], capability: int) -> str:
    """Return the PTX of a kernel for a compute capability, 80 for 8.0."""
    triton, targets = import_module("triton.compiler"), import_module("triton.backends.compiler")
    source = triton.ASTSource(
        fn=getattr(import_module("terrace.comm.codecs.kernels"), name),
        signature={**signature, **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
    )
    built = triton.compile(
        source, target=targets.GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False}
    )
    return str(built.asm["ptx"])


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: no kernel was tested")


@needs_triton
def test_kernels_in_the_interpreter() -> None:
    """With bounds: an access outside its tensor ends the process, and three that were made on purpose are told."""
    equal, *faults = interpreted("tests.support.codec_cases").splitlines()
    assert equal.startswith("equal")
    arguments = ("argument 1, (2, 1000) float32", "argument 3, (2, 1024) int8", "argument 2, (2, 999) float32")
    assert len(faults) == len(arguments)
    for said, argument in zip(faults, arguments, strict=True):
        assert said.startswith("encode_kernel: a ")
        assert argument in said
        assert "outside" in said


@needs_triton
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("codec", ["int8", "fp8", "int4"])
def test_kernels_compile_without_a_gpu(codec: str, capability: int) -> None:
    """For Ampere, Hopper, Blackwell: division is correctly rounded, and nothing fused or flushed that changes bits."""
    encode = compiled("encode_kernel", ENCODE_SIGNATURE, cuda_constants(codec, encode=True), capability)
    decode = compiled("decode_kernel", DECODE_SIGNATURE, cuda_constants(codec, encode=False), capability)
    assert "div.rn.f32" in encode
    for assembly in (encode, decode):
        assert "fma." not in assembly
        assert ".ftz" not in assembly


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the kernels were not run on one")
def test_kernels_on_a_gpu() -> None:
    formats = tuple(f"{codec}:{block}" for codec in ("int8", "fp8", "int4") for block in (16, 128, 4096))
    compare_all("cuda", ((1, 1), (3, 127), (2, 4096 + 300), (1, 1 << 20), (4, 100003)), formats)
