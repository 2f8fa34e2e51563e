"""The parts of the check: their limits of time, and what each says about a card."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part, whose module has its name."""

    about: str
    limit_s: float
    full_limit_s: float | None = None  # with `--full`; None: the same
    is_for_full: bool = False  # a part that runs with `--full`, or where it is named


PARTS = {
    "machine": Part(about="the card, its driver and the versions", limit_s=60),
    "doctor": Part(about="`edgespec doctor --json` finds the machine fit", limit_s=120),
    "locked": Part(about="the four staging buffers can be locked, and how much more", limit_s=60),
    "attention": Part(about="attention in two parts is that of one kernel", limit_s=60),
    "long": Part(about="models in 16 bits read behind 3,000 tokens what they read at once", limit_s=120),
    "small": Part(about="the host waits for no small copy", limit_s=60),
    "packed": Part(about="rows times packed nf4, int4 and GGUF weights are those times unpacked ones", limit_s=150),
    "unpacked": Part(about="Triton unpacks FP4, even steps and GGML's blocks as torch does, bit for bit", limit_s=180),
    "experts": Part(about="experts of real sizes that come on demand give what resident ones give", limit_s=150),
    "graphs": Part(about="recorded passes with padded rows are plain ones", limit_s=120),
    "greedy": Part(about="greedy texts through trees are transformers'", limit_s=120),
    "sampled": Part(about="sampled trees draw tokens as often as the processor's probabilities say", limit_s=120),
    "together": Part(about="texts that share passes are those alone", limit_s=180),
    "waiting": Part(about="texts whose keys and values wait in RAM are those of a card that keeps them", limit_s=180),
    "vocabulary": Part(about="with 128,256 tokens, texts through trees are plain decoding's", limit_s=180),
    "generate": Part(about="`edgespec generate` writes the texts of plain decoding", limit_s=180),
    "step": Part(about="a step takes at most twice the slowest of its estimates", limit_s=180),
    "tests": Part(about="the tests marked gpu pass", limit_s=180, is_for_full=True),
    "slow": Part(about="slow copies and slow arithmetic change nothing", limit_s=120, is_for_full=True),
    "streaming": Part(about="streamed passes are resident ones, within the plan", limit_s=180, full_limit_s=1800),
}
