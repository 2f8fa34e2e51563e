"""Draws of tokens from a distribution, with a generator's fresh randomness."""

import torch
from torch import Tensor

SMALLEST_UNIFORM = 2.0**-54  # half a step of torch.rand in float64: no logarithm of 0


def draw_one(probs: Tensor, generator: torch.Generator) -> int:
    """Draw one token from probabilities [vocab], which need not be normalised."""
    # In float64, because the smallest noise wins: CUDA's has no steps below 6e-8 in float32, and would miss long tails.
    # The item() is the step's result: nothing can go on before the host knows the token.
    return int(torch.multinomial(probs.double(), 1, generator=generator).item())


def draw_without_replacement(q: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw `count` distinct tokens a row, in the order of a sequential draw from q [k, vocab].

    The tokens with the largest q/E, E exponential noise, come in the order in which sequential
    draws with renormalisation would find them (the Gumbel top-k identity). Returns tokens
    [k, count] and their q [k, count]; where a row has fewer tokens of positive probability, the
    last ones have q 0 and are no draws.
    """
    # In float64, because the smallest noise wins: float32 has none below 6e-8, and tokens of less
    # probability than that would never be drawn although they are verified as if they could be. The
    # quotient too: in float32 the smallest q would lose their digits, and equal quotients go to the first.
    noise = torch.rand(q.shape, dtype=torch.float64, device=q.device, generator=generator)
    noise = noise.clamp_(min=SMALLEST_UNIFORM).log_().neg_()
    tokens = torch.div(q, noise, out=noise).topk(min(count, q.shape[-1]), -1).indices
    return tokens, q.gather(-1, tokens)
