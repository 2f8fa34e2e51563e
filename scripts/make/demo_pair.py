"""Train the built-in pair from the standard library sources of the running interpreter.

Four stages, each kept in the work folder so that an interrupted run resumes: a byte-level BPE
tokenizer, a Llama target trained on next-token cross-entropy, a Llama draft distilled from it
(KL divergence to the target's whole distribution), and an evaluation on held-out files. The
learning rates follow the share of --minutes that is used up: warm-up, constant, then a linear
decay to zero over the last third. The second half trains on longer windows.

    python -m scripts.make.demo_pair --device cpu --minutes 120 --work demo-training --out edgespec/demo
"""

import argparse
import hashlib
import json
import math
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
EXCLUDED_FOLDERS = {"test", "tests", "idlelib", "idle_test", "site-packages", "__pycache__"}
GENERATED_MARK = "gencodec.py"  # code-page tables: a megabyte of generated hex, not Python to learn
VOCABULARY_SIZE = 2048
CONTEXT_TOKENS = 4096
EVALUATION_WINDOW_TOKENS = 512
SEED = 20
DECAY_SHARE = 0.33  # of the time, with a falling learning rate
SHORT_WINDOW_TOKENS = 256
LONG_WINDOW_SHARE = 0.5  # of the time, on windows as long as the evaluation's
CHECKPOINT_EVERY_S = 120.0
EVALUATE_EVERY_S = 600.0
QUICK_EVALUATION_TOKENS = 40_000
TARGET_SHAPE = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 4,
                    "num_key_value_heads": 2, "head_dim": 64}  # fmt: skip
DRAFT_SHAPE = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2, "num_attention_heads": 4,
                   "num_key_value_heads": 2, "head_dim": 32}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """How one model is trained."""

    name: str
    share: float  # of --minutes
    matrix_lr: float  # Muon, scaled to AdamW's update size
    vector_lr: float  # AdamW: embeddings and norms
    dropout: float
    tokens_per_step: int
    warmup_steps: int = 150


TARGET_STAGE = Stage(name="target", share=0.84, matrix_lr=4e-3, vector_lr=3e-3, dropout=0.2, tokens_per_step=8192)
DRAFT_STAGE = Stage(name="draft", share=0.16, matrix_lr=6e-3, vector_lr=5e-3, dropout=0.0, tokens_per_step=8192)


# ---- data ------------------------------------------------------------------------------------


def standard_library_sources() -> list[tuple[str, str]]:
    """Relative path and text of every module to learn from, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if EXCLUDED_FOLDERS.intersection(relative.parts[:-1]):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if text.strip() and GENERATED_MARK not in text[:400]:
            sources.append((relative.as_posix(), text))
    return sources


def is_held_out(relative_path: str) -> bool:
    """One file in twenty, by a hash of its path, is never trained on."""
    return int(hashlib.sha256(relative_path.encode()).hexdigest(), 16) % 20 == 0


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE: every string can be encoded, and decodes to itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
    """All texts as one stream, an end-of-text token after each: [tokens]."""
    ids: list[int] = []
    for text in texts:
        ids += tokenizer.encode(text, add_special_tokens=False)
        ids.append(tokenizer.eos_token_id)
    return torch.tensor(ids)


def sample_windows(stream: Tensor, *, windows: int, length: int, generator: torch.Generator) -> Tensor:
    """Random windows of the stream: [windows, length + 1]."""
    starts = torch.randint(stream.numel() - length, (windows, 1), generator=generator)
    return stream[starts + torch.arange(length + 1)]


# ---- models ----------------------------------------------------------------------------------


def build_model(shape: dict[str, int], end_of_text_id: int) -> LlamaForCausalLM:
    """A fresh Llama with tied embeddings, in float32."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end_of_text_id,
        pad_token_id=end_of_text_id,
        attn_implementation="eager",  # on a CPU, twice as fast to train as sdpa at these sizes
        **shape,
    )
    return LlamaForCausalLM(config)


