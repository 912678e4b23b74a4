"""Quantised dispatch: rows travel as float8 or float4 with a scale per block of columns. One module per format."""

from epcomm.moe.quantize.e4m3 import LARGEST, SMALLEST_SCALE
from epcomm.moe.quantize.float8 import BLOCK, Float8, column_major
from epcomm.moe.quantize.mxfp8 import MXFP8
from epcomm.moe.quantize.nvfp4 import NVFP4
from epcomm.moe.quantize.quantizer import X_DTYPES, Quantizer

__all__ = [
    "BLOCK",
    "LARGEST",
    "MXFP8",
    "NVFP4",
    "SMALLEST_SCALE",
    "X_DTYPES",
    "Float8",
    "Quantizer",
    "column_major",
]
