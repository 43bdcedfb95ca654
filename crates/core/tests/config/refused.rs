//! Combinations that cannot work are refused with the way out.

use super::{TINY, add, fails};
use ferrotron_core::config::Recipe;

/// What is switched off may be written out with its default, may come from a built-in recipe, and does not keep a stored
/// configuration from being read.
#[test]
fn keys_without_effect_are_refused_only_where_a_user_sets_them() {
    let ok = |r: &Recipe| r.resolve(None).map(drop).unwrap();
    ok(&add(&format!("{TINY}optimizer.momentum = 0.9\noptimizer.nesterov = false\neval.min_delta = 0\n"))
        .unwrap());
    // Any group may be updated by SGD.
    let groups =
        "optimizer.momentum = 0.5\noptimizer.groups = [{ params = \"norm\", optimizer = \"sgd\" }]\n";
    ok(&add(&format!("{TINY}{groups}")).unwrap());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.toml");
    std::fs::write(&path, format!("{TINY}optimizer.momentum = 0.5\n")).unwrap();
    let mut stored = Recipe::read_stored(&path).unwrap();
    ok(&stored);
    stored.set("optimizer.momentum=0.6").unwrap();
    assert!(stored.resolve(None).is_err());
}

/// Earlier versions took keys of delayed scaling beside any recipe, and any name in precision.skip.
#[test]
fn stored_runs_with_quantization_keys_without_effect_stay_readable() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.toml");
    for line in ["precision.margin = 1", "precision.amax_history = 16", "precision.skip = [\"mlp.dwon\"]"] {
        let text = format!("{TINY}precision.recipe = \"fp8-current\"\n{line}\n");
        let key = line.split(' ').next().unwrap();
        assert!(fails(&text).contains(key), "{line}");
        std::fs::write(&path, text).unwrap();
        Recipe::read_stored(&path).unwrap().resolve(None).unwrap();
    }
}

