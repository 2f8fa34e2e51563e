"""Train a small pair with recurrent layers: three of the gated delta rule to one of attention, as Qwen3.5 has them.

    python -m scripts.make.hybrid hybrid --minutes 8

Both models learn the built-in target's distribution over the text that it was trained on, the standard library of the
running interpreter, with its tokenizer. The target begins with the built-in target's embedding and feed-forward
blocks, so that only its mixers have to be learnt; the draft learns from the hybrid target. `inflate` makes
the target large, `scripts.bench.hybrid` runs both.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedModel, Qwen3_5TextConfig

from edgespec.pair.pair import DEMO_FOLDER
from scripts.make.demo_pair import (
    CONTEXT_TOKENS,
    SEED,
    VOCABULARY_SIZE,
    Stage,
    compiled,
    distillation_loss,
    encode,
    held_out_loss,
    is_held_out,
    mean_acceptance,
    save_pair_member,
    standard_library_sources,
    train,
)

QUICK_TOKENS = 20_000  # held out, for the report
TARGET_SHAPE = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4,
                "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
                "linear_key_head_dim": 64, "linear_value_head_dim": 64}  # fmt: skip
DRAFT_SHAPE = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 4,
               "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
               "linear_key_head_dim": 32, "linear_value_head_dim": 32, "full_attention_interval": 2}  # fmt: skip
TARGET_STAGE = Stage(name="target", share=0.75, matrix_lr=4e-3, vector_lr=3e-3, dropout=0.0, tokens_per_step=2048,
                     warmup_steps=20)  # fmt: skip
DRAFT_STAGE = Stage(name="draft", share=0.25, matrix_lr=6e-3, vector_lr=5e-3, dropout=0.0, tokens_per_step=2048,
                    warmup_steps=20)  # fmt: skip


def build_hybrid(shape: dict[str, int], end_of_text_id: int) -> PreTrainedModel:
    """A fresh Qwen3.5 with tied embeddings, in float32."""
    torch.manual_seed(SEED)
    config = Qwen3_5TextConfig(
        vocab_size=VOCABULARY_SIZE,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        eos_token_id=end_of_text_id,
        pad_token_id=end_of_text_id,
        **shape,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")


@torch.no_grad()
def take_over(hybrid: PreTrainedModel, teacher: LlamaForCausalLM) -> None:
    """Begin with the teacher's embedding, norms and feed-forward blocks."""
    theirs = teacher.state_dict()
    for name, parameter in hybrid.named_parameters():
        if "mlp" in name or "embed_tokens" in name:
            parameter.copy_(theirs[name])
        elif name.endswith("layernorm.weight") or name == "model.norm.weight":
            parameter.copy_(theirs[name] - 1)  # Qwen3.5 stores what is added to one


def main() -> None:
    """Train both, and say how much they agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a folder for target/ and draft/, and for checkpoints to resume from")
    parser.add_argument("--minutes", type=float, default=8.0, help="processor time for both models together [8]")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.out.mkdir(parents=True, exist_ok=True)

    tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER / "target")
    teacher = AutoModelForCausalLM.from_pretrained(
        DEMO_FOLDER / "target", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    sources = standard_library_sources()
    train_stream = encode(tokenizer, [text for path, text in sources if not is_held_out(path)])
    held_out_stream = encode(tokenizer, [text for path, text in sources if is_held_out(path)])
    target, draft = (build_hybrid(shape, tokenizer.eos_token_id) for shape in (TARGET_SHAPE, DRAFT_SHAPE))
    take_over(target, teacher)
    logits = {name: compiled(model, False) for name, model in
              {"teacher": teacher, "target": target, "draft": draft}.items()}  # fmt: skip
    for stage, learner, model, of in (
        (TARGET_STAGE, "target", target, "teacher"),
        (DRAFT_STAGE, "draft", draft, "target"),
    ):
        train(model, stage, loss_of=distillation_loss(logits[of], logits[learner]), train_stream=train_stream,
              held_out_stream=held_out_stream, minutes=arguments.minutes * stage.share,
              checkpoint=arguments.out / f"{learner}.pt", device=torch.device("cpu"),
              clock=time.process_time)  # fmt: skip
        model.eval().requires_grad_(False)
        save_pair_member(model, tokenizer, arguments.out / learner)
        model.float()
    quick = held_out_stream[:QUICK_TOKENS]
    print(json.dumps({
        "target_parameters": target.num_parameters(),
        "draft_parameters": draft.num_parameters(),
        "built_in_nats_per_token": round(held_out_loss(teacher, quick, quick.device), 3),
        "target_nats_per_token": round(held_out_loss(target, quick, quick.device), 3),
        "draft_nats_per_token": round(held_out_loss(draft, quick, quick.device), 3),
        "mean_acceptance": round(mean_acceptance(target, draft, quick, quick.device), 3),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
