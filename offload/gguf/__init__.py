"""GGUF files as checkpoints: this room knows llama.cpp's names, settings and vocabularies, and nothing of layers.

`header.py` reads settings and places of tensors by mmap, in one file or in the parts of a split model. `families.py` is
a table: for each architecture its names, what its settings mean in a config.json, and what llama.cpp's converter did
that has to be undone (`family.py` says what a line holds). `checkpoint.py` gives a file's tensors the names under which
the model is published as safetensors, so that all other rooms treat both alike; `settings.py` makes the config. A
setting or a tensor that is not understood refuses the file by name: ignored, it would make other texts. `vocabulary.py`
has the file's tokens. Types of blocks are packed formats (`offload/formats/gguf.py`).
"""
