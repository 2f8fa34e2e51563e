"""The memory of a pair's weights is read once, planned and filled here. It knows no text and no step.

`pair_setup.py` takes a workload (texts that wait, their mean tokens, how many may share a pass) and gives a
`PairSetup`: trees, number of texts, placement. Plans of other trees and numbers of texts share a `PairSizes`
(`pair_sizes.py`), which reads free memory once, builds each model's skeleton once, and finds the largest trees that
move no layer. `pair_profile.py` finds the profile of the pair whose trees leave the layers where they were when it was
measured; `profile_trees.py` makes tree settings of it. `own_layer.py` weighs whether a target's own layer drafts where
no draft was named, by the seconds of steps (`step_seconds.py`): `pass_load.py` counts what a pass moves and computes,
`expert_load.py` splits a mixture's layers into experts and a dense rest, `profiles/experts.py` predicts which experts
rows request, and `kept_speed.py` knows the machine. Estimates are made of the same sums.

`memory.py` counts everything that is not a weight: keys and values (`cache_memory.py`; beside a card, those of layers
that stream wait in RAM where a pass then moves fewer bytes, or where nothing fits otherwise), a pass's rows, logits,
the draft's distributions, and states of recurrent layers. On a card weights and caches count with what its allocator
rounds. `place.py` puts all of it together with the weights by `offload/placement.py`.
A draft that is its target's own copy shares the layers that stay (`copied_layers.py`), and each of them frees its copy.
`parallel.py` weighs a text's cache against a layer that stays resident. Runs, estimates and tuning share all of it, so
a run loads the very placement that was printed.
"""
