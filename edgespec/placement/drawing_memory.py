"""The memory of what makes drafts fast and draws exact: recorded passes, the noise of texts, and texts to look up."""

from collections.abc import Callable

from transformers import PretrainedConfig

from edgespec.draft.lookup import lookup_bytes
from edgespec.model.cuda_graphs import recorded_bytes
from edgespec.placement.run_config import RunConfig
from edgespec.sampling.noise import noise_bytes
from edgespec.tree.looked_up import num_positions
from edgespec.tree.settings import TreeSettings


def drawing_memory(
    tree: TreeSettings,
    draft: PretrainedConfig,
    run_config: RunConfig,
    draft_rows: int,
    temporaries: Callable[[int, int], int],
) -> dict[str, int]:
    """Return the bytes of each use; a draft's cache has `draft_rows`, and its pass `temporaries` for rows and keys."""
    uses = {}
    if tree.children == "coupled":
        uses["noise of texts"] = run_config.num_texts * noise_bytes(draft.vocab_size, num_positions(tree))
    if run_config.records_passes:
        uses["draft: recorded passes"] = recorded_bytes(
            draft, rows=draft_rows, dtype=run_config.dtype, temporaries=temporaries
        )
    return uses


def lookup_memory(tree: TreeSettings, run_config: RunConfig) -> dict[str, int]:
    """Return the bytes of RAM in which texts, and a corpus, are looked up: use -> bytes."""
    if not tree.lookup or tree.policy == "none" or not tree.is_lossless:
        return {}
    corpus_tokens = run_config.corpus_tokens
    return {
        "text that is looked up": lookup_bytes(
            run_config.all_tokens, num_texts=run_config.num_texts, corpus_tokens=corpus_tokens
        )
    }
