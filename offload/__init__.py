"""Weight streaming: transformers decoders whose layers are read while they run. It knows no trees, drafts or sampling.

This room turns a Hugging Face folder into a module whose forward works although most of its weights lie
elsewhere.

**Placement.** `checkpoint.py` knows every tensor's bytes from the headers, `architecture.py` from a bare config.
`skeleton.py` builds the modules on the meta device and matches them with the tensors; `stored_names.py` follows
transformers' own renamings. `placement.py` is arithmetic over those bytes: layers that stay on the device, layers that
wait in pinned RAM, layers on disk. Each tier is spread evenly over the depth, so that link, disk and device work at
once: a pass takes as long as the slowest of them, not as their sum.

**Streaming.** `stream.py` is a ring that reads ahead: position p carries layer p mod layers in slot p mod slots, so the
next pass's first layers load while the draft grows. `loaders.py` holds all device differences: on a CPU a slot is a
range of mapped pages or a buffer of converted weights, on CUDA a device buffer (`device_slots.py`) that a copy stream
fills from pinned memory or through a staging ring, past the page cache where the file system offers it
(`direct_reads.py`). The ring (`staging.py`) reads a layer in small parts (`layer_parts.py`) and is locked before all
else: it fits the least memory that systems lock. `allocated.py` knows what the device's allocator rounds.
`host_table.py` keeps input embeddings in RAM, beside a card that has no room for the whole model, and `file_tables.py`
leaves in their files the tables inside of layers that are larger than models (Qwen 4's n-grams). `device.py` is a
device's interface to the loaders; tests give them a simulated one. `pages.py` alone talks to the operating system about
memory. A few bytes of every tensor are compared on each read, so that a file that is written over in use is noticed.

**Parts.** `text_part.py` finds the decoder of a family that also sees or hears, and leaves out the rest.
`quantize.py` packs layers one at a time into a cache that is keyed by content (`quantized_cache.py`);
`packed_weight.py` finds packed weights, and unpacks a module's weights just before it runs. `adapters/` lets modules
add what fine-tunes (LoRA) have for some of their rows.
Activations are never quantised: each row depends on itself alone, so a tree's rows are those of its paths.
"""