#[test]
fn impossible_combinations_are_refused_with_the_way_out() {
    let cases = [
        ("parallel.ep = 2", "r.toml:3: parallel.ep: ep=2 needs an MoE model, which this is not; take ep=1"),
        (
            "parallel.etp = 64",
            "r.toml:3: parallel.etp: 64 splits experts, which this model has none of, and does not divide the 1 ranks",
        ),
        (
            "moe.experts = 4\nparallel.etp = 64",
            "r.toml:4: parallel.etp: etp x ep = 64 ranks hold the experts, which makes parallel.dp 64; it does not divide",
        ),
        ("parallel.dp = 0", "r.toml:3: parallel.dp: must be at least 1"),
        ("parallel.vp = 2", "r.toml:3: parallel.vp: needs a pipeline"),
        ("parallel.stages = \"Et|L\"", "parallel.stages"),
        ("parallel.pp = 4611686018427387904", "r.toml:3: parallel.pp: 4611686018427387904 is too large"),
        ("parallel.tp = 4294967296\nparallel.dp = 4294967296", "parallel.tp: 4294967296 is too large"),
        ("parallel.zero = 4", "r.toml:3: parallel.zero: must be 0, 1, 2 or 3"),
        ("parallel.comm_unit = 0", "parallel.comm_unit: must be at least 1 byte; leave it out to derive it"),
        ("parallel.comm_unit = \"8 apples\"", "a number of bytes such as 800000000, \"800MB\" or \"512MiB\""),
        (
            "parallel.zero = 3\nparallel.fsdp_outer = \"optimizer\"",
            "parallel.fsdp_outer: is for groups of ranks that hold the same shards; set parallel.fsdp_group",
        ),
        ("parallel.fsdp_group = 2", "parallel.fsdp_group: is for sharded weights; set parallel.zero to 3"),
        (
            "parallel.zero = 3\nparallel.fsdp_group = 3\nparallel.dp = 4",
            "parallel.fsdp_group: must divide the 4 data-parallel ranks",
        ),
        ("parallel.tp = 3", "parallel.tp: tp=3 does not divide"),
        (
            "train.micro_batch = 5",
            "r.toml:3: train.micro_batch: 5 does not divide train.global_batch = 32; change one",
        ),
        ("data.seq_len = 257", "r.toml:3: data.seq_len: 257 tokens are longer than the model's 256"),
        ("data.seq_len = 0", "at least 1"),
        ("model.kv_heads = 3", "r.toml:3: model.kv_heads: 3 key/value heads do not divide 4"),
        ("model.head_dim = 33", "even number of channels"),
        ("model.heads = 0", "model.heads: 0 is too small"),
        ("model.layers = 99999999", "too large"),
        ("model.window = 0", "a token sees itself"),
        ("offload.activations = 4", "offload.activations: the last of 4 layers stays"),
        ("offload.activations = \"some\"", "\"auto\""),
        ("offload.optimizer = 1.5", "offload.optimizer"),
        (
            "offload.host_budget = 0",
            "r.toml:3: offload.host_budget: must be at least 1 byte; leave it out for no limit",
        ),
        ("offload.optimizer = \"most\"", "\"auto\""),
        ("model.vocab = 100\ndata.path = \"embedded\"", "256 bytes"),
        ("data.eod = 256", "outside the vocabulary"),
        ("data.weights = [1, 2]", "2 weights for 0 paths"),
        ("data.path = [\"a\", \"embedded\"]", "stands alone"),
        ("data.split = [0, 1, 0]", "above 0"),
        ("eval.every = 5\ndata.split = [1, 0, 0]", "no validation data"),
        ("eval.every = 5\neval.batches = 0", "r.toml:4: eval.batches: 0 is too small"),
        (
            "eval.every = 5\neval.batches = 100000000\ntrain.micro_batch = 1",
            "r.toml:4: eval.batches: 100000000 batches, each of 32 micro-batches on a rank, are too many for an evaluation; it can have at most 2097152",
        ),
        ("eval.every = 5\neval.batches = 1000000000000\ntrain.micro_batch = 32", "at most 67108864"),
        ("optimizer.lr = 0", "above 0"),
        ("optimizer.min_lr = 1", "between 0 and optimizer.lr"),
        ("optimizer.betas = [0.9, 1.0]", "below 1"),
        ("optimizer.clip = -1", "0 means no clipping"),
        ("optimizer.nesterov = true\noptimizer.momentum = 0.0", "optimizer.nesterov: needs a momentum"),
        ("optimizer.groups = [{ lr_factor = 2.0 }]", "optimizer.groups: expected a list of tables"),
        ("optimizer.groups = [{ params = \"norm\", lr = 2.0 }]", "with any of optimizer, lr_factor"),
        (
            "optimizer.groups = [{ params = \"norms\" }]",
            "r.toml:3: optimizer.groups: \"norms\" selects no parameter",
        ),
        (
            "optimizer.groups = [{ params = \"*.attn.q.weight\" }]",
            "selects a part of a parameter that holds layers.0.attn.q.weight, layers.0.attn.k.weight",
        ),
        ("optimizer.groups = [{ params = \"norm\", optimizer = \"muon\" }]", "Muon updates matrices"),
        ("optimizer.groups = [{ params = \"*\", frozen = true }]", "every parameter is frozen"),
        ("lora.dora = true", "lora.dora: there are no adapters; set lora.rank"),
        ("lora.alpha = 8", "lora.alpha: there are no adapters; set lora.rank"),
        ("lora.rank = 4\nlora.targets = \"q_prj\"", "\"q_prj\" names no linear of the model"),
        ("lora.rank = 4\nlora.exclude = \"layers\"", "lora.exclude: leaves no linear to adapt"),
        ("lora.rank = 4\nlora.b_lr_factor = 0", "lora.b_lr_factor: 0 is too small"),
        (
            "lora.rank = 4\nprecision.recipe = \"fp8-delayed\"\nprecision.fp8_params = true",
            "frozen weights have no amax history",
        ),
        (
            "lora.rank = 4\nprecision.recipe = \"fp8-current\"\noptimizer.groups = [{ params = \"matrix\" }]",
            "is trained, but the base model of adapters is quantized once",
        ),
        ("optimizer.muon = { steps = 5 }", "optimizer.muon: no parameter is updated by Muon"),
        ("optimizer.kind = \"muon\"\noptimizer.muon = { steps = 0 }", "steps must be 1 to 100"),
        ("optimizer.kind = \"muon\"\noptimizer.muon = { eps = nan }", "not finite"),
        ("optimizer.kind = \"muon\"\noptimizer.muon = { extra_scale = 0.0 }", "must be above 0"),
        ("optimizer.kind = \"muon\"\noptimizer.muon = { rest = \"muon\" }", "rest updates what is no matrix"),
        ("optimizer.kind = \"muon\"\noptimizer.state_dtype = \"fp8\"", "the momentum of Muon is f32 or bf16"),
        (
            "optimizer.kind = \"muon\"\noptimizer.muon = { adaptive = \"normuon\", tp_mode = \"blockwise\" }\nparallel.tp = 2",
            "normuon needs whole rows and columns",
        ),
        ("schedule.warmup = 10", "r.toml:3: schedule.warmup: 10 steps of warm-up leave none"),
        ("schedule.decay = \"wsd\"\nschedule.wsd_steps = 10", "do not fit"),
        (
            "schedule.init_lr = 0.1",
            "r.toml:3: schedule.init_lr: warm-up rises to optimizer.lr, which is 0.0003",
        ),
        (
            "optimizer.weight_decay_end = 0.2",
            "r.toml:3: optimizer.weight_decay_end: differs from optimizer.weight_decay, which is 0.1; set schedule.weight_decay_style",
        ),
        (
            "optimizer.weight_decay_end = 0.01\nschedule.weight_decay_style = \"linear\"",
            "r.toml:3: optimizer.weight_decay_end: weight decay grows from optimizer.weight_decay, which is 0.1; set at least that",
        ),
        ("train.ramp = [3, 2, 10]", "do not lead from 3 to"),
        ("train.ramp = [64, 2, 10]", "above train.global_batch"),
        ("train.ramp = [8, 8, 0]", "at least 1"),
        (
            "train.ramp = [8, 8, 10]\ntrain.micro_batch = 16",
            "must be multiples of 16: train.micro_batch = 16 times parallel.dp = 1",
        ),
        (
            "fault.spike = 10",
            "r.toml:3: fault.spike: a spike is run again with fault.rerun; set that as well",
        ),
        (
            "fault.spike = 10\nfault.hash_every = 5\nfault.snapshot_every = 5",
            "r.toml:3: fault.spike: a spike is run again with fault.rerun",
        ),
        (
            "fault.on_bad_step = \"skip\"",
            "r.toml:3: fault.on_bad_step: is for a step that is bad when it is run again too; set fault.rerun",
        ),
        (
            "moe.experts = 4\nmoe.capacity_per_rank = true",
            "r.toml:4: moe.capacity_per_rank: no token is dropped without a capacity; set moe.capacity as well",
        ),
        (
            "moe.experts = 4\nmoe.drop_policy = \"first\"",
            "r.toml:4: moe.drop_policy: no token is dropped without a capacity; set moe.capacity as well",
        ),
        ("dropout.hidden = 1.0", "below 1"),
        (
            "train.cuda_graph = \"on\"\ndata.reset_at_documents = true\nparallel.cp = 2",
            "r.toml:3: train.cuda_graph: steps cannot be replayed: with parallel.cp, what ranks send",
        ),
        (
            "train.cuda_graph = \"on\"\ndata.packing = \"documents\"\ndata.path = \"a\"\nmoe.experts = 4\nmoe.capacity = 2.0",
            "with data.packing, moe.capacity depends on the padding",
        ),
        (
            "data.packing = \"documents\"\ndata.path = \"embedded\"",
            "data.packing: the embedded corpus is one text",
        ),
        (
            "data.packing = \"documents\"\ndata.path = \"a\"\nmoe.experts = 4\nmoe.balance = \"quantile\"",
            "moe.balance: quantile needs micro-batches of equal length without padding",
        ),
        ("data.packing = true", "data.packing"),
        ("data.pack_sequences = true", "data.packing"),
        ("train.cuda_graph = \"on\"\nparallel.pp = 2", "pipeline stages"),
        ("moe.experts = 4\nmoe.topk = 1", "the router learns nothing"),
        ("moe.experts = 2048", "moe.experts is 2048, it must be 1 to 1024"),
        ("moe.experts = 64\nmoe.topk = 40", "moe.topk is 40, it must be 1 to 32"),
        (
            "moe.experts = 4\nmoe.topk = 1\nmoe.balance = \"sinkhorn\"\nmoe.score_function = \"softmax\"",
            "the router learns nothing",
        ),
        (
            "moe.experts = 4\nmoe.topk = 2\nmoe.balance = \"sinkhorn\"\nmoe.score_function = \"sigmoid\"",
            "moe.score_function: sinkhorn weights several experts of a token by a softmax over all; set",
        ),
        (
            "moe.experts = 4\nmoe.topk = 1\nmoe.balance = \"sinkhorn\"\nmoe.score_function = \"sqrt_softplus\"",
            "moe.score_function: sinkhorn weights the only expert of a token by a sigmoid; set",
        ),
        // Rows of 17 tokens become 20 for two cp ranks.
        (
            "moe.experts = 17\nmoe.topk = 1\nmoe.score_function = \"sigmoid\"\nmoe.balance = \"quantile\"\ndata.seq_len = 17\n\
             train.micro_batch = 1\nparallel.cp = 2",
            "moe.balance: quantile needs tokens x topk = 20·1",
        ),
        (
            "moe.experts = 4\nmoe.balance = \"quantile\"\ndata.reset_at_documents = true\nparallel.cp = 2",
            "parallel.cp pads every document",
        ),
        (
            "moe.experts = 4\nmoe.capacity = 1.25\nmoe.capacity_per_rank = true\nmoe.pad_to_capacity = true\n\
             data.reset_at_documents = true\nparallel.cp = 2\nparallel.dp = 2\nparallel.ep = 4",
            "moe.pad_to_capacity: needs micro-batches of equal length, and parallel.cp pads every document",
        ),
        (
            "moe.experts = 4\nmoe.balance = \"quantile\"\nmoe.router_dtype = \"model\"\nprecision.dtype = \"bf16\"",
            "moe.router_dtype: quantile compares f32 logits",
        ),
        (
            "moe.experts = 4\nmoe.split_headroom = 17",
            "moe.split_headroom: must be from 0, with which the host reads the counts, to 16",
        ),
        (
            "moe.experts = 4\nmoe.split_headroom = 0.5\nmoe.dispatcher = \"all_gather\"",
            "moe.split_headroom: has no effect here; set moe.dispatcher = \"all_to_all\"",
        ),
        (
            "train.cuda_graph = \"on\"\nmoe.experts = 4\nparallel.dp = 2\nparallel.ep = 2\nmoe.split_headroom = 0",
            "moe.pad_to_capacity",
        ),
        ("train.cuda_graph = \"maybe\"", "expected one of \"auto\", \"on\", \"off\", found \"maybe\""),
        ("generate.tokens = 256", "ask for fewer"),
        ("generate.top_p = 0", "at most 1"),
        ("train.global_batch = 99999999999999", "too large"),
        ("optimizer.master_dtype = \"bf16\"", "expected one of \"f32\", \"remainder\", found \"bf16\""),
        ("optimizer.state_dtype = \"fp4\"", "expected one of \"f32\", \"bf16\", \"f16\", \"fp8\""),
        ("optimizer.master_dtype = \"remainder\"\nprecision.dtype = \"f32\"", "their own masters"),
        ("precision.fp8_params = true", "precision.fp8_params: FP8 parameters need an FP8 recipe"),
        ("precision.fp8_params = true\nprecision.recipe = \"mxfp8\"", "emulated"),
        (
            "precision.fp8_params = true\nprecision.recipe = \"fp8-block\"\nprecision.skip = [\"attn\", \"mlp:output\"]",
            "precision.fp8_params: no weight is used by FP8 GEMMs alone",
        ),
        ("precision.fp8_params = true\nprecision.recipe = \"nvfp4\"", "emulated"),
        (
            "precision.fp8_params = true\nprecision.recipe = \"fp8-current\"\noptimizer.master_dtype = \"remainder\"",
            "FP8 parameters have no bf16 weights",
        ),
        ("precision.fp8_param_gather = true", "precision.fp8_params"),
        ("model.rope_theta = 0", "above 0"),
        ("model.norm_eps = 1e-60", "above 0"),
    ];
    for (line, part) in cases {
        let text = fails(&format!("{TINY}{line}\n"));
        assert!(text.contains(part), "{line}: {text}");
    }
    for (key, value, way_out) in [
        ("optimizer.momentum", "0.5", "optimizer.kind = \"sgd\""),
        ("optimizer.nesterov", "true", "optimizer.kind = \"sgd\""),
        ("optimizer.betas", "[0.8, 0.9]\noptimizer.kind = \"sgd\"", "optimizer.kind = \"adamw\""),
        ("optimizer.eps", "1e-6\noptimizer.kind = \"lion\"", "optimizer.kind = \"adamw\""),
        ("schedule.wsd_steps", "2", "schedule.decay = \"wsd\""),
        ("schedule.wsd_style", "\"cosine\"", "schedule.decay = \"wsd\""),
        ("schedule.weight_decay_steps", "5", "schedule.weight_decay_style"),
        ("precision.format", "\"e4m3\"", "precision.recipe"),
        ("precision.pow2_scales", "true", "precision.recipe"),
        ("offload.optimizer_compute", "\"cpu\"", "offload.optimizer"),
        ("eval.min_delta", "0.1", "eval.patience"),
        ("fault.shrink", "true", "fault.restarts"),
        ("data.format", "\"chat\"\ndata.path = \"embedded\"", "data.path"),
    ] {
        let text = fails(&format!("{TINY}{key} = {value}\n"));
        assert_eq!(
            text.split("; ").next(),
            Some(format!("r.toml:3: {key}: has no effect here").as_str()),
            "{text}"
        );
        assert!(text.contains(&format!("set {way_out}")), "{text}");
    }
    assert!(fails("").contains("no model: set model.preset"));
    assert!(fails("model.layers = 2").contains("set model.hidden, model.heads, model.vocab as well"));
    assert!(
        fails("model.preset = \"tiny\"").contains("train.steps (or --steps), train.tokens or train.epochs")
    );
    assert!(fails("model.preset = \"llama-1b\"\ntrain.steps = 1").contains("no data: set data.path"));
    assert!(fails("model.preset = \"tinny\"").contains("no preset is called \"tinny\""));
    assert!(
        fails(
            "model.preset = \"tiny\"\nmodel.positions = \"learned\"\nmodel.rope_theta = 1.0\ntrain.steps = 1"
        )
        .contains("positions are learned")
    );
}
