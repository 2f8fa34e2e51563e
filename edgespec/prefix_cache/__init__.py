"""Rows of earlier texts, on which a new text begins: in memory and in files. It knows no scheduler and no step.

`prompt_cache.py` keeps keys and values of what prompts have in common in a safetensors file (`prompt_files.py`), by
model, format, device and tokens; texts begin on copies of the rows that their own prompt shares (`prompt_rows.py`).
`slots.py` has such a file for each conversation of a folder. `in_memory.py` keeps the rows of texts that have ended in
the memory that those under way leave, and chooses what a new text begins on.
"""