def add_dropout(model: LlamaForCausalLM, probability: float) -> None:
    """Residual dropout, which transformers' Llama lacks; inactive in eval mode."""

    def drop(module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        return functional.dropout(output, probability, module.training)

    if probability:
        for layer in model.model.layers:
            layer.self_attn.o_proj.register_forward_hook(drop)
            layer.mlp.down_proj.register_forward_hook(drop)


def build_optimizers(model: nn.Module, stage: Stage) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    vectors = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(matrices, lr=stage.matrix_lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(vectors, lr=stage.vector_lr, betas=(0.9, 0.95), weight_decay=0.01),
    ]


def learning_rate_factor(stage: Stage, step: int, progress: float) -> float:
    """Warm-up by steps, then constant, then linear to zero over the last DECAY_SHARE of the time."""
    return min(1.0, (step + 1) / stage.warmup_steps, max(0.0, 1.0 - progress) / DECAY_SHARE)


def train(
    model: PreTrainedModel,
    stage: Stage,
    *,
    loss_of: Callable[[Tensor], Tensor],
    train_stream: Tensor,
    held_out_stream: Tensor,
    minutes: float,
    checkpoint: Path,
    device: torch.device,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Train `model` in place until its minutes by `clock` are used up; resumes from `checkpoint`."""
    optimizers = build_optimizers(model, stage)
    step, spent_s = 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step, spent_s = state["step"], state["spent_s"]
        print(f"{stage.name}: resumed at step {step}, {spent_s / 60:.1f} of {minutes:.1f} minutes spent", flush=True)
    base_lrs = [stage.matrix_lr, stage.vector_lr]

    def save() -> None:
        partial = checkpoint.with_suffix(".partial")
        torch.save(
            {
                "model": model.state_dict(),
                "optimizers": [o.state_dict() for o in optimizers],
                "step": step,
                "spent_s": spent_s,
            },
            partial,
        )
        partial.replace(checkpoint)

    model.train()
    last = saved_at = reported_at = evaluated_at = clock()
    running_loss = math.nan
    while spent_s < minutes * 60:
        progress = spent_s / (minutes * 60)
        length = SHORT_WINDOW_TOKENS if progress < 1 - LONG_WINDOW_SHARE else EVALUATION_WINDOW_TOKENS
        generator = torch.Generator().manual_seed(SEED * 1_000_003 + step)  # resuming sees the same windows
        windows = sample_windows(
            train_stream, windows=stage.tokens_per_step // length, length=length, generator=generator
        ).to(device)
        factor = learning_rate_factor(stage, step, progress)
        for optimizer, base_lr in zip(optimizers, base_lrs, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = base_lr * factor
        loss = loss_of(windows)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        value = loss.item()
        if math.isnan(value):
            raise SystemExit(f"{stage.name}: loss is NaN at step {step}; the last good state is {checkpoint}")
        running_loss = value if math.isnan(running_loss) else 0.98 * running_loss + 0.02 * value
        step += 1
        now = clock()
        spent_s, last = spent_s + now - last, now
        if now - reported_at > 60:
            reported_at = now
            print(
                f"{stage.name}: step {step}, {spent_s / 60:.1f} of {minutes:.1f} min, lr x{factor:.2f}, "
                f"train loss {running_loss:.3f}",
                flush=True,
            )
        if now - saved_at > CHECKPOINT_EVERY_S:
            saved_at = now
            save()
        if now - evaluated_at > EVALUATE_EVERY_S:
            evaluated_at = now
            loss_now = held_out_loss(model, held_out_stream[:QUICK_EVALUATION_TOKENS], device)
            print(f"{stage.name}: step {step}, quick held-out loss {loss_now:.3f}", flush=True)
    save()


# ---- evaluation ------------------------------------------------------------------------------


def evaluation_windows(stream: Tensor, device: torch.device, batch: int = 8) -> Iterator[Tensor]:
    """Non-overlapping windows of the stream: [batch, EVALUATION_WINDOW_TOKENS + 1]."""
    windows = stream.unfold(0, EVALUATION_WINDOW_TOKENS + 1, EVALUATION_WINDOW_TOKENS)
    for start in range(0, len(windows), batch):
        yield windows[start : start + batch].to(device)


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, stream: Tensor, device: torch.device) -> float:
    """Mean nats per token, each window read from its start."""
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    for windows in evaluation_windows(stream, device):
        logits = model(input_ids=windows[:, :-1], use_cache=False).logits.float()
        total += float(functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="sum"))
        count += windows[:, 1:].numel()
    model.train(was_training)
    return total / count


@torch.no_grad()
def mean_acceptance(target: PreTrainedModel, draft: PreTrainedModel, stream: Tensor, device: torch.device) -> float:
    """Mean over held-out positions of 1 - total variation: the chance that one drafted token is accepted."""
    total, count = 0.0, 0
    for windows in evaluation_windows(stream, device):
        p = target(input_ids=windows[:, :-1], use_cache=False).logits.float().softmax(-1)
        q = draft(input_ids=windows[:, :-1], use_cache=False).logits.float().softmax(-1)
        total += float(torch.minimum(p, q).sum())
        count += windows[:, 1:].numel()
    return total / count


# ---- the run ---------------------------------------------------------------------------------


def compiled(model: PreTrainedModel, enabled: bool) -> Callable[[Tensor], Tensor]:
    """The model's logits as a function of token ids, in bf16 where autocast allows."""
    body = torch.compile(model.model) if enabled else model.model
    device_type = next(model.parameters()).device.type

    def logits(ids: Tensor) -> Tensor:
        with torch.autocast(device_type, torch.bfloat16):
            hidden = body(input_ids=ids, use_cache=False).last_hidden_state
            return hidden @ model.lm_head.weight.t()

    return logits


def distillation_loss(
    teacher_logits: Callable[[Tensor], Tensor], logits: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """The divergence from the teacher's distribution, as a function of windows."""

    def loss(windows: Tensor) -> Tensor:
        with torch.no_grad():
            log_p = teacher_logits(windows[:, :-1]).float().log_softmax(-1)
        log_q = logits(windows[:, :-1]).float().log_softmax(-1)
        return functional.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1).mean()

    return loss


def save_pair_member(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """One Hugging Face folder: config, generation config, tokenizer, bf16 safetensors."""
    model.config._attn_implementation = "sdpa"
    model.generation_config = GenerationConfig(
        do_sample=True,  # greedy decoding of so small a model repeats itself after a few lines
        temperature=0.8,
        top_p=0.95,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Run the stages that the work folder does not hold yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=90.0, help="training time of both models together")
    parser.add_argument("--work", type=Path, default=Path("demo-training"), help="checkpoints, for resuming")
    parser.add_argument("--out", type=Path, default=Path("edgespec/demo"), help="where target/ and draft/ are written")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-compile", action="store_true", help="skip torch.compile (needs a C++ compiler)")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.set_num_threads(arguments.threads)
    arguments.work.mkdir(parents=True, exist_ok=True)

    sources = standard_library_sources()
    train_texts = [text for path, text in sources if not is_held_out(path)]
    held_out_texts = [text for path, text in sources if is_held_out(path)]
    tokenizer_folder = arguments.work / "tokenizer"
    if tokenizer_folder.exists():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    else:
        tokenizer = train_tokenizer(train_texts)
        tokenizer.save_pretrained(tokenizer_folder)
    train_stream, held_out_stream = encode(tokenizer, train_texts), encode(tokenizer, held_out_texts)
    print(
        f"{len(train_texts)} files, {train_stream.numel():,} tokens to train on; "
        f"{len(held_out_texts)} files, {held_out_stream.numel():,} tokens held out",
        flush=True,
    )
    streams = {"train_stream": train_stream, "held_out_stream": held_out_stream, "device": device}

    target = build_model(TARGET_SHAPE, tokenizer.eos_token_id).to(device)
    add_dropout(target, TARGET_STAGE.dropout)
    target_logits = compiled(target, not arguments.no_compile)

    def next_token_loss(windows: Tensor) -> Tensor:
        logits = target_logits(windows[:, :-1]).float()
        return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    train(target, TARGET_STAGE, loss_of=next_token_loss, minutes=arguments.minutes * TARGET_STAGE.share,
          checkpoint=arguments.work / "target.pt", **streams)  # fmt: skip
    target.eval().requires_grad_(False)

    draft = build_model(DRAFT_SHAPE, tokenizer.eos_token_id).to(device)
    draft_logits = compiled(draft, not arguments.no_compile)

    train(draft, DRAFT_STAGE, loss_of=distillation_loss(target_logits, draft_logits),
          minutes=arguments.minutes * DRAFT_STAGE.share, checkpoint=arguments.work / "draft.pt", **streams)  # fmt: skip
    draft.eval()

    save_pair_member(target, tokenizer, arguments.out / "target")
    save_pair_member(draft, tokenizer, arguments.out / "draft")
    saved_target = LlamaForCausalLM.from_pretrained(arguments.out / "target", dtype=torch.float32).to(device).eval()
    saved_draft = LlamaForCausalLM.from_pretrained(arguments.out / "draft", dtype=torch.float32).to(device).eval()
    report = {
        "target_parameters": saved_target.num_parameters(),
        "draft_parameters": saved_draft.num_parameters(),
        "train_tokens": train_stream.numel(),
        "held_out_tokens": held_out_stream.numel(),
        "target_held_out_nats_per_token": round(held_out_loss(saved_target, held_out_stream, device), 4),
        "draft_held_out_nats_per_token": round(held_out_loss(saved_draft, held_out_stream, device), 4),
        "mean_acceptance": round(mean_acceptance(saved_target, saved_draft, held_out_stream, device), 4),
        "stages": [asdict(TARGET_STAGE), asdict(DRAFT_STAGE)],
        "minutes": arguments.minutes,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
