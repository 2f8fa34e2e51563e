"""Valid inputs of every kind that edgespec reads, how each is changed, and how it is read: for check.mutations."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import tomli_w
import torch
from safetensors.torch import save_file

from edgespec.chat.prompt_ids import prompt_ids
from edgespec.chat.session_file import SavedSession, read_session, transcript
from edgespec.cli import cli
from edgespec.cli.config.defaults import known_keys, settings_of
from edgespec.cli.config.groups import all_commands
from edgespec.cli.generate.formats import FORMATS
from edgespec.cli.generate.output_file import OutputFile
from edgespec.cli.generate.requests import RunSettings, make_requests, turn_encoder
from edgespec.cli.generate.resume import check_same_run, config_hash, keep_finished, read_results
from edgespec.cli.generate.truncate import fit
from edgespec.cli.prompts.read import describe, read_prompts
from edgespec.cli.prompts.selection import category_of
from edgespec.engine import Engine
from edgespec.errors import profile_errors
from edgespec.grow.acceptance import AcceptanceModel
from edgespec.grow.classifier import Classifier
from edgespec.grow.network import Network
from edgespec.grow.stop_model import StopModel, input_names
from edgespec.hub.user_config import UserConfig, read_config, read_pairs
from edgespec.pair.pair import DEMO_FOLDER, ModelPair, open_pair
from edgespec.placement.pair_setup import set_up
from edgespec.placement.profile_trees import acceptance_of, tree_settings
from edgespec.placement.run_config import resolve_run_config
from edgespec.prefix_cache.prompt_cache import PromptCache
from edgespec.prefix_cache.prompt_files import note_use, noted_files
from edgespec.text.request import text_request
from edgespec.train.feature_files import Block, FeatureFiles, FeatureRun, begin_run, read_run, save_shard
from edgespec.train.record_files import RecordsHeader, load_records, save_records
from edgespec.tree.settings import TreeSettings
from edgespec.tuning.memory import known_costs, plan_at
from offload.architecture import architecture_checkpoint
from profiles.files import read_profile, write_profile
from profiles.hardware import FOLDER as HARDWARE
from profiles.hardware import parse_assumptions, parse_hardware
from profiles.schema import TemperaturePlan
from tests.fuzz.changes import Change, changed_header, changed_json, changed_lines, changed_toml, either
from tests.fuzz.prompt_reference import MESSAGES, TEXT, DiffersError, check_folder, row_ids, rows_of_file
from tests.profiles.examples import example_plan, example_profile
from tests.support.tiny_checkpoints import make_model, save_folder
from tests.support.tiny_configs import tiny_config

FAMILIES = ("llama", "qwen3_moe", "gemma2", "gpt2", "mamba2", "qwen3_5_text", "gemma3")
PACKINGS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [16, 16]},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False},
    "compressed-tensors": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 16}}},
    },
}  # fmt: skip
DRAW_SHARE = 50  # one folder in so many that opens is loaded, and decodes two tokens
NEW_TOKENS = 2
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A folder of valid files, those of them that are changed, and what reads it."""

    name: str
    folder: Path
    changes: dict[str, Change]  # file -> how it is changed
    read: Callable[[Path, random.Random], object]

    def of_files(self, names: Sequence[str] | None) -> Input:
        """Return the input with changes of these files alone; of all where there are no names."""
        chosen = {name: change for name, change in self.changes.items() if names is None or name in names}
        return dataclasses.replace(self, changes=chosen)

    def changed(self, run_config: Path, chance: random.Random) -> str:
        """Write the folder to `place` with one file changed, or in a few cases gone or a folder; return what was."""
        shutil.rmtree(run_config, ignore_errors=True)
        shutil.copytree(self.folder, run_config, copy_function=os.link)
        name = chance.choice(sorted(self.changes))
        content = (self.folder / name).read_bytes()
        (run_config / name).unlink()
        how = chance.random()
        if how < 0.01:
            (run_config / name).mkdir()
        elif how > 0.02:
            (run_config / name).write_bytes(self.changes[name](content, chance))
        return name


