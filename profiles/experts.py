"""How many experts of a mixture's layer a pass asks for, and how many of them a cache lacks. Pure arithmetic.

    x(n)        = n where rows choose independently, T (n / T)^spread where T texts' own rows are alike
    distinct(n) = E (1 - (1 - k / E)^x(n))             of E experts, k a row
    fetched(n)  = distinct(m + n) - distinct(m)        m: the rows before, whose experts fill the cache

Independent, uniform rows (spread 1) are the upper curve. Rows of a text are alike in topic and in neighbours, and
the likeness reaches far: of Qwen3-30B-A3B's choices 45 % repeat at the next token and 80 % within eight
(kekzl/imp #1359), which one share of repeated choices does not describe, but a power of the rows does (46 and 76 % at
0.65).
Production models load 2.5 tokens' experts for four (Cohere, 0.70); 384 of 512 experts in 300 tokens are 0.75
(kekzl/imp #2061). A least recently used cache holds the experts of the last rows; so the same exponent says what it
lacks. That gives 87 % hits for 40 % of Qwen3-30B-A3B's experts, where 89 to 95 % were counted (imp #1365, #1359), and
73 and 83 % at 0.7 for 64 and 128 of 512, where 67 and 81 % were (llama.cpp #27861); flatter routing is 0.9 (43, 60
and 73 % for 93, 186 and 279 of 512; counted 44, 62, 72: imp #2061). Experts that are popular with all texts are left
out: where it was looked for there was little of it (llama.cpp #27861).
"""

import math
from dataclasses import dataclass

INDEPENDENT = 1.0  # spread of rows that choose for themselves
MIN_SPREAD = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The choice of experts in a layer."""

    num_experts: int
    chosen: int  # by a row
    spread: float = INDEPENDENT  # so many rows of a text choose as rows^spread independent ones

    def distinct(self, rows: float, *, num_texts: int = 1) -> float:
        """Return the expected number of experts that so many rows ask for, `num_texts` sharing them evenly."""
        missed = math.pow(1 - self.chosen / self.num_experts, self._independent_rows(rows, num_texts))
        return self.num_experts * (1 - missed)

    def fetched(self, rows: float, *, kept: float, num_texts: int = 1) -> float:
        """Return how many of them are not among `kept` experts, those that the rows before asked for last."""
        if kept >= self.num_experts:
            return 0.0
        before = self._rows_that_ask_for(max(0.0, kept), num_texts)
        return self.distinct(before + rows, num_texts=num_texts) - self.distinct(before, num_texts=num_texts)

    def _independent_rows(self, rows: float, num_texts: int) -> float:
        return rows if rows <= num_texts else num_texts * math.pow(rows / num_texts, self.spread)

    def _rows_that_ask_for(self, experts: float, num_texts: int) -> float:
        if self.chosen >= self.num_experts:
            return 0.0
        alone = math.log(1 - experts / self.num_experts) / math.log(1 - self.chosen / self.num_experts)
        return alone if alone <= num_texts else num_texts * math.pow(alone / num_texts, 1 / self.spread)
