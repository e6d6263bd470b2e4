"""Quantized arrays: groups of numbers as unsigned codes with one ``lo`` and one ``scale`` for each group.

value = lo + code * scale. The definition of a group is in ``kvnumba.kernels.quantize``; rows of codes are kept in the
interchange form: 8 bits, one code a byte; 4 bits, even index in the low nibble and an odd length padded with 0.

This part of the package is good alone: it takes arrays of any rank and float type, with groups along any axis.
"""

from kvnumba.quantization.nibbles import pack_nibbles, unpack_nibbles
from kvnumba.quantization.quantize import quantize_per_channel, quantize_per_token
from kvnumba.quantization.tensor import QuantizationError, QuantizedTensor

__all__ = [
    "QuantizationError",
    "QuantizedTensor",
    "pack_nibbles",
    "quantize_per_channel",
    "quantize_per_token",
    "unpack_nibbles",
]
