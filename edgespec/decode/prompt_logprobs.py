"""Log-probabilities of a prompt's own tokens, from the rows of the pass that reads it: h hidden size."""

from torch import Tensor

from edgespec.decode.sequence import Sequence
from edgespec.model.row_chunks import row_chunks
from edgespec.sampling.logprobs import ROWS_AT_ONCE, TokenLogprob, token_logprobs
from edgespec.verify.rows import refuse_nan


def take_prompt_rows(sequence: Sequence, hidden: Tensor, count: int) -> None:
    """Commit the next `count` rows of a prompt, whose last hidden states are [count, h].

    Each says how likely the token after it is. Logits are made in chunks: those of all rows would not fit.
    """
    target, alternatives = sequence.target, sequence.settings.num_prompt_logprobs
    if alternatives is not None and sequence.settings.num_written == 0:
        first = len(sequence.prompt) - target.num_unread
        following = sequence.prompt[first + 1 : first + count + 1]  # the prompt's last token is followed by none
        found: list[TokenLogprob] = []
        for rows in row_chunks(len(following), target.vocab):
            logits = target.logits(hidden[rows])
            refuse_nan(logits.amax(-1))
            for part, tokens in zip(logits.split(ROWS_AT_ONCE), _split(following[rows], ROWS_AT_ONCE), strict=True):
                found += token_logprobs(part, tokens, alternatives)
        sequence.prompt_logprobs += tuple(found)
    target.took_in(count)


def _split(tokens: list[int], size: int) -> list[list[int]]:
    return [tokens[start : start + size] for start in range(0, len(tokens), size)]
