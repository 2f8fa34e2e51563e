"""The same Llama or Mixtral in llama.cpp and here, all in memory: one text at a time, and several together.

    pip install xllamacpp gguf
    python -m scripts.make.inflate large --params 1B
    python -m scripts.bench.llama_cpp large                                    bf16, one text, one thread
    python -m scripts.bench.llama_cpp large --types q4_0 --quants none nf4 --threads 2 --texts 1 8
    python -m scripts.make.awq large large-awq
    python -m scripts.bench.llama_cpp large --types q4_0 --quants int4 --published large-awq
    python -m scripts.make.inflate_experts mixture --experts 32 --hidden 1024 --inner 1536
    python -m scripts.bench.llama_cpp mixture --types q4_0 --quants int4       a mixture, 4 of 32 experts
    python -m scripts.bench.llama_cpp MODEL.gguf                               one file, plainly, as it is

Systems have a fresh process each and take turns; both continue the same prompts greedily, and reading the prompts
counts. llama.cpp decodes alone and with the draft, with each of --draft-max; edgespec plainly and with tuned trees.
Only a quiet machine's runs count: llama.cpp's threads wait for each other. Prints medians of tokens/s.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from edgespec import Engine, SamplingSettings, TreeSettings
from edgespec.pair.pair import DEMO_FOLDER
from scripts.situations import read_texts, start_child, write_prompts

GREEDY = SamplingSettings(temperature=0)
AS_GIVEN = "file"  # the weights of a GGUF file
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
}  # fmt: skip
EXPERTS = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}  # of all experts in one
OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One way to decode all prompts."""

    kind: str  # edgespec | llama.cpp
    weights: str  # a type of GGUF, edgespec's `quant`, or a folder of published weights
    draft: str  # none | tuned | the most tokens of a draft of llama.cpp's
    texts: int
    threads: int
    mode: str = "warm"

    @property
    def name(self) -> str:
        """As in the table."""
        return f"{self.kind} {self.weights}, draft {self.draft}, {self.texts} texts, {self.threads} threads"


