"""Kernels written as LLVM's text, compiled for this processor at need. This room knows memory and arithmetic alone.

`code.py` writes the body of a function, `instructions.py` what differs between x86 and ARM; `compiler.py` compiles
text, and keeps what it made in the cache; `threads.py` runs a function on torch's own threads. `rounded_rows.py` makes
activations whole numbers of 15 bits, which products take: with blocks as they lie in a file (`blocks.py`), or with 32
rows of a weight that stand together (`row_blocks.py`): of even steps (`lanes.py`), of a table's values (`tables.py`),
of bytes (`bytes.py`). `dense.py` and `float8.py` take rows of float32 as they are. Where llvmlite or the processor
lacks what is needed, `is_available` says why, and other kernels serve.

Sums are rounded in one order, whatever the number of rows, threads or the width of registers.
"""
