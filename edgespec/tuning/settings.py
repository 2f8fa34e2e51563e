"""The settings of tuning: how readily trees change, and what share of the time may be spent on probes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningSettings:
    """How trees are chosen, and when probes are due."""

    min_change: float = 1.02  # times as fast, for a change between trees and none
    min_size_change: float = 1.01  # times as fast, for another size
    notches: int = 2  # sizes in a move: twice the nodes, or half of them
    first_trees: int = 3  # before trees are given up, unless they are hopeless
    hopeless: float = 0.5  # of the speed in use: a probe that is slower ends with its first step
    probe_share: float = 0.015  # of the time, for probes
    least_share: float = 0.005  # for those after many that have changed nothing
    full_probes: int = 4  # with the whole share; after twice as many it is half of it
    first_share: float = 0.2  # for the first probes, because what they may correct was decided by few steps
    first_probes: int = 2
    min_wait: int = 9  # steps between two probes
    max_first_wait: int = 16  # steps before each of the first probes
    max_wait: int = 1024  # steps before any other probe
