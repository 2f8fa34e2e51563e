"""The guard over whole texts, at a place where the draft is surer than float32 can tell, and the target is not."""

import zipapp
from pathlib import Path

from edgespec import Engine, SamplingSettings, TreeSettings
from edgespec.tree.policies import POLICIES
from scripts.papers.rare_tokens import chances, sampled_trees

FLOOR = 1e-12
SAMPLING = SamplingSettings(temperature=0.2)
# The draft says "shell" with all but 1e-7; the target leaves 0.1 to "sheb", as it stands there.
PLACE = '"""Write a s'


def least_chance(*, num_texts: int) -> float:
    """The smallest p of a token in so many short texts behind the place."""
    source = Path(zipapp.__file__).read_text(encoding="utf-8")
    tree = TreeSettings(policy="specinfer", branching=(8, 4, 1))
    with Engine.from_pretrained(tree=tree, profile="none", dtype="float32", self_check=False) as engine:
        ids = engine.encode(source[: source.index(PLACE) + len(PLACE)])
        texts = {
            engine.generate(ids, max_new_tokens=4, sampling=SAMPLING, seed=seed, reuse=True).token_ids
            for seed in range(num_texts)
        }
        return min(min(chances(engine, ids, text, SAMPLING)) for text in texts)


def test_every_sampled_policy_is_looked_at(tmp_path: Path) -> None:
    sampled = {policy.name for policy in POLICIES.values() if "sampled" in policy.draws} - {"none"}
    assert {tree.policy for tree in sampled_trees(tmp_path).values()} == sampled


def test_no_token_comes_out_that_the_target_could_not_have_drawn() -> None:
    assert least_chance(num_texts=60) > FLOOR
