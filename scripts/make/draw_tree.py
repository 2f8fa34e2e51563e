"""Draw the picture of README: one pass of the built-in pair, its tree of guesses and the path that the target takes.

    python -m scripts.make.draw_tree docs/tree.svg

Grows a real tree behind a prompt, reads it in one pass of the target, and draws the nodes that were accepted dark.
"""

import argparse
import html
from dataclasses import dataclass
from pathlib import Path

import torch

from edgespec import Engine, SamplingSettings, TreeSettings
from edgespec.decode.accept import tokens_at
from edgespec.draft.feature_head import open_drafter
from edgespec.grow.batched import grown
from edgespec.grow.policies import make_grow, open_policy
from edgespec.grow.text_draws import TextDraws
from edgespec.model.target import Target
from edgespec.sampling.noise import TextNoise
from edgespec.tree.token_tree import TokenTree, depths
from edgespec.verify import accept_alone
from edgespec.verify.rows import TargetRows
from edgespec.verify.rules import verifier

PROMPT = "def read_lines(path):\n    with open(path"
NODES, DEPTH = 14, 6
ROW, COLUMN, HEIGHT, MARGIN = 34, 118, 22, 16
CHARACTER = 7.3  # a monospaced character's width at this size
STYLE = """
  text { font: 12px ui-monospace, Menlo, Consolas, monospace; fill: #57606a; text-anchor: middle }
  text.taken { fill: #ffffff } text.note { font: 13px system-ui, sans-serif; text-anchor: start }
  rect.page { fill: #ffffff } rect.guess { fill: #f6f8fa; stroke: #afb8c1 }
  rect.taken { fill: #0b6e4f; stroke: #0b6e4f }
  rect.given { fill: #24292f; stroke: #24292f } rect.own { fill: #1f5fa8; stroke: #1f5fa8 }
  path { stroke: #afb8c1; fill: none } path.taken { stroke: #0b6e4f; stroke-width: 2.5 }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A token in the picture."""

    text: str
    parent: int | None
    column: int
    row: float
    kind: str  # given, guess, taken or own


def one_pass(seed: int) -> tuple[list[Box], int]:
    """Return the boxes of a pass's tree, the target's own token behind them, and how many tokens the pass yielded."""
    sampling = SamplingSettings(temperature=0)
    tree_settings = TreeSettings(policy="opt-tree", size=NODES, depth=DEPTH)
    with Engine.from_pretrained() as engine:
        generator = torch.Generator().manual_seed(seed)
        assert engine.draft_model is not None
        ids, target = engine.encode(PROMPT), Target(engine.target_model)
        drafter = open_drafter(engine.draft_model, target, sampling=tree_settings.draft_sampling(sampling))
        root = int(target.prefill(torch.tensor(ids)).argmax())
        drafter.begin(ids)
        noise = TextNoise(seed=seed, key=0, vocab=target.vocab, device=engine.device)
        draws = TextDraws(sampling=sampling, device=engine.device, generator=generator, noise=noise)
        grow = make_grow(open_policy(tree_settings), drafter, draws)
        tree = grown(grow(root, DEPTH), drafter)
        rows = TargetRows(target.look(tree), target.logits, sampling, vocab=target.vocab)
        found = accept_alone(verifier(sampling, "coupled", noise)(tree, rows, generator))
        words = [engine.pair.tokenizer.decode([token]) for token in tree.tokens.tolist()]
        own = engine.pair.tokenizer.decode([found.next_token])
        return _placed(tree, words, found.path, own), len(tokens_at(tree, found.path)) + 1


def _placed(tree: TokenTree, words: list[str], path: tuple[int, ...], own: str) -> list[Box]:
    """Give each leaf a row of its own, from the top, and each parent the mean of its children's."""
    parents, layers = tree.parents.tolist(), depths(tree.parents).tolist()
    children = [[node for node, parent in enumerate(parents) if parent == one] for one in range(len(parents))]
    rows = [0.0] * len(parents)
    leaves = 0

    def place(node: int) -> float:
        nonlocal leaves
        if not children[node]:
            rows[node] = leaves
            leaves += 1
        else:
            below = [place(child) for child in children[node]]
            rows[node] = sum(below) / len(below)
        return rows[node]

    place(0)
    kinds = ["given" if node == 0 else "taken" if node in path else "guess" for node in range(len(parents))]
    boxes = [
        Box(text=words[node], parent=None if node == 0 else parents[node], column=layers[node], row=rows[node],
            kind=kinds[node])
        for node in range(len(parents))
    ]  # fmt: skip
    last = path[-1] if path else 0
    # Behind the path's last node, below the guesses that it has there
    row = max((rows[child] for child in children[last]), default=rows[last] - 1) + 1
    return [*boxes, Box(text=own, parent=last, column=layers[last] + 1, row=row, kind="own")]


def drawn(boxes: list[Box], num_tokens: int) -> str:
    """Return the picture as SVG."""
    width = round(MARGIN * 2 + COLUMN * (1 + max(box.column for box in boxes)))
    top = 2 * ROW
    height = round(top + ROW * (2 + max(box.row for box in boxes)))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{width}" height="{height}"/>',
    ]

    def middle(box: Box) -> tuple[float, float]:
        return MARGIN + COLUMN * (box.column + 0.5), top + ROW * (box.row + 0.5)

    for box in boxes:
        if box.parent is not None:
            (x0, y0), (x1, y1) = middle(boxes[box.parent]), middle(box)
            bend = COLUMN / 2 - 12
            kind = "taken" if box.kind in ("taken", "own") else "guess"
            curve = f"M{x0:.0f},{y0:.0f} C{x0 + bend:.0f},{y0:.0f} {x1 - bend:.0f},{y1:.0f} {x1:.0f},{y1:.0f}"
            parts.append(f'<path class="{kind}" d="{curve}"/>')
    for box in boxes:
        x, y = middle(box)
        shown = box.text.replace("\n", "⏎").replace(" ", "·")
        wide = max(28.0, CHARACTER * len(shown) + 12)
        place = f'x="{x - wide / 2:.0f}" y="{y - HEIGHT / 2:.0f}" width="{wide:.0f}" height="{HEIGHT}" rx="5"'
        taken = "guess" if box.kind == "guess" else "taken"
        parts.append(f'<rect class="{box.kind}" {place}/>')
        parts.append(f'<text class="{taken}" x="{x:.0f}" y="{y + 4:.0f}">{html.escape(shown)}</text>')
    num_guesses = sum(box.kind in ("guess", "taken") for box in boxes)
    notes = (
        f"A small model guesses {num_guesses} tokens. One pass of the large model checks all of them at once,",
        "keeps what it would have said itself (green), and adds a token of its own (blue): "
        f"{num_tokens} tokens for one pass.",
    )
    for number, note in enumerate(notes):
        parts.append(f'<text class="note" x="{MARGIN}" y="{22 + 20 * number}">{note}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    boxes, num_tokens = one_pass(arguments.seed)
    arguments.output.write_text(drawn(boxes, num_tokens), encoding="utf-8")
    print(f"{arguments.output}: {len(boxes) - 2} guesses, {num_tokens} tokens")


if __name__ == "__main__":
    main()
