"""Weight streaming: transformers decoders whose layers are read while they run. Knows no trees, drafts or sampling.

It turns a Hugging Face folder into a module whose forward works although most of its weights are somewhere else.
"""
