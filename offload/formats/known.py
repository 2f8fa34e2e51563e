"""The list of packed formats that are read."""

from offload.formats.bitsandbytes_4bit import FP4, NF4
from offload.formats.bitsandbytes_int8 import INT8
from offload.formats.fp4 import MXFP4, NVFP4
from offload.formats.gguf import GGUF
from offload.formats.scaled import FP8, INT_QUANTIZED
from offload.formats.storage import StorageFormat
from offload.formats.words import AWQ, GPTQ, PACK_QUANTIZED

BITSANDBYTES = tuple(
    StorageFormat(name=known.name, methods=("bitsandbytes",), detect=known.detect) for known in (INT8, NF4, FP4)
)
FORMATS = (*BITSANDBYTES, FP8, INT_QUANTIZED, NVFP4, MXFP4, PACK_QUANTIZED, GPTQ, AWQ, GGUF)
# Names of the tensors beside a module's `weight` that a packed weight is made of
PART_LEAVES = tuple(dict.fromkeys(leaf for known in FORMATS for leaf in known.leaves))


def readable_formats() -> str:
    """Return the formats for a message to a user: 'int8, nf4, ...'."""
    return ", ".join(known.name for known in FORMATS)
