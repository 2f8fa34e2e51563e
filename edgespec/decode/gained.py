"""What a step brought a text: by its tree, or by its prompt."""

import time
from collections import Counter

from edgespec.decode.accept import AcceptedTree
from edgespec.decode.sequence import Sequence
from edgespec.tree.token_tree import depths_on_host
from edgespec.tuning.step import PassCost, StepResult
from edgespec.verify.rows import refuse_nan


def step_result(accepted: AcceptedTree, cost: PassCost) -> StepResult:
    """Return what a text gained by its tree, in a step of this cost."""
    sequence, tree, path = accepted
    read_s, sequence.draft_read_s = sequence.draft_read_s, 0.0
    counts = Counter(depths_on_host(tree.parents.tolist()))  # on the host, after verification has waited
    return StepResult(
        tokens=path.tokens,
        from_draft=path.from_draft,
        from_lookup=path.from_lookup,
        logprobs=path.logprobs,
        finish=sequence.finish,
        num_drafted=tree.num_nodes - 1,
        num_by_depth=tuple(counts[depth] for depth in range(1, len(counts))),
        path=path.path,
        is_prefill=False,
        num_texts=cost.num_texts,
        grow_s=cost.grow_s + read_s,
        target_s=cost.target_s,
        rest_s=cost.rest_s,
        decide_s=cost.decide_s,
        num_read_again=path.num_read_again,
        turned=path.turned,
    )


def first_step(sequence: Sequence, started: float) -> StepResult:
    """Return what a text gains by its prompt, which is read, and was begun to be at a time."""
    read = time.perf_counter()
    logits = sequence.target.logits(sequence.target.prompt_end)[0]
    refuse_nan(logits.amax())
    tokens: tuple[int, ...] = ()
    if sequence.num_left:
        tokens = sequence.begin_tokens(logits)
    else:
        sequence.finish = "length"
    return StepResult(
        tokens=tokens,
        logprobs=sequence.logprobs(logits[None], tokens) if tokens else (),
        prompt_logprobs=sequence.prompt_logprobs,
        finish=sequence.finish,
        num_cached=sequence.target.num_kept,
        num_drafted=0,
        is_prefill=True,
        grow_s=0.0,
        target_s=read - started,
        rest_s=time.perf_counter() - read,
    )
