"""Makes tests/eval: a tiny model, questions and text, and what lm-evaluation-harness scores them with.

    python -m venv venv && venv/bin/pip install 'lm_eval[hf]' torch transformers
    venv/bin/python scripts/eval_harness.py tests/eval

`expected.json` holds the accuracies, standard errors and log-likelihoods of three local tasks, and the rolling
log-likelihoods of a text; `cargo test -p ferrotron-cli --test eval` compares `ferrotron eval` with them."""
import json, math, pathlib, random, shutil, sys

import datasets, torch, transformers
from lm_eval import __version__ as harness_version, simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.api.instance import Instance
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

LENGTH = 48
out = pathlib.Path(sys.argv[1])
shutil.rmtree(out, ignore_errors=True)
model_dir = out / "model"
model_dir.mkdir(parents=True)
random.seed(1)
torch.manual_seed(1)

WORDS = "the a cat dog river stone light green small old walks sees under over and then morning house water bread".split()
sentence = lambda n: " ".join(random.choice(WORDS) for _ in range(n))
texts = [sentence(60) + ".", sentence(7).capitalize() + ".\nÜber naïve cafés, " + sentence(40) + ".", sentence(1)]
with open(out / "text.jsonl", "w") as f:
    f.writelines(json.dumps(dict(text=t), ensure_ascii=False) + "\n" for t in texts)

# Questions of three forms; the length of the choices differs, in characters and in bytes.
choices = lambda n: [sentence(random.randint(1, 6)) + random.choice(["", " é", " ü ß"]) for _ in range(n)]
plain, arc, swag = [], [], []
for i in range(24):
    plain.append(dict(question=sentence(random.randint(1, 40)) + "?", choices=choices(random.choice([2, 4])), answer=random.randint(0, 1)))
    n = random.choice([3, 4])
    labels = random.choice(["ABCD", "1234"])[:n]
    arc.append(dict(id=str(i), question=sentence(9) + "?", choices=dict(text=choices(n), label=list(labels)), answerKey=random.choice(labels)))
    swag.append(dict(activity_label=sentence(2), ctx_a=sentence(5) + random.choice(["", " [header] x"]) + ".", ctx_b=sentence(3),
        endings=[c + random.choice(["", " [title] the end", " [step] on"]) for c in choices(4)], label=str(random.randint(0, 3))))
for name, rows in dict(plain=plain, arc=arc, hellaswag=swag).items():
    with open(out / f"{name}.jsonl", "w") as f:
        f.writelines(json.dumps(r, ensure_ascii=False) + "\n" for r in rows)

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<bos>", "<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
tokenizer.train_from_iterator(texts * 4 + [q["question"] for q in plain], trainer)
tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")
fast.save_pretrained(model_dir)
config = transformers.LlamaConfig(vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, bos_token_id=0, eos_token_id=1, pad_token_id=None)
model = transformers.LlamaForCausalLM(config).float().eval()
for p in model.parameters():
    p.data.add_(0.05 * torch.randn_like(p)) if p.dim() == 1 else p.data.normal_(0, 0.25)
model.save_pretrained(model_dir)
(model_dir / "generation_config.json").unlink(missing_ok=True)


def harness(**options):
    return HFLM(pretrained=model, tokenizer=fast, backend="causal", max_length=LENGTH, batch_size=1, device="cpu", **options)


METRICS = [dict(metric=m, aggregation="mean", higher_is_better=True) for m in ("acc", "acc_norm", "acc_bytes")]


def task(name, **options):
    data = dict(dataset_path="json", dataset_kwargs=dict(data_files=dict(test=str(out / f"{name}.jsonl"))), test_split="test")
    return dict(task=name, output_type="multiple_choice", target_delimiter=" ", metric_list=METRICS) | data | options


def swag_text(text):
    import re
    return re.sub("\\[.*?\\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


tasks = [
    task("plain", doc_to_text="Question: {{question}}\nAnswer:", doc_to_choice="choices", doc_to_target="answer"),
    task("arc", doc_to_text="Question: {{question}}\nAnswer:", doc_to_choice="{{choices.text}}", doc_to_target="{{choices.label.index(answerKey)}}"),
    task("hellaswag", doc_to_text=lambda d: swag_text(d["activity_label"] + ": " + d["ctx_a"] + " " + d["ctx_b"].capitalize()),
        doc_to_choice=lambda d: [swag_text(e) for e in d["endings"]], doc_to_target=lambda d: int(d["label"])),
]
expected = dict(harness=harness_version, transformers=transformers.__version__, seq_len=LENGTH, tasks={}, text={})
result = simple_evaluate(model=harness(), tasks=tasks, bootstrap_iters=0, log_samples=True)
for name in ("plain", "arc", "hellaswag"):
    found = result["results"][name]
    numbers = {m: found[f"{m},none"] for m in ("acc", "acc_norm", "acc_bytes")}
    samples = sorted(result["samples"][name], key=lambda s: s["doc_id"])
    shares = {m: [s[m] for s in samples] for m in numbers}
    for m, values in shares.items():
        mean = sum(values) / len(values)
        numbers[f"{m}_stderr"] = found.get(f"{m}_stderr,none")
        if not isinstance(numbers[f"{m}_stderr"], float):
            from lm_eval.api.metrics import mean_stderr
            numbers[f"{m}_stderr"] = mean_stderr(values)
    scores = [[float(r[0]) for r in s["filtered_resps"]] for s in samples]
    expected["tasks"][name] = numbers | dict(scores=scores)
# Without the beginning of text that the tokenizer adds: the harness begins a text with it anyway.
requests = [Instance(request_type="loglikelihood_rolling", doc={}, arguments=(t,), idx=0) for t in texts]
sums = [float(x) for x in harness(add_bos_token=False).loglikelihood_rolling(requests)]
tokens = sum(len(fast.encode(t, add_special_tokens=False)) for t in texts)
size = sum(len(t.encode()) for t in texts)
expected["text"] = dict(tokens=tokens, loss=-sum(sums) / tokens, bits_per_byte=-sum(sums) / size / math.log(2))
(out / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
print({n: {k: v for k, v in t.items() if k != "scores"} for n, t in expected["tasks"].items()}, expected["text"])
