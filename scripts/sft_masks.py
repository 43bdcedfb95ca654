"""Makes tests/sft_masks: conversations and the assistant masks that transformers gives them.

    python -m venv venv && venv/bin/pip install transformers jinja2
    venv/bin/python scripts/sft_masks.py tests/sft_masks

Two small tokenizers are trained here (byte-level BPE, and BPE over pieces with a space mark and byte fallback). Each line of
conversations.jsonl is a record of a chat file with, under "want", the template, the tokenizer, the number of tokens, the
FNV-1a hash of their ids as little-endian u32, and the mask as lengths of runs, the first one without a loss.
"""

import json
import random
import struct
import sys
from pathlib import Path

import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CONVERSATIONS = 500
TEMPLATES = {"chatml": "bytes", "headers": "bytes", "plain": "bytes", "inst": "pieces", "turns": "pieces"}
SPECIALS = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end_role|>", "<|eot|>", "[INST]", "[/INST]",
    "<start_of_turn>", "<end_of_turn>", "<tool_call>", "</tool_call>",
]
WORDS = """the a of and to in is model train loss token layer weight data answer question why how rust kernel stream
attention gradient please thanks yes no maybe certainly number seven twelve 3.14 2026 x+y f(x) naïve café über 東京 こんにちは
привет мир 🦀 🚀 👩‍🔬 "quoted" 'single' (paren) [list] {brace} <tag> C++ a_b snake-case HTTP/2 100% #hash @at ~ ^ | \\ / ; : , . ! ?""".split()
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "The weather at a place <now>", "parameters": {
        "type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer", "default": 1}},
        "required": ["place"]}}},
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {
        "b": {"type": "number"}, "a": {"type": "number"}}}}},
]


def text(rng, most=24):
    out = []
    for _ in range(rng.randint(1, most)):
        out.append(rng.choice(WORDS))
        out.append(rng.choices([" ", "\n", "\n\n", "  ", "\t", ""], [60, 4, 3, 2, 1, 6])[0])
    body = "".join(out)
    if rng.random() < 0.15:
        body += "\n```rust\nfn main() {\n    let x = 1;\n}\n```"
    # Most people's data is trimmed; some is not.
    return body if rng.random() < 0.2 else body.strip() or "yes"


def conversation(rng):
    messages = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": text(rng, 10)})
    tools = rng.sample(TOOLS, rng.randint(1, 2)) if rng.random() < 0.3 else None
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3, 4, 6])):
        messages.append({"role": "user", "content": text(rng)})
        if tools and rng.random() < 0.6:
            call = {"name": "weather", "arguments": {"place": rng.choice(["東京", "Zürich", "here"]), "days": rng.randint(1, 9)}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]})
            messages.append({"role": "tool", "content": text(rng, 5)})
        answer = text(rng)
        if rng.random() < 0.2:
            answer = "<think>\n" + text(rng, 8).strip() + "\n</think>\n\n" + answer.strip()
        messages.append({"role": "assistant", "content": answer})
    return messages, tools


def tokenizer(kind, corpus):
    if kind == "bytes":
        t = Tokenizer(models.BPE())
        t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False)
        t.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    else:
        t = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
        t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
        bytes_ = ["<unk>"] + [f"<0x{b:02X}>" for b in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=bytes_, limit_alphabet=90, show_progress=False)
    t.train_from_iterator(corpus, trainer)
    if kind == "pieces":  # bytes are ordinary tokens, not text to look for
        file = json.loads(t.to_str())
        file["added_tokens"] = [a for a in file["added_tokens"] if a["content"] == "<unk>"]
        t = Tokenizer.from_str(json.dumps(file))
    t.add_special_tokens([AddedToken(s, normalized=False) for s in SPECIALS])
    return t


def fnv(ids):
    h = 0xCBF29CE484222325
    for byte in struct.pack(f"<{len(ids)}I", *ids):
        h = (h ^ byte) * 0x100000001B3 % 2**64
    return f"{h:016x}"


def runs(mask):
    out, last = [0], 0
    for m in mask:
        if m != last:
            out.append(0)
            last = m
        out[-1] += 1
    return out


def main(folder):
    rng = random.Random(20)
    corpus = [text(rng, 60) for _ in range(400)]
    loaded = {}
    for kind in sorted(set(TEMPLATES.values())):
        at = folder / kind
        at.mkdir(parents=True, exist_ok=True)
        tokenizer(kind, corpus).save(str(at / "tokenizer.json"))
        config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
        (at / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
        loaded[kind] = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(at / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
        )
    lines = []
    for i in range(CONVERSATIONS):
        name = list(TEMPLATES)[i % len(TEMPLATES)]
        template = (folder / "templates" / f"{name}.jinja").read_text()
        messages, tools = conversation(rng)
        out = loaded[TEMPLATES[name]].apply_chat_template(
            messages, tools=tools, chat_template=template, tokenize=True, return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids, mask = out["input_ids"], out["assistant_masks"]
        assert any(mask) and not all(mask)
        record = {"messages": messages} | ({"tools": tools} if tools else {})
        want = {"template": name, "tokenizer": TEMPLATES[name], "tokens": len(ids), "fnv": fnv(ids), "mask": runs(mask)}
        lines.append(json.dumps(record | {"want": want}, ensure_ascii=False))
    (folder / "conversations.jsonl").write_text("\n".join(lines) + "\n")
    tokens = sum(json.loads(line)["want"]["tokens"] for line in lines)
    print(f"transformers {transformers.__version__}: {len(lines)} conversations, {tokens} tokens")


main(Path(sys.argv[1]))
