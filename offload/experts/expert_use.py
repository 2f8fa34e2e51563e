"""The use of experts, measured on earlier texts, says which are worth a place in memory."""

from collections.abc import Sequence

ExpertUse = tuple[tuple[float, ...], ...]  # [layers that have experts][experts]: the share of passes that requested it


def most_used(num_experts: Sequence[int], use: ExpertUse | None, count: int) -> list[list[int]]:
    """Return, for each layer of `num_experts`, those that are among the `count` most used of all layers.

    Where nothing was measured they are the first ones. Experts that are used alike come in the order of layers.
    """
    places = [(layer, expert) for layer, number in enumerate(num_experts) for expert in range(number)]
    if use is not None:
        places.sort(key=lambda place: -use[place[0]][place[1]])
    chosen: list[list[int]] = [[] for _ in num_experts]
    for layer, expert in sorted(places[:count]):
        chosen[layer].append(expert)
    return chosen
