"""Trees of many texts grow together: each round calls the draft once, for the next layer of all of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from edgespec.draft import Drafter
from edgespec.draft.distributions import Distributions
from edgespec.errors import EdgespecError
from edgespec.grow import Growth
from edgespec.grow.beam import Beam, GrowthTogether, grow_beams
from edgespec.grow.growing import DraftRequest, GrowthAlone
from edgespec.grow.merged import Merged, merged
from edgespec.tree.token_tree import TokenTree, root_only

Expansion = tuple[Drafter, Tensor, Tensor]  # tokens [k], rows of their parents [k]
# Returns q [k, vocab] of every expansion, or what went wrong with it
ExpandBatched = Callable[[Sequence[Expansion]], Sequence[Distributions | EdgespecError]]

Found: TypeAlias = dict[int, TokenTree | EdgespecError]  # by the text's number


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


@dataclass(frozen=True, slots=True)
class _Group:
    """Texts whose trees grow together, by their numbers."""

    numbers: Sequence[int]
    growing: GrowthTogether
    beams: Sequence[Beam] = ()  # of each text, where it does not grow alone


def grow_batched(
    growths: Sequence[tuple[Growth, Drafter | None]], expand: ExpandBatched
) -> list[TokenTree | EdgespecError]:
    """Return the trees of all texts, or what went wrong with one: the others grow on."""
    found: Found = {}
    drafters = [drafter for _, drafter in growths]
    drafted = [growth.drafted if isinstance(growth, Merged) else growth for growth, _ in growths]
    rounds = [(group, _send(group, {}, found)) for group in _groups(drafted, found)]
    while rounds := [(group, requests) for group, requests in rounds if requests]:
        by_number = {number: ask for _, requests in rounds for number, ask in requests.items()}
        answers = dict(
            zip(by_number, expand([_expansion(drafters[n], ask) for n, ask in by_number.items()]), strict=True)
        )
        # Answers are freed as they are used: otherwise q of two layers would be the peak.
        rounds = [
            _go_on(group, {number: answers.pop(number) for number in requests}, drafters, found)
            for group, requests in rounds
        ]
    return [_with_text(growth, found[number]) for number, (growth, _) in enumerate(growths)]


def _with_text(growth: Growth, tree: TokenTree | EdgespecError) -> TokenTree | EdgespecError:
    """Return a tree with what was looked up for it."""
    if not isinstance(growth, Merged) or isinstance(tree, EdgespecError):
        return tree
    return merged(tree, growth.looked_up, growth.num_to_take, is_chain=growth.is_chain)


def _groups(growths: Sequence[TokenTree | Beam | GrowthAlone], found: Found) -> Iterator[_Group]:
    """Yield the groups of texts that have something to grow; the trees of the others are found."""
    together: dict[object, list[tuple[int, Beam]]] = {}
    for number, growth in enumerate(growths):
        if isinstance(growth, TokenTree):
            found[number] = growth
        elif not isinstance(growth, Beam):
            yield _Group([number], _alone(growth))
        elif growth.depth == 0:
            found[number] = root_only(growth.root, draw=growth.draw, device=growth.device)
        else:
            together.setdefault(growth.group, []).append((number, growth))
    for texts in together.values():
        yield _of_beams(texts)


def _of_beams(texts: Sequence[tuple[int, Beam]]) -> _Group:
    beams = [beam for _, beam in texts]
    return _Group([number for number, _ in texts], grow_beams(beams), beams)


def _alone(growth: GrowthAlone) -> GrowthTogether:
    """Give one text's growth the form of a group's."""
    try:
        request = next(growth)
        while True:
            request = growth.send((yield {0: request}).pop(0))
    except StopIteration as end:
        return [end.value]


def _go_on(
    group: _Group, answers: dict[int, Distributions | EdgespecError], drafters: Sequence[Drafter | None], found: Found
) -> tuple[_Group, dict[int, DraftRequest]]:
    """Return the next requests of a group; where a text's draft has failed, the others begin again without it."""
    failed = {number: answer for number, answer in answers.items() if isinstance(answer, EdgespecError)}
    if not failed:
        return group, _send(group, answers, found)
    found |= failed
    left = [text for text in zip(group.numbers, group.beams, strict=False) if text[0] not in failed]
    if not left:
        return group, {}
    for number, _ in left:
        drafter = drafters[number]
        assert drafter is not None
        drafter.rewind()
    group = _of_beams(left)
    return group, _send(group, {}, found)


def _send(group: _Group, answers: dict[int, Any], found: Found) -> dict[int, DraftRequest]:
    """Return the requests of a group, at first or after answers; none where its trees, or an error, were found."""
    try:
        if answers:
            asks = group.growing.send({group.numbers.index(number): answers.pop(number) for number in list(answers)})
        else:
            asks = next(group.growing)
    except StopIteration as end:
        found |= zip(group.numbers, end.value, strict=True)
        return {}
    except EdgespecError as error:
        found |= dict.fromkeys(group.numbers, error)
        return {}
    return {group.numbers[text]: ask for text, ask in asks.items()}


def _expansion(drafter: Drafter | None, request: DraftRequest) -> Expansion:
    assert drafter is not None
    return drafter, *request
