"""`edgespec completion`: the script by which a shell completes commands and options."""

import click

from edgespec.cli.standard_streams import result_stream

SHELLS = ("bash", "zsh", "fish")


@click.command(
    name="completion",
    short_help="Print the script by which a shell completes commands.",
    epilog="""\b
Examples:
  eval "$(edgespec completion bash)"       in ~/.bashrc (bash 4.4 or newer)
  eval "$(edgespec completion zsh)"        in ~/.zshrc
  edgespec completion fish | source        in ~/.config/fish/config.fish
""",
)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def command(context: click.Context, *, shell: str) -> int:
    """Print the script by which SHELL completes edgespec's commands and options with Tab."""
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    complete = found(context.find_root().command, {}, "edgespec", "_EDGESPEC_COMPLETE")
    # Not source(): bash's looks for a bash first, which is running already.
    result_stream().write(found.source_template % complete.source_vars())
    return 0
