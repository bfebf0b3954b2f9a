"""Triton kernels of the block codecs; `cuda.py` launches them and describes how rows are divided.

A tile is two halves of its blocks, [blocks, half] each, because a byte of int4 holds one element of either; the other
codecs work with any split. Element pointers point to a row of n elements; `codes` and `scales` point to the same
message as int8 and as int16.

KIND is 0 for int8, 1 for fp8 and 2 for int4: a kernel takes constants, not strings.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False
# ruff: noqa: N803, SIM300  (constexpr arguments are in capitals)

import triton
import triton.language as tl


@triton.jit
def encode_kernel(
    values,
    residual,
    codes,
    scales,
    numel,
    stride,  # of a row of values, elements
    residual_stride,
    message_stride,  # bytes
    codes_at,  # bytes before the codes
    first,  # block of the first program
    reciprocal,
    FULL: tl.constexpr,
    FEEDBACK: tl.constexpr,
    KIND: tl.constexpr,
    QMAX: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    MAX_SCALE: tl.constexpr,
    INF: tl.constexpr,
    NAN_SCALE: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    block = first + tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    low, high, has_low, has_high = _elements(block, numel, FULL, BLOCK)
    values += row * stride
    residual += row * residual_stride
    codes += row * message_stride + codes_at
    scales += row * (message_stride // 2)

    x_low = _fp32(_load(values + low, has_low, FULL))
    x_high = _fp32(_load(values + high, has_high, FULL))
    if FEEDBACK:
        x_low += _load(residual + low, has_low, FULL)
        x_high += _load(residual + high, has_high, FULL)

    # As integers, inf and nan are the largest magnitudes.
    amax = tl.maximum(_magnitude_bits(x_low), _magnitude_bits(x_high))
    amax = tl.max(amax, axis=1, keep_dims=True)  # [blocks, 1], int32
    poisoned = amax >= INF
    bits = (amax.to(tl.float32, bitcast=True) * reciprocal).to(tl.int32, bitcast=True)
    # Adding 0xFFFF before truncation rounds the bf16 scale up.
    bits = tl.minimum(tl.maximum((bits + 0xFFFF) & -0x10000, MIN_SCALE), MAX_SCALE)
    bits = tl.where(poisoned, NAN_SCALE, bits)
    scale = bits.to(tl.float32, bitcast=True)
    inverse = tl.div_rn(tl.full([BLOCKS, 1], 1.0, tl.float32), scale)
    code_low = _round(tl.where(poisoned, 0.0, x_low * inverse), KIND, QMAX)
    code_high = _round(tl.where(poisoned, 0.0, x_high * inverse), KIND, QMAX)

    tl.store(scales + block, (bits >> 16).to(tl.int16), mask=block * BLOCK < numel)
    if KIND == 2:
        # The two halves of the tile share the byte, so packing needs no exchange between threads.
        byte = block * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
        _store(codes + byte, (code_low + 16 * code_high).to(tl.int8), has_low, FULL)
    else:
        _store(codes + low, code_low.to(tl.int8), has_low, FULL)
        _store(codes + high, code_high.to(tl.int8), has_high, FULL)
    if FEEDBACK:
        _store(residual + low, x_low - _point(code_low, KIND) * scale, has_low, FULL)
        _store(residual + high, x_high - _point(code_high, KIND) * scale, has_high, FULL)


@triton.jit
def decode_kernel(
    out,
    codes,
    scales,
    numel,
    stride,  # of a row of out, elements
    message_stride,  # bytes
    codes_at,  # bytes before the codes
    first,  # block of the first program
    SUMMED: tl.constexpr,  # consecutive messages added into each row of out
    FULL: tl.constexpr,
    ADD: tl.constexpr,
    KIND: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Decode `BLOCKS` blocks of a row, or add the blocks of several messages to it."""
    row = tl.program_id(1).to(tl.int64)
    block = first + tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    low, high, has_low, has_high = _elements(block, numel, FULL, BLOCK)
    out += row * stride
    codes += row * message_stride + codes_at
    scales += row * (message_stride // 2)
    if ADD:
        sum_low = _load(out + low, has_low, FULL)
        sum_high = _load(out + high, has_high, FULL)
        # The sum stays in registers; each message is read once, in the order of the rows.
        for _ in range(SUMMED):
            x_low, x_high = _decode(codes, scales, block, low, high, has_low, has_high, numel, FULL, KIND, BLOCK)
            sum_low += x_low.to(sum_low.dtype)
            sum_high += x_high.to(sum_high.dtype)
            codes += message_stride
            scales += message_stride // 2
        _store(out + low, sum_low, has_low, FULL)
        _store(out + high, sum_high, has_high, FULL)
    else:
        x_low, x_high = _decode(codes, scales, block, low, high, has_low, has_high, numel, FULL, KIND, BLOCK)
        _store(out + low, _as(x_low, out.dtype.element_ty), has_low, FULL)
        _store(out + high, _as(x_high, out.dtype.element_ty), has_high, FULL)


@triton.jit
def _decode(
    codes,
    scales,
    block,
    low,
    high,
    has_low,
    has_high,
    numel,
    FULL: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    scale = tl.load(scales + block, mask=block * BLOCK < numel, other=0).to(tl.int32) << 16
    scale = scale.to(tl.float32, bitcast=True)
    if KIND == 2:
        byte = _load(codes + block * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :], has_low, FULL).to(tl.int32)
        # +8 undoes the borrow that a negative low half takes from the high half.
        code_high = (byte + 8) >> 4
        code_low = byte - 16 * code_high
    else:
        code_low = _load(codes + low, has_low, FULL).to(tl.int32)
        code_high = _load(codes + high, has_high, FULL).to(tl.int32)
    return _point(code_low, KIND) * scale, _point(code_high, KIND) * scale


@triton.jit
def _elements(block, numel, FULL: tl.constexpr, BLOCK: tl.constexpr):
    # Elements of the lower and the upper half of blocks [blocks, 1], and masks of the existing ones.
    lane = tl.arange(0, BLOCK // 2)[None, :]
    start = block * BLOCK
    if FULL:
        half = BLOCK // 2
        has_low, has_high = lane >= 0, lane >= 0
    else:
        width = tl.minimum(tl.maximum(numel - start, 0), BLOCK)  # [blocks, 1]: the last block may be short
        half = (width + 1) // 2
        has_low, has_high = lane < half, lane < width - half
    return start + lane, start + half + lane, has_low, has_high


@triton.jit
def _load(pointers, exists, FULL: tl.constexpr):
    return tl.load(pointers) if FULL else tl.load(pointers, mask=exists, other=0)


@triton.jit
def _store(pointers, values, exists, FULL: tl.constexpr):
    if FULL:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=exists)


@triton.jit
def _magnitude_bits(x):
    # Bits of |x| as int32 sort like magnitudes, with inf and nan last.
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _round(scaled, KIND: tl.constexpr, QMAX: tl.constexpr):
    # Half even: to int32 from -QMAX to QMAX, or to the byte of an e4m3.
    if KIND == 1:
        magnitude = _magnitude_bits(scaled)
        # Normal: drop 20 bits of the mantissa, half even; the exponent's bias changes from 127 to 7.
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2^-6 the step is 2^-9, which is the step of fp32 from 2^14 on.
        subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.minimum(tl.where(magnitude < 0x3C800000, subnormal, normal), 0x7E)  # 448
        code = code | ((scaled.to(tl.int32, bitcast=True) >> 24) & 0x80)
    else:
        # From 2^23 on the step of fp32 is 1, so adding 1.5 * 2^23 rounds to an integer, in the low bits.
        code = (scaled + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
        code = tl.minimum(tl.maximum(code, -QMAX), QMAX)
    return code


@triton.jit
def _point(code, KIND: tl.constexpr):
    # Inverse of `_round`; for e4m3 only the low byte of the code counts.
    if KIND == 1:
        magnitude = code & 0x7F
        normal = (magnitude << 20) + (120 << 23)
        subnormal = (magnitude.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)  # 2^-9
        bits = tl.where(magnitude < 8, subnormal, normal) | ((code & 0x80) << 24)
        point = bits.to(tl.float32, bitcast=True)
    else:
        point = code.to(tl.float32)
    return point


@triton.jit
def _fp32(x):
    # From bf16 by its bits: Triton's interpreter, which runs the tests, loses subnormals.
    if x.dtype == tl.bfloat16:
        converted = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        converted = x.to(tl.float32)
    return converted


@triton.jit
def _as(x, DTYPE: tl.constexpr):
    # Half even. To bf16 by its bits: Triton's interpreter truncates.
    if DTYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FC0)  # a nan could be carried over into zero
        converted = rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        converted = x.to(DTYPE)
    return converted
