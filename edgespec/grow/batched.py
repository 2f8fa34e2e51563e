"""Trees of many texts grow together: each round asks the draft once, for the next layer of all of them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from edgespec.draft import Drafter
from edgespec.draft.distributions import Distributions
from edgespec.errors import EdgespecError
from edgespec.grow import Growth
from edgespec.grow.beam import Beam, grow_beams
from edgespec.grow.growing import Asked
from edgespec.tree.token_tree import TokenTree, root_only

Expansion = tuple[Drafter, Tensor, Tensor]  # tokens [k], rows of their parents [k]
# Returns q [k, vocab] of every expansion, or what went wrong with it
ExpandBatched = Callable[[Sequence[Expansion]], Sequence[Distributions | EdgespecError]]

Found: TypeAlias = dict[int, TokenTree | EdgespecError]  # by the text's number
# A text, or texts in company: they ask for expansions of some, and put what comes of each among what was found
Growing: TypeAlias = Generator[dict[int, Asked], dict[int, Distributions | EdgespecError], None]


@dataclass(frozen=True, slots=True)
class Grow:
    """A policy at work on one text."""

    steps: Callable[[int, int], Growth]  # root, most layers
    drafter: Drafter | None  # None: trees are roots only

    def growth(self, root: int, max_depth: int) -> Growth:
        """Return the growth of the tree below a root token, of at most so many layers."""
        return self.steps(root, max_depth)

    def __call__(self, root: int, max_depth: int) -> TokenTree:
        """Return the tree, grown alone."""
        return grown(self.growth(root, max_depth), self.drafter)


def grow_beam(beam: Beam) -> Growth:
    """Grow a beam's tree, with those of other texts."""
    if beam.depth == 0:
        return root_only(beam.root, draw=beam.draw, device=beam.device)
    tree = yield beam
    assert isinstance(tree, TokenTree)
    return tree


def grown(growth: Growth, drafter: Drafter | None) -> TokenTree:
    """Return one tree, grown alone; raises EdgespecError."""
    (tree,) = grow_batched([(growth, drafter)], one_by_one)
    if isinstance(tree, EdgespecError):
        raise tree
    return tree


def one_by_one(expansions: Sequence[Expansion]) -> list[Distributions | EdgespecError]:
    """Expand each by itself, for drafters that have nothing in common."""
    found: list[Distributions | EdgespecError] = []
    for drafter, tokens, parent_rows in expansions:
        try:
            found.append(drafter.expand(tokens, parent_rows))
        except EdgespecError as error:
            found.append(error)
    return found


def grow_batched(
    growths: Sequence[tuple[Growth, Drafter | None]], expand: ExpandBatched
) -> list[TokenTree | EdgespecError]:
    """Return the trees of all texts, or what went wrong with one: the others grow on."""
    found: Found = {}
    groups: dict[object, dict[int, Beam]] = {}
    growing: list[Growing] = []
    for number, (growth, _) in enumerate(growths):
        asked = _next(growth, None, number, found)
        if isinstance(asked, Beam):
            groups.setdefault(asked.group, {})[number] = asked
        elif asked is not None:
            growing.append(_alone(growth, asked, number, found))
    growing += [_grouped(beams, growths, found) for beams in groups.values()]
    asking = [(one, next(one, {})) for one in growing]
    while asking := [(one, asked) for one, asked in asking if asked]:
        expansions = {
            number: _expansion(growths[number][1], ask) for _, asked in asking for number, ask in asked.items()
        }
        answers = dict(zip(expansions, expand(list(expansions.values())), strict=True))
        # What was answered is let go as it is taken: q of two layers would be the peak.
        asking = [(one, _send(one, {number: answers.pop(number) for number in asked})) for one, asked in asking]
    return [found[number] for number in range(len(growths))]


def _expansion(drafter: Drafter | None, asked: Asked) -> Expansion:
    assert drafter is not None
    return drafter, *asked


def _send(growing: Growing, answers: dict[int, Distributions | EdgespecError]) -> dict[int, Asked]:
    """Return what is asked for next; nothing where growth has ended."""
    try:
        return growing.send(answers)
    except StopIteration:
        return {}


def _next(
    growth: Growth, answer: Distributions | TokenTree | EdgespecError | None, number: int, found: Found
) -> Asked | Beam | None:
    """Return what a text's growth asks for, at first or after an answer; None where what came of it was found."""
    if isinstance(answer, EdgespecError):
        growth.close()
        found[number] = answer
        return None
    try:
        return next(growth) if answer is None else growth.send(answer)
    except StopIteration as end:
        found[number] = end.value
    except EdgespecError as error:
        found[number] = error
    return None


def _alone(growth: Growth, asked: Asked | Beam | None, number: int, found: Found) -> Growing:
    while asked is not None:
        assert not isinstance(asked, Beam)
        asked = _next(growth, (yield {number: asked}).pop(number), number, found)


def _grouped(beams: dict[int, Beam], growths: Sequence[tuple[Growth, Drafter | None]], found: Found) -> Growing:
    """Grow beams; where one text's draft fails, the others begin anew without it."""
    while beams:
        ends: dict[int, TokenTree | EdgespecError] = {}
        yield from _ends_of(beams, ends)
        for number, end in ends.items():
            _next(growths[number][0], end, number, found)
            del beams[number]
        for number in beams:
            drafter = growths[number][1]
            assert drafter is not None
            drafter.rewind()


def _ends_of(beams: dict[int, Beam], ends: Found) -> Growing:
    """Put the trees of all beams among the `ends`, or, as soon as some drafts fail, what went wrong with these."""
    numbers, growing = list(beams), grow_beams(list(beams.values()))
    asked = next(growing)
    while True:
        answers = yield {numbers[text]: ask for text, ask in asked.items()}
        ends |= {number: answer for number, answer in answers.items() if isinstance(answer, EdgespecError)}
        if ends:
            return
        try:
            asked = growing.send({text: _q_in(answers, numbers[text]) for text in asked})
        except StopIteration as end:
            ends |= zip(numbers, end.value, strict=True)
            return


def _q_in(answers: dict[int, Distributions | EdgespecError], number: int) -> Distributions:
    answer = answers.pop(number)
    assert not isinstance(answer, EdgespecError)
    return answer
