"""Weight streaming: transformers decoders whose layers are read while they run. It knows no trees, drafts or sampling.

This room turns a Hugging Face folder into a module whose forward works although most of its weights are somewhere
else.
"""
