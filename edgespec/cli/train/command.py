"""`edgespec train`: drafts are trained on a pair's own hidden states and verification records."""

import click

from edgespec.cli.config.groups import ConfiguredGroup
from edgespec.cli.train.growth import WHATS, growth_command


@click.group(
    name="train",
    short_help="Train drafts (heads, routers), and what trees grow by.",
    cls=ConfiguredGroup,
    modules={"head": "edgespec.cli.train.head", "router": "edgespec.cli.train.router"},
    epilog="""\b
Examples:
  edgespec train head -m TARGET --data texts/ --method coral -o HEAD
  edgespec generate prompts.jsonl -m TARGET -md HEAD
  edgespec train acceptance --prompts prompts.jsonl -o acceptance.json
  edgespec train classifier -m TARGET -md DRAFT --prompts prompts.jsonl -o classifier.json
  edgespec generate prompts.jsonl --policy c2t --classifier classifier.json
""",
)
def command() -> None:
    """Train what drafts: heads and their routers, and the small models of growth."""


for _what in WHATS:
    command.add_command(growth_command(_what))
