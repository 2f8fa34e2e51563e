"""Do rows of trees have the bits of plain decoding, in bf16 on a CPU? Recurrent and indexed families, tiny and random.

    python -m scripts.check.row_bits                     all of them: minutes
    python -m scripts.check.row_bits mamba2 jamba        a few types

Texts of given tokens are read plainly, a row a pass; then by trees that have them among their paths, by chains, and by
trees of three texts that share passes; a turn goes on from what each kept. Prints, for each type, the rows whose last
hidden states have the same bits, and exits 1 where some have not. Types that follow no trees are named.
"""

import argparse
from collections.abc import Generator, Mapping
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from edgespec.model.mechanisms.known import mechanisms_of
from edgespec.model.supported import no_tree_reason
from offload.experts.expert_group import ExpertWeight
from offload.experts.expert_source import HandedExpert
from offload.experts.mixture import mix
from scripts.situations import exit_with
from tests.support.row_bits import compared, let_states_last
from tests.support.tiny_configs import TYPES, VOCAB, is_image_text, tiny_config

DTYPE = torch.bfloat16
EXPERT_NAMES = ("gate_up_proj", "up_proj", "down_proj")


def model_of(model_type: str) -> PreTrainedModel:
    """Return a random model of the type, whose states last for some tokens."""
    torch.manual_seed(0)
    family = AutoModelForImageTextToText if is_image_text(model_type) else AutoModelForCausalLM
    model = family.from_config(tiny_config(model_type), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    let_states_last(model)
    return model.to(DTYPE).requires_grad_(False)


def compute_experts_singly(model: PreTrainedModel) -> None:
    """Let experts compute as an engine's do on a CPU, one by one."""
    for module in model.modules():
        experts: Any = module
        names = [name for name in EXPERT_NAMES if isinstance(getattr(module, name, None), torch.nn.Parameter)]
        if "down_proj" in names and hasattr(module, "num_experts") and not getattr(module, "is_transposed", False):
            experts.forward = partial(mix, module, partial(_handed, module, names))


def _handed(experts: Any, names: list[str], rows_of: Mapping[int, int]) -> Generator[HandedExpert]:
    for number in rows_of:
        weights = {
            name: ExpertWeight(blocks=partial(iter, [getattr(experts, name)[number]]), dtype=DTYPE, is_transposed=False)
            for name in names
        }
        yield HandedExpert(number=number, weights=weights, device=torch.device("cpu"))


def line_of(model_type: str, tokens: int) -> tuple[str | None, bool]:
    """Return what is to be said of a type, None where it is not concerned; and whether some bits differ."""
    try:
        text = tiny_config(model_type).get_text_config(decoder=True)
        if all(record.is_static for record in mechanisms_of(text)):
            return None, False
        reason = no_tree_reason(text)
        if reason is not None:
            return f"plainly: {reason}", False
        model = model_of(model_type)
    except Exception as error:
        return f"no tiny model: {type(error).__name__}", False
    compute_experts_singly(model)
    found = compared(model, vocab=VOCAB - 1, tokens=tokens)
    counts = ", ".join(f"{name} {same} of {rows}" for name, (same, rows) in found.items())
    return counts, any(same < rows for same, rows in found.values())


def main() -> int:
    """Print a line for each type."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="by default all recurrent and indexed ones")
    parser.add_argument("--tokens", type=int, default=60, help="of each of three texts [60]")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    has_other = False
    for model_type in arguments.types or TYPES:
        line, differs = line_of(model_type, arguments.tokens)
        has_other |= differs
        if line is not None:
            print(f"{model_type:20} {line}", flush=True)
    return int(has_other)


if __name__ == "__main__":
    exit_with(main)
