"""The eight-bit float of the fp8 formats: sign, four exponent bits of bias 7, three of mantissa, no infinity.

byte        value
0x00        0
0x01–0x07   subnormal, mantissa · 2⁻⁹
0x08–0x7e   (1 + mantissa/8) · 2^(exponent - 7), up to 448
0x7f        NaN
0x80–0xff   the same with a minus sign; 0xff is NaN, so poisoned memory is

Source: OCP 8-bit Floating Point Specification, revision 1.0; FP8 Formats for Deep Learning, arXiv 2209.05433.
"""

import torch

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
E4M3_ROUNDOFF = 2.0**-4


def quantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The code nearest to x / scale, ties to the even one; ±448 beyond it, NaN for NaN.

    The quotient is rounded to float32 first: a writer that multiplies by a reciprocal stores other bytes.
    """
    # Clamped before the cast, which saturates in some versions of torch and gives NaN in others.
    return (x.to(torch.float32) / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def over_largest(amax: torch.Tensor) -> torch.Tensor:
    """amax / 448, rounded to nearest in float32.

    On CUDA torch multiplies by the reciprocal of a number, and divides only by a tensor.
    """
    return amax / torch.full_like(amax, E4M3_MAX)


def dequantize(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """code · scale: exact in float64, rounded once in float32, and once more in any narrower ``dtype``."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (codes.to(wide) * scale.to(wide)).to(dtype)
