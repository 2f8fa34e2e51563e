"""Weight streaming: transformers decoders whose layers are read while they run.

This room knows checkpoints, memory and devices. It knows nothing of token trees, drafts or
sampling: it turns a Hugging Face folder into a module whose forward works although most of its
weights are somewhere else.
"""