def model_folders(root: Path) -> list[Input]:
    """Return tiny models of several families, whole, sharded, packed, with a draft, and as a config.json alone."""
    found = []
    for family in FAMILIES:
        folder = save_folder(root / family, make_model(tiny_config(family), is_image_text=False, seed=0))
        _add_template(folder / "tokenizer_config.json")
        found.append(_model_input(family, folder))
    sharded = root / "sharded"
    make_model(tiny_config("llama"), is_image_text=False, seed=0).save_pretrained(sharded, max_shard_size="20KB")
    _copy_tokenizer(root / "llama", sharded)
    found.append(_model_input("sharded", sharded))
    for packing, stated in PACKINGS.items():
        found.append(_model_input(packing, _packed(root / packing, root / "llama", stated)))
    for family in ("llama", "qwen3_moe", "qwen3_5_text"):
        bare = root / f"{family}-config"
        bare.mkdir()
        shutil.copy(root / family / "config.json", bare)
        found.append(Input(name=bare.name, folder=bare, changes={"config.json": either(changed_json)}, read=_estimate))
    return found


def _model_input(name: str, folder: Path) -> Input:
    json_files = ("config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors.index.json")
    changes = {file: either(changed_json) for file in json_files if (folder / file).exists()}
    # Most readers are those of config.json; a tokenizer is mostly transformers' own to read.
    weights = sorted(path.name for path in folder.glob("*.safetensors"))
    return Input(
        name=name, folder=folder, changes={**changes, weights[0]: either(changed_header),
        "tokenizer.json": either(changed_json)}, read=_open_and_plan,
    )  # fmt: skip


def _add_template(path: Path) -> None:
    fields = json.loads(path.read_text(encoding="utf-8")) | {"chat_template": TEMPLATE, "bos_token": None}
    path.write_text(json.dumps(fields), encoding="utf-8")


def _copy_tokenizer(source: Path, to: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, to)


