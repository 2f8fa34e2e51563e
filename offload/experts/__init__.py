"""A mixture's experts come one by one, once their router has chosen. This room knows no trees and no texts.

A layer's record is taken apart (`expert_group.py`): its dense part streams like any layer, and each expert is a record
of slices, however the checkpoint stores it. The forward of transformers' experts' module is ours (`mixture.py`): every
distinct expert is requested once, and rows are multiplied and summed as transformers' grouped function does it, so
results are equal. `expert_source.py` hands experts out as they come, those in memory first. `expert_cache.py` decides
which stay, by how often and how lately they were requested, and never drops one that rows wait for.

On a CPU an expert is mapped pages (`cpu_experts.py`), multiplied as it is packed where its format has a kernel, or
unpacked; packed experts that live in their layers are computed so too (`in_layers.py`). On CUDA it has a slot
(`cuda_experts.py`), filled from pinned memory or the files; those used most wait in pinned memory (`expert_use.py`).
An expert in pinned memory is computed there by the CPU where that takes less time than moving it, by rates that loading
measures (`cuda_experts.py`). Memory goes to dense parts first, then to experts (`expert_placement.py`). Families whose
experts transformers does not describe so, and formats whose experts share scales, stream whole layers.
"""
