"""LoRA adapters at run time: what a fine-tune adds to a model's modules, beside weights that stream and stay packed.

`settings.py` reads or refuses each field of an adapter's config, `peft_folder.py` finds its tensors by their headers,
and `fit.py` matches these with a model's modules: all of that before a weight is read. `forward.py` lets loaded modules
add their parts. Whose rows pass a module says `use.py`: rows of texts that use other adapters, or none, may pass it at
once, and each row gets the numbers that it gets alone.

The forward is PEFT's unmerged one. Merging would round the sum of two weights, and quantise packed ones anew.
"""