def _packed(folder: Path, plain: Path, stated: dict[str, Any]) -> Path:
    """Write a folder whose weights are packed as config.json states, with zeros for their numbers."""
    folder.mkdir()
    config = json.loads((plain / "config.json").read_text(encoding="utf-8")) | {"quantization_config": stated}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    _copy_tokenizer(plain, folder)
    shutil.copy(plain / "generation_config.json", folder)
    from transformers import AutoConfig

    planned = architecture_checkpoint(AutoConfig.from_pretrained(folder), folder).tensors
    tensors = {name: torch.zeros(entry.shape, dtype=entry.dtype) for name, entry in planned.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _open_and_plan(folder: Path, chance: random.Random) -> None:
    """Open a folder, make a request of it and plan it; now and then load it, too, and decode."""
    pair = open_pair(folder, None)
    has_template = bool(pair.tokenizer.chat_template)
    check_folder(
        folder, prompt_ids(pair.tokenizer, TEXT), prompt_ids(pair.tokenizer, MESSAGES) if has_template else None
    )
    run_config = resolve_run_config(
        pair.target, pair.max_context, draft=pair.draft, device="cpu", dtype="float32", context_tokens=64
    )
    setup = set_up(pair, run_config)
    options = {"max_new_tokens": NEW_TOKENS}
    text_request([1, 2, 3], pair=pair, max_context=run_config.context_tokens, config=None, options=options)
    if chance.randrange(DRAW_SHARE) == 0:
        with Engine(setup) as engine:
            engine.generate("ab", max_new_tokens=NEW_TOKENS, seed=1)


def _estimate(folder: Path, _chance: random.Random) -> None:
    from edgespec.pair.folder import open_architecture
    from edgespec.placement.place import pair_weights, place_weights, read_memory

    model = open_architecture(folder)
    run_config = resolve_run_config(model, model.max_context, device="cpu", context_tokens=64)
    tree = TreeSettings(policy="none")
    place_weights(
        pair_weights(model, None, run_config), tree, run_config, read_memory(run_config.limits, run_config.device)
    )


ROWS: tuple[Any, ...] = (
    {"id": "a", "prompt": "def main(", "temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 3},
    {"id": 7, "prompt": "x", "max_new_tokens": 4, "stop": ["\n", "end"], "logit_bias": {"5": -100, "a": 1.5},
     "category": "code", "reference": ["x"], "system": "be brief"},
    {"question_id": 81, "category": "writing", "turns": ["first", "second"], "repetition_penalty": 1.1},
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}],
     "presence_penalty": 0.5, "frequency_penalty": -0.5, "ignore_eos": True, "logprobs": True, "top_logprobs": 3},
    {"custom_id": "r1", "method": "POST", "url": "/v1/chat/completions",
     "body": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "temperature": 1, "n": 1,
              "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}}},
    {"custom_id": "r2", "body": {"prompt": "once", "max_tokens": 5, "logprobs": 2,
                                 "response_format": {"type": "json_object"}}},
    {"messages": [
        {"role": "user", "content": "How warm?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "warmth", "arguments": {"city": "Bern", "days": 1}}}]},
        {"role": "tool", "tool_call_id": "1", "content": "11"}],
     "tools": [{"type": "function", "function": {"name": "warmth", "parameters": {"type": "object"}}}],
     "chat_template_kwargs": {"tone": "dry"}, "reasoning_effort": "low", "tool_choice": "auto"},
    {"messages": [{"role": "developer", "content": "d"}, {"role": "user", "content": "u"}], "stop_token_ids": [3],
     "min_tokens": 2, "repeat_penalty": 1.1, "n_predict": 5, "bad_words": ["x"], "skip_special_tokens": False},
    {"prompt": "p", "options": {"num_predict": 3, "temperature": 0.5, "stop": ["x"], "num_ctx": 64}, "keep_alive": 5},
    "a string", ["id", "text"],
)  # fmt: skip
TEMPLATE = (  # of the kind that people have: it leaves out roles that it does not know
    "{% for message in messages %}{% if message.role == 'system' %}<sys>{{ message.content }}</sys>"
    "{% elif message.role == 'user' %}<user>{{ message.content }}"
    "{% elif message.role == 'tool' %}<tool>{{ message.content }}"
    "{% elif message.role == 'assistant' %}<assistant>{{ message.content }}{% for call in message.tool_calls or [] %}"
    "<call>{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if tools %}<tools>{{ tools | tojson }}{% endif %}{% if tone %}<tone>{{ tone }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def prompt_files(root: Path) -> list[Input]:
    """Return files of rows in all forms: JSONL, an array, lines, one text; with a chat template and without."""
    root.mkdir()
    plain = dataclasses.replace(open_pair(None, None), draft=None)
    templated = dataclasses.replace(open_pair(None, None), draft=None)
    templated.tokenizer.chat_template = TEMPLATE
    engine = Engine.from_pair(plain, dtype="float32", tree=TreeSettings(policy="none"))
    found = []
    for number, row in enumerate(ROWS):
        lines = "\n".join(json.dumps(each) for each in (row, {"prompt": "another"})) + "\n"
        found.append((f"{number}.jsonl", lines, either(changed_lines, share_of_bytes=0.2)))
    found.append(("all.json", json.dumps(ROWS), either(changed_json, share_of_bytes=0.2)))
    inputs = []
    for name, text, change in found:
        folder = root / name
        folder.mkdir()
        (folder / name).write_text(text, encoding="utf-8")
        for pair, form in ((plain, "plain"), (templated, "templated")):
            inputs.append(
                Input(
                    name=f"{name} {form}", folder=folder, changes={name: change}, read=_row_reader(name, pair, engine)
                )
            )
    return inputs


def _row_reader(name: str, pair: ModelPair, engine: Engine) -> Callable[[Path, random.Random], None]:
    settings = RunSettings(sampling=pair.default_sampling(), max_new_tokens=NEW_TOKENS, seed=0, raw=False)

    def read(folder: Path, chance: random.Random) -> None:
        rows = read_prompts(str(folder / name), lines=False)
        describe(rows)
        max_context = pair.max_context
        encode = turn_encoder(pair, settings, max_tokens=max_context)
        requests = make_requests(pair, rows, encode, settings)
        given = rows_of_file(folder / name)
        for request in fit(requests, "skip", encode, pair.tokenizer, max_context):
            row = request.row
            if given is not None and request.fault is None:
                _compare(request.ids, row_ids(pair.tokenizer, given[row.index]))
            values = row.settings.set_values()
            shown = [row.id, row.digest, category_of(row), sorted(row.ignored_keys), values, row.meta]
            json.dumps(shown, allow_nan=False).encode()
            if request.fault is not None:
                continue
            wanted = engine.request(
                request.ids, max_new_tokens=min(request.max_new_tokens, 2), sampling=request.sampling,
                seed=request.seed, name=row.id, stop=request.stop, grammar=request.grammar, logprobs=request.logprobs,
            )  # fmt: skip
            if chance.randrange(DRAW_SHARE) == 0:
                engine.submit(wanted).result()

    return read


def _compare(ids: list[int], expected: list[int] | None) -> None:
    if expected is not None and ids != expected:
        raise DiffersError(f"{ids} and {expected}")


def files_of_ours(root: Path) -> list[Input]:
    """Return a file of each kind that edgespec itself writes or asks its users to write."""
    root.mkdir()
    pair = open_pair(None, None)
    found: list[tuple[str, dict[str, bytes], Change, Callable[[Path], object]]] = [
        ("session.json", {"session.json": _session()}, either(changed_json),
         lambda folder: transcript(read_session(folder / "session.json", pair.tokenizer))),
        ("acceptance.json", {"acceptance.json": (DEMO_FOLDER / "acceptance.json").read_bytes()}, either(changed_json),
         lambda folder: AcceptanceModel.load(folder / "acceptance.json").rank_acceptance(0.7, "sampled")),
        ("classifier.json", {"classifier.json": (DEMO_FOLDER / "classifier.json").read_bytes()}, either(changed_json),
         lambda folder: Classifier.load(folder / "classifier.json")),
        ("tree.json", {"tree.json": b"[[0], [1], [0, 0], [0, 1], [0, 0, 0]]"}, either(changed_json), _read_tree),
        ("parents.json", {"tree.json": b'{"parents": [-1, 0, 0, 1, 1, 3]}'}, either(changed_json), _read_tree),
        ("config.toml", {"config.toml": _user_config()}, either(changed_toml), _read_user_config),
        ("hardware", {"card.toml": (HARDWARE / "rtx-4090.toml").read_bytes()}, either(changed_toml), _read_hardware),
        ("assumptions", {"assumptions.toml": (HARDWARE / "assumptions.toml").read_bytes()}, either(changed_toml),
         _read_assumptions),
    ]  # fmt: skip
    inputs = [_written(root / name, name, files, change, read) for name, files, change, read in found]
    inputs += [_records(root / "records"), *_features(root / "features"), _stop_model(root / "stop-model")]
    inputs += [_prompt_cache(root / "prompt-cache", pair), _profile(root / "profile"), _head(root / "head", pair)]
    inputs += [_results(root / f"results-{name}", name) for name in FORMATS if name != "text"]
    return inputs


def _written(folder: Path, name: str, files: dict[str, bytes], change: Change, read: Callable[[Path], object]) -> Input:
    folder.mkdir()
    for file, content in files.items():
        (folder / file).write_bytes(content)
    return Input(
        name=name,
        folder=folder,
        changes=dict.fromkeys(files, change),
        read=lambda run_config, _chance: read(run_config),
    )


def _session() -> bytes:
    from edgespec.chat.chat_template import Message

    messages = (Message(role="user", content="def main("), Message(role="assistant", content="x", is_interrupted=True))
    settings = {"temperature": 0.5, "stop": ["x"]}
    return SavedSession(model="m", system="s", settings=settings, messages=messages).document().encode()


def _read_tree(folder: Path) -> None:
    _ = TreeSettings(policy="static", tree_file=folder / "tree.json").num_nodes


def _user_config() -> bytes:
    return tomli_w.dumps({
        "defaults": {"model": "big", "max_new_tokens": 64, "device": "cpu", "stop": ["a", "b"], "quant": "nf4"},
        "sampling": {"temperature": 0.7, "top_k": 20, "logit_bias": {"5": -1.5}, "seed": 3},
        "models": {"pair": {"model": "big", "draft_model": "small", "policy": "opt-tree", "tree_size": 32}},
    }).encode()  # fmt: skip


def _read_user_config(folder: Path) -> None:
    commands = all_commands(click.Context(cli, info_name="edgespec"))
    read_pairs(folder / "config.toml")
    config = UserConfig(files=(read_config(folder / "config.toml", known_keys(commands)),))
    for name in ("generate", "chat", "estimate"):
        for model in (None, "pair"):
            list(settings_of(commands[name], config, model, commands.values()))


def _read_hardware(folder: Path) -> None:
    with profile_errors():
        parse_hardware(_text(folder / "card.toml"), "card")


def _read_assumptions(folder: Path) -> None:
    with profile_errors():
        parse_assumptions(_text(folder / "assumptions.toml"))


def _text(path: Path) -> str:
    """Return what a file that comes with edgespec says, which is there and UTF-8 in earnest."""
    return path.read_bytes().decode(errors="replace") if path.is_file() else ""


def _records(folder: Path) -> Input:
    header = RecordsHeader(
        target="big", draft="small", prompt=3, tree="opt-tree", draw="chosen", temperature=0.6, draft_temperature=0.6,
        num_trees=1, tokens=2.5,
    )  # fmt: skip
    for prompt in (1, 2):
        save_records(
            folder, {"rank": torch.zeros(2), "depth": torch.ones(2)}, dataclasses.replace(header, prompt=prompt)
        )
    return Input(
        name="records", folder=folder, changes={"part-00001.safetensors": either(changed_header)},
        read=lambda run_config, _chance: load_records(run_config),
    )  # fmt: skip


def _features(folder: Path) -> list[Input]:
    run = FeatureRun(
        target="t", target_fingerprint="f", quant=None, dtype="float32", hidden_size=4, block_tokens=8, num_blocks=2,
        num_tokens=5, blocks_sha256="x",
    )  # fmt: skip
    begin_run(folder, run)
    save_shard(folder, [Block(text=0, ids=[1, 2, 3]), Block(text=1, ids=[4, 5])], torch.zeros(5, 4))

    def read_shards(run_config: Path, _chance: random.Random) -> None:
        files = FeatureFiles(run_config)
        for block in range(files.num_blocks):
            files.batch([block], device=CPU)

    return [
        Input(name="features-note", folder=folder, changes={"run.json": either(changed_json)},
              read=lambda run_config, _chance: begin_run(run_config, read_run(run_config))),
        Input(name="features", folder=folder, changes={"features-00000.safetensors": either(changed_header)},
              read=read_shards),
    ]  # fmt: skip


def _stop_model(folder: Path) -> Input:
    folder.mkdir()
    network = Network(
        inputs=input_names("probabilities", 3), mean=torch.zeros(3), std=torch.ones(3), activation="relu",
        weights=(torch.ones(4, 3), torch.ones(1, 4)), biases=(torch.zeros(4), torch.zeros(1)),
    )  # fmt: skip
    StopModel(kind="probabilities", network=network).save(folder / "stop.safetensors")
    return Input(
        name="stop-model", folder=folder, changes={"stop.safetensors": either(changed_header)},
        read=lambda run_config, _chance: StopModel.load(run_config / "stop.safetensors").predict(torch.zeros(2, 3)),
    )  # fmt: skip


def _prompt_cache(folder: Path, pair: ModelPair) -> Input:
    folder.mkdir()
    text = "def main(arguments):\n    return [argument for argument in arguments if argument is not None]\n" * 2
    with Engine.from_pair(pair, dtype="float32", tree=TreeSettings(policy="none")) as engine:
        own_config = engine.run_config
        cache = PromptCache(folder / "rows.safetensors", pair, own_config)
        cache.keep_beginning([engine.encode(text)])
        engine.prefix_cache.prompt_cache = cache
        engine.generate(text, max_new_tokens=1)
        target = engine.target_model
    assert (folder / "rows.safetensors").exists()
    del target

    def read(run_config: Path, _chance: random.Random) -> None:
        path = run_config / "rows.safetensors"
        with contextlib.suppress(OSError):
            note_use(path)
        list(noted_files())
        PromptCache(path, pair, own_config)

    return Input(
        name="prompt-cache", folder=folder, changes={"rows.safetensors": either(changed_header)}, read=read
    )  # fmt: skip


def _profile(folder: Path) -> Input:
    folder.mkdir()
    acceptance = json.loads((DEMO_FOLDER / "acceptance.json").read_text(encoding="utf-8"))
    plans = (TemperaturePlan(temperature=0.0, best=example_plan(), by_texts=(example_plan(num_texts=4),)),)
    write_profile(example_profile(plans=plans, acceptance=acceptance), folder / "p.toml")

    def read(run_config: Path, _chance: random.Random) -> None:
        with profile_errors():
            profile = read_profile(run_config / "p.toml")
        acceptance_of(profile)
        known_costs(profile).plain_s(1)
        tree_settings(plan_at(profile, 0.7).best)

    return Input(name="profile", folder=folder, changes={"p.toml": either(changed_toml)}, read=read)


def _head(folder: Path, pair: ModelPair) -> Input:
    shutil.copytree(DEMO_FOLDER / "head", folder)
    changes = {"config.json": either(changed_json), "model.safetensors": either(changed_header)}

    def read(run_config: Path, _chance: random.Random) -> None:
        found = open_pair(None, run_config)
        set_up(found, resolve_run_config(found.target, found.max_context, device="cpu", context_tokens=64))

    del pair
    return Input(name="head", folder=folder, changes=changes, read=read)


def _results(folder: Path, format_name: str) -> Input:
    """Return an output file of two rows, as generate wrote it, to be resumed."""
    import edgespec.cli

    folder.mkdir()
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"id": "a", "prompt": "def"}\n{"id": "b", "prompt": "import", "top_k": 5}\n', encoding="utf-8")
    out = folder / "out.jsonl"
    arguments = ["generate", str(prompts), "-o", str(out), "-n", "2", "--policy", "none", "-q", "--format", format_name]
    assert edgespec.cli.run([*arguments, "--seed", "1", "-np", "1"]) == 0

    def read(run_config: Path, _chance: random.Random) -> None:
        results = read_results(run_config / "out.jsonl", format_name)
        rows = read_prompts(str(run_config / "prompts.jsonl"), lines=False)
        config = next((entry.record.get("config") for entry in results.entries), None)
        found = config if isinstance(config, dict) else {"seed": 1}
        config_hash(found)
        _ = results.seed, results.done, results.failed
        try:
            check_same_run(results, rows, {**found, "seed": 1})
        finally:
            file = OutputFile(run_config / "out.jsonl")
            try:
                keep_finished(file, results, {"b"}, ["a", "b"])
            finally:
                file.close()

    return Input(name=f"results-{format_name}", folder=folder, changes={"out.jsonl": either(changed_lines)}, read=read)