def write_gguf(folder: Path, out: Path, kind: str) -> None:
    """Write a Llama checkpoint, or a Mixtral of experts in one tensor, as one GGUF file, its matrices in one type."""
    import gguf

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(str(out), "llama")
    writer.add_name(folder.name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    if "num_local_experts" in config:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    _add_tokenizer(writer, folder, config)
    types = gguf.GGMLQuantizationType
    matrix_type = {"bf16": types.BF16, "f16": types.F16, "q8_0": types.Q8_0, "q4_0": types.Q4_0}[kind]
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for stored in file.keys():  # noqa: SIM118 (the file is no mapping)
                for name, weight in _renamed(stored, file.get_tensor(stored).float(), heads, key_heads):
                    if weight.dim() == 1 or "ffn_gate_inp" in name:  # norms and routers
                        writer.add_tensor(name, weight.numpy())
                    else:
                        numbers = gguf.quants.quantize(weight.contiguous().numpy(), matrix_type)
                        writer.add_tensor(name, numbers, raw_dtype=matrix_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _renamed(stored: str, weight: torch.Tensor, heads: int, key_heads: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield llama.cpp's tensors of a stored one, with their names."""
    if stored in OUTSIDE:
        yield OUTSIDE[stored], weight
        return
    _, _, layer, *module, leaf = stored.split(".")
    if module == ["mlp", "experts"]:
        names = EXPERTS[leaf]
        shares = weight.chunk(len(names), dim=1)
    else:
        names = (NAMES[".".join(module)],)
        turned = {"attn_q": heads, "attn_k": key_heads}.get(names[0])
        shares = (weight if turned is None else _pairs_together(weight, turned),)
    for name, share in zip(names, shares, strict=True):
        yield f"blk.{layer}.{name}.weight", share


def _add_tokenizer(writer: Any, folder: Path, config: dict[str, Any]) -> None:
    """Write the byte-level BPE of tokenizer.json, as GPT-2's."""
    import gguf

    stated = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = [f"[PAD{token}]" for token in range(config["vocab_size"])]
    types = [gguf.TokenType.UNUSED] * len(tokens)
    for token, number in stated["model"]["vocab"].items():
        tokens[number], types[number] = token, gguf.TokenType.NORMAL
    for added in stated["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], gguf.TokenType.CONTROL
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in stated["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def _pairs_together(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return a weight whose rotated dimensions stand in pairs, as llama.cpp has them, from halves."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def run_llama_cpp(system: System, arguments: argparse.Namespace, prompts: list[str]) -> float:
    """Return the tokens/s of llama.cpp."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    is_given = system.weights == AS_GIVEN
    params.model.path = str(arguments.model if is_given else arguments.gguf / f"target-{system.weights}.gguf")
    params.n_ctx, params.n_parallel = arguments.context * system.texts, system.texts
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = system.threads
    params.no_extra_bufts = arguments.mapped
    if system.draft != "none":
        params.speculative.draft.mparams.path = str(arguments.gguf / "draft-f16.gguf")
        params.speculative.draft.n_max = int(system.draft)
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
    server = xllamacpp.Server(params)

    def tokens(prompt: str, num_tokens: int = arguments.new_tokens) -> int:
        found = server.handle_completions(
            {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        )
        found = found if isinstance(found, dict) else json.loads(found)
        return int(found["usage"]["completion_tokens"])

    tokens(prompts[0], 4)
    started = time.perf_counter()
    with ThreadPoolExecutor(system.texts) as pool:
        num_tokens = sum(pool.map(tokens, prompts))
    return num_tokens / (time.perf_counter() - started)


def run_edgespec(system: System, arguments: argparse.Namespace, prompts: list[str], **engine_options: Any) -> float:
    """Return the tokens/s of edgespec; `engine_options` count before the script's own."""
    torch.set_num_threads(system.threads)
    is_given, is_folder = system.weights == AS_GIVEN, system.weights in arguments.published
    own: dict[str, Any] = {
        "draft": None if is_given else DEMO_FOLDER / "draft", "profile": "none",
        "dtype": "auto" if is_given else "bfloat16", "threads": system.threads,
        "quant": None if is_given or is_folder else system.weights, "parallel": system.texts,
        "context_tokens": arguments.context,
        **({"tree": TreeSettings(policy="none")} if system.draft == "none" else {}),
    }  # fmt: skip
    model = system.weights if is_folder else arguments.model
    with Engine.from_pretrained(model, **{**own, **engine_options}) as engine:
        options: Any = {"max_new_tokens": arguments.new_tokens, "sampling": GREEDY, "seed": 0, "ignore_eos": True}
        engine.generate(prompts[0], **{**options, "max_new_tokens": 4})
        started = time.perf_counter()
        requests = [engine.request(prompt, **options) for prompt in prompts]
        num_tokens = 0
        for _, result in engine.generate_many(requests):
            if isinstance(result, Exception):
                raise result
            num_tokens += len(result.token_ids)
        return num_tokens / (time.perf_counter() - started)


def main() -> None:
    """All systems in turn, then their medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a checkpoint of the built-in pair's tokens, or a GGUF file")
    parser.add_argument("--types", nargs="+", default=["bf16"], choices=["bf16", "f16", "q8_0", "q4_0"])
    parser.add_argument("--quants", nargs="+", default=["none"], help="edgespec's weights: none, nf4, ...")
    parser.add_argument("--published", nargs="+", default=[], help="folders of the same model in published formats")
    parser.add_argument("--draft-max", nargs="+", default=["none", "4", "8"], help="tokens of llama.cpp's draft")
    parser.add_argument("--texts", type=int, nargs="+", default=[1])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("-n", "--new-tokens", type=int, default=48)
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gguf", type=Path, help="a folder for the GGUF files, which are kept")
    parser.add_argument(
        "--mapped", action="store_true", help="llama.cpp reads weights where the file is mapped, in no faster order"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        system = System(**json.loads(arguments.child))
        prompts = read_texts(arguments.gguf / "prompts.jsonl")
        run = run_edgespec if system.kind == "edgespec" else run_llama_cpp
        print(json.dumps({"per_s": run(system, arguments, prompts)}))
        return
    with tempfile.TemporaryDirectory() as folder:
        if arguments.gguf is None:
            arguments.gguf = Path(folder)
            sys.argv += ["--gguf", folder]
        arguments.gguf.mkdir(exist_ok=True)
        write_prompts(arguments.gguf, arguments.num_prompts)
        if arguments.model.suffix == ".gguf":
            ways = [replace(system, weights=AS_GIVEN) for system in systems(arguments) if system.draft == "none"]
            compare(ways, arguments.repeats)
            return
        for model, name, kinds in (
            (arguments.model, "target", arguments.types),
            (DEMO_FOLDER / "draft", "draft", ["f16"]),
        ):
            for kind in kinds:
                if not (arguments.gguf / f"{name}-{kind}.gguf").exists():
                    write_gguf(model, arguments.gguf / f"{name}-{kind}.gguf", kind)
        compare(list(systems(arguments)), arguments.repeats)


def systems(arguments: argparse.Namespace) -> list[System]:
    """All ways, in the order of the table."""
    drafts = {"llama.cpp": arguments.draft_max, "edgespec": ("none", "tuned")}
    weights = {"llama.cpp": arguments.types, "edgespec": [*arguments.quants, *arguments.published]}
    return [
        System(kind=kind, weights=form, draft=draft, texts=texts, threads=threads)
        for texts in arguments.texts
        for threads in arguments.threads
        for kind in drafts
        for form in weights[kind]
        for draft in drafts[kind]
    ]


def compare(ways: list[System], repeats: int) -> None:
    """Run the ways in turn and print the medians of their tokens/s."""
    per_s: dict[str, list[float]] = {system.name: [] for system in ways}
    for _ in range(repeats):
        for system in ways:
            per_s[system.name].append(start_child("scripts.bench.llama_cpp", system)["per_s"])
            print(f"{system.name}: {per_s[system.name][-1]:.2f} tokens/s", file=sys.stderr)
    for name, found in per_s.items():
        print(f"{name:60} {statistics.median(found):8.2f} tokens/s ({min(found):.2f} to {max(found):.2f})")


if __name__ == "__main__":
    main()
