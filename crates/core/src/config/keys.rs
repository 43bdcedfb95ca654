//! Every key of a recipe, declared once: meaning, name, type, default, and what other systems call it.

use super::table::{KeyInfo, KeyType, SectionInfo, keys, read};
use super::types::{
    Count, CudaGraphMode, DataSplit, Decay, DispatcherType, DropPolicy, Fp8Format, MasterDtype, OneOrMany,
    OptimizerKind, Packing, PipelineSchedule, PositionKind, Precision, QuantRecipe, Recompute,
    RouterPrecision, StateDtype, WeightDecayStyle, WsdStyle,
};
use super::{LossScale, MlaDims};
use crate::model::config::{Activation, NormKind};
use crate::model::moe_config::ScoreKind;
use serde::{Deserialize, Serialize};

keys! {
    /// The architecture: a preset, a Hugging Face folder, or explicit sizes. Sizes given beside a preset change it.
    model: ModelSection {
        /// A named architecture to train from random weights.
        preset: Option<String> = None, "name", "model_name", "recipe", "architecture", "model_type";
        /// A Hugging Face folder (or a checkpoint) to start from: its shape, its weights and, unless
        /// data.tokenizer says otherwise, its tokenizer.
        hf: Option<String> = None, "hf_model", "hf_path", "pretrained_checkpoint", "pretrained_model_name_or_path", "load";
        /// Decoder layers.
        layers: Option<usize> = None, "num_layers", "num_hidden_layers", "n_layer", "n_layers";
        /// Width of the residual stream.
        hidden: Option<usize> = None, "hidden_size", "n_embd", "d_model", "dim", "embedding_dim";
        /// Query heads.
        heads: Option<usize> = None, "num_attention_heads", "n_head", "n_heads", "num_heads";
        /// Key/value heads; derived as model.heads.
        kv_heads: Option<usize> = None, "num_query_groups", "num_key_value_heads", "n_kv_heads";
        /// Channels per head; derived as hidden / heads.
        head_dim: Option<usize> = None, "kv_channels", "d_head";
        /// Width inside the MLP (of one half when gated); derived as 8/3 hidden when gated, else 4 hidden.
        ffn: Option<usize> = None, "ffn_hidden_size", "intermediate_size", "n_inner", "d_ff";
        /// Tokens in the vocabulary; padding for speed is the program's own business.
        vocab: Option<usize> = None, "vocab_size", "padded_vocab_size";
        /// Longest sequence the model is made for; derived as data.seq_len.
        max_positions: Option<usize> = None, "max_position_embeddings", "n_positions", "block_size";
        /// The norm everywhere in the model; rmsnorm when neither a preset nor this says.
        norm: Option<NormKind> = None, "normalization", "norm_type";
        /// Added to the variance inside a norm; 1e-5 when neither a preset nor this says.
        norm_eps: Option<f64> = None, "layernorm_epsilon", "rms_norm_eps", "norm_epsilon", "layer_norm_epsilon", "layer_norm_eps";
        /// Non-linearity of the MLP; silu when neither a preset nor this says.
        activation: Option<Activation> = None, "hidden_act", "hidden_activation", "activation_func", "activation_function";
        /// Does the MLP multiply by a gate branch (SwiGLU, GeGLU)?
        gated: Option<bool> = None, "gated_linear_unit", "swiglu", "use_glu";
        /// Biases on the q, k, v projections.
        qkv_bias: Option<bool> = None, "add_qkv_bias", "attention_bias";
        /// Bias on the attention output projection.
        proj_bias: Option<bool> = None, "o_bias", "attention_out_bias";
        /// Biases on the MLP projections.
        mlp_bias: Option<bool> = None, "add_bias_linear", "bias";
        /// Norm over each head of q and k before positions enter.
        qk_norm: Option<bool> = None, "qk_layernorm", "use_qk_norm";
        /// A learned logit of each head beside its scores in the softmax.
        attn_sink: Option<bool> = None, "softmax_type", "attention_sinks", "sinks", "learnable_softmax_offset";
        /// Latent attention: keys and values from one narrow row of each token, heads of nope_dim + rope_dim channels for
        /// queries and keys and of v_dim for values.
        mla: Option<MlaDims> = None, "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim";
        /// How positions enter: rope or learned.
        positions: Option<PositionKind> = None, "position_embedding_type", "use_rotary_position_embeddings";
        /// Base of the rotary wavelengths; 10000 when neither a preset nor this says.
        rope_theta: Option<f64> = None, "rotary_base", "rope_base";
        /// Sliding window: a token sees itself and the window - 1 before it. A preset's local layers keep their
        /// places; otherwise every layer gets the window.
        window: Option<usize> = None, "sliding_window", "window_size", "window_attn";
        /// Is the output matrix the embedding matrix?
        tied: Option<bool> = None, "tie_word_embeddings", "share_embeddings_and_output_weights", "untie_embeddings_and_output_weights", "tie_embeddings", "weight_tying";
        /// Standard deviation of initial weights; 0.02 when neither a preset nor this says.
        init_std: Option<f64> = None, "init_method_std", "initializer_range";
    }

    /// Mixtures of experts in place of MLPs: what they are, and how tokens are routed in training.
    moe: MoeSection {
        /// Experts of a layer; unset means that layers have MLPs.
        experts: Option<usize> = None, "num_experts", "num_moe_experts", "num_local_experts", "n_routed_experts";
        /// Experts of each token; 2 when neither a preset nor this says.
        topk: Option<usize> = None, "moe_router_topk", "num_experts_per_tok";
        /// Width inside an expert (of one half when gated); derived as model.ffn.
        ffn: Option<usize> = None, "moe_ffn_hidden_size", "moe_intermediate_size";
        /// Every how many layers are a mixture, from the first on.
        layer_freq: Option<usize> = None, "moe_layer_freq", "decoder_sparse_step";
        /// Layers (from 0) that keep their MLP all the same.
        dense_layers: Option<Vec<usize>> = None, "first_k_dense_replace", "mlp_only_layers";
        /// From logits to scores: softmax, sigmoid or sqrt_softplus.
        score_function: Option<ScoreKind> = None, "moe_router_score_function", "scoring_func";
        /// Take the softmax over all experts, and not over the chosen ones.
        pre_softmax: Option<bool> = None, "moe_router_pre_softmax";
        /// Choose among the best groups of neighbouring experts only: [groups, groups kept].
        groups: Option<[usize; 2]> = None, "moe_router_num_groups", "moe_router_group_topk", "n_group", "topk_group";
        /// Factor on the probabilities of choices.
        route_scale: Option<f64> = None, "moe_router_topk_scaling_factor", "routed_scaling_factor";
        /// Add to each expert's scores, for the choice alone, a bias that follows its load.
        expert_bias: Option<bool> = None, "moe_router_enable_expert_bias";
        /// Bias of the router.
        router_bias: Option<bool> = None, "moe_router_bias";
        /// Biases of experts.
        bias: Option<bool> = None, "moe_bias";
        /// Width that experts work in, where it is not that of the model.
        latent: Option<usize> = None, "moe_latent_size";
        /// Width inside an expert that every token goes to; unset means there is none.
        shared_ffn: Option<usize> = None, "moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", "n_shared_experts";
        /// Weight that expert's output by a learned gate.
        shared_gate: Option<bool> = None, "moe_shared_expert_gate";
        /// How loads are evened out: "aux", "seq_aux" and "global_aux" are losses (over micro-batch, sequence, step) and
        /// may be together; "sinkhorn" and "quantile" choose in their place.
        balance: OneOrMany = OneOrMany::default(), "moe_router_load_balancing_type", "load_balancing_type";
        /// Weight of each loss of moe.balance; derived as 0.01.
        coefficients: Vec<f64> = Vec::new(), "moe_aux_loss_coeff", "router_aux_loss_coef", "aux_loss_coeff", "aux_loss_alpha";
        /// Divide the global loss by the data-parallel size, as Megatron Core does.
        global_over_dp: bool = false, "moe_global_aux_loss_over_dp";
        /// Part of a quantile that a step leaves as it was.
        quantile_keep: f64 = 0.0, "moe_router_qb_ema";
        /// Weight of the mean square of logsumexp over the router's logits.
        z_loss: f64 = 0.0, "moe_z_loss_coeff", "router_z_loss_coef";
        /// Multiply the router's input by numbers from 1 - jitter to 1 + jitter.
        jitter: f64 = 0.0, "moe_input_jitter_eps", "router_jitter_noise";
        /// Type of the router's logits: model (that of the model), f32 or f64.
        router_dtype: RouterPrecision = RouterPrecision::F32, "moe_router_dtype";
        /// Step by which biases of choices follow the load.
        bias_rate: f64 = 1e-3, "moe_router_bias_update_rate", "bias_update_speed";
        /// Tokens that an expert takes at most, as a multiple of the mean load; unset means all that come.
        capacity: Option<f64> = None, "moe_expert_capacity_factor", "capacity_factor";
        /// Which tokens stay within the capacity: the most probable, or the first.
        drop_policy: DropPolicy = DropPolicy::Probable, "moe_token_drop_policy";
        /// Give every expert as many rows as its capacity, of zeros where it has fewer tokens.
        pad_to_capacity: bool = false, "moe_pad_expert_input_to_capacity";
        /// Bound the tokens of each rank, as Megatron Core does, and not those of the micro-batch: results then depend on
        /// the layout.
        capacity_per_rank: bool = false, "moe_capacity_per_rank";
        /// Route at random, for measurements: 0 to nearly even loads, more to uneven ones.
        force_balance: Option<f64> = None, "moe_router_force_load_balancing", "moe_router_force_biased";
        /// How tokens come to experts of other ranks.
        dispatcher: DispatcherType = DispatcherType::AllToAll, "moe_token_dispatcher_type", "moe_flex_dispatcher_backend";
        /// What logged steps say of mixtures: "losses", "imbalance", "entropy", "dropped", "loads" (of every expert),
        /// "per_layer" (the same of each layer), "all"; [] for nothing.
        log: OneOrMany = OneOrMany(vec!["losses".into(), "imbalance".into()]), "moe_per_layer_logging", "moe_metrics";
        /// Write the experts that every token of every step goes to into this folder.
        record: Option<String> = None, "moe_router_trace";
        /// Send tokens to the experts that stand in this folder, step by step, and not to those the router would choose.
        replay: Option<String> = None, "moe_enable_routing_replay";
    }

    /// Prediction of more tokens than the next: layers after the decoder that are each given the next token, too.
    mtp: MtpSection {
        /// Tokens to predict besides the next, each with a layer of its own; 0 means none.
        layers: usize = 0, "mtp_num_layers", "num_nextn_predict_layers", "num_mtp_layers";
        /// Weight of the mean of their losses beside the model's own loss.
        loss_weight: f64 = 0.1, "mtp_loss_scaling_factor", "mtp_loss_coeff";
        /// Use one layer for all of them.
        shared_layer: bool = false, "mtp_use_repeated_layer";
        /// Let them learn without teaching: decoder, embedding and output matrix get no gradient of them.
        detach: bool = false, "mtp_detach_heads";
    }

    /// What the model reads.
    data: DataSection {
        /// Prefix of a .bin/.idx pair made by `ferrotron data build`, a list of them, or "embedded" for the small
        /// corpus inside the program.
        path: OneOrMany = OneOrMany::default(), "data_path", "train_data_path", "dataset", "dataset_path", "dataset_name", "blend", "data_prefix";
        /// One weight per path: how often each is drawn from. Derived as equal weights.
        weights: Vec<f64> = Vec::new(), "blend_weights", "data_weights";
        /// Tokenizer of the data: a folder or a tokenizer.json. Unset means a byte is a token.
        tokenizer: Option<String> = None, "tokenizer_model", "tokenizer_type", "tokenizer_name_or_path", "vocab_file";
        /// Shares of documents for training, validation and test.
        split: DataSplit = DataSplit([99.0, 1.0, 0.0]), "train_val_test_split";
        /// Tokens per sequence; derived as the model's longest, at most 4096.
        seq_len: Option<usize> = None, "seq_length", "sequence_length", "max_length", "max_seq_length", "context_length", "encoder_seq_length";
        /// Restart positions and attention where a new document begins inside a sequence.
        reset_at_documents: bool = false, "reset_position_ids", "reset_attention_mask", "document_mask", "cross_document_attention";
        /// How documents become sequences: none concatenates them and cuts every data.seq_len tokens, documents packs
        /// whole ones, each with its own positions and attention and no label across them; longer ones are cut.
        packing: Packing = Packing::None, "sequence_packing", "pack_sequences", "packed_sequence", "packed_sequence_size", "packed_sequence_specs", "best_fit_packing";
        /// Leave the end-of-document token out of the loss.
        mask_eod_loss: bool = false, "eod_mask_loss";
        /// Id of the end-of-document token; derived from the tokenizer, 0 for bytes.
        eod: Option<u32> = None, "eod_id", "eos_token_id", "eod_token", "eos_id";
        /// Seed of the order of the data.
        seed: u64 = 1234, "data_seed", "dataset_seed", "shuffle_seed";
    }

    /// How long and in what portions.
    train: TrainSection {
        /// Optimizer steps. Set this or train.tokens.
        steps: Option<u64> = None, "train_iters", "max_steps", "max_iters", "iterations", "num_train_steps", "num_steps", "total_steps";
        /// Tokens to train on; becomes steps. Set this or train.steps.
        tokens: Option<Count> = None, "train_tokens", "num_tokens", "max_tokens", "training_tokens";
        /// Sequences per optimizer step.
        global_batch: usize = 32, "global_batch_size", "batch_size", "train_batch_size", "gbs";
        /// Sequences that go through the model at once; derived as what keeps a pass within 4096 tokens.
        micro_batch: Option<usize> = None, "micro_batch_size", "local_batch_size", "per_device_train_batch_size", "mbs", "train_micro_batch_size_per_gpu";
        /// Batch ramp-up: [first batch, increment, samples until train.global_batch is reached].
        ramp: Option<[u64; 3]> = None, "rampup_batch_size", "batch_size_rampup";
        /// Steps between log lines.
        log_every: u64 = 1, "log_interval", "log_freq", "logging_steps", "log_every_n_steps";
        /// Seed of initial weights and dropout.
        seed: u64 = 1234, "random_seed", "init_seed", "seed_everything";
        /// Tokens whose logits exist at a time while the LM head computes the loss, which saves memory and computes logits
        /// twice; derived where the logits of a micro-batch would take more than 8 GiB, 0 means all tokens at once.
        loss_chunk: Option<usize> = None, "loss_chunk_size", "chunked_cross_entropy", "cross_entropy_chunk_size", "logits_chunk_size", "ce_chunk_size";
        /// Label smoothing ε: the target is 1 - ε for the label and ε/(V - 1) for every other token, as in Megatron.
        label_smoothing: f64 = 0.0, "label_smoothing_factor", "smoothing";
        /// What the backward pass computes again instead of keeping it.
        recompute: Recompute = Recompute::None, "recompute_granularity", "recompute_modules", "recompute_activations", "recompute_method", "activation_checkpointing", "activation_checkpoint", "gradient_checkpointing";
        /// Give a whole step to the card as one CUDA graph, which is captured once and replayed to the same bits. auto
        /// does so for one rank on a card where giving it the launches takes more than a fifth of the step's time.
        cuda_graph: CudaGraphMode = CudaGraphMode::Auto, "cuda_graphs", "enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl", "cuda_graph_scope", "use_cuda_graph";
        /// Log the number of zero elements in the reduced gradient as num_zeros; this copies every gradient to the host.
        log_num_zeros: bool = false, "log_num_zeros_in_grad", "num_zeros_in_grad";
        /// Log the energy that the cards use in steps, evaluations and checkpoints left out.
        energy: bool = false, "log_energy", "energy_monitor";
    }

    /// Loss on validation data while training.
    eval: EvalSection {
        /// Steps between evaluations; 0 means never.
        every: u64 = 0, "eval_interval", "eval_steps", "val_check_interval", "eval_freq", "evaluation_interval";
        /// Batches of train.global_batch sequences per evaluation.
        batches: u64 = 8, "eval_iters", "limit_val_batches", "eval_batches";
    }

    /// The update rule.
    optimizer: OptimizerSection {
        /// adamw (decay decoupled), adam (decay added to the gradient) or sgd.
        kind: OptimizerKind = OptimizerKind::AdamW, "optimizer", "optim", "optimizer_type", "name";
        /// Highest learning rate.
        lr: f64 = 3e-4, "learning_rate", "max_lr", "peak_lr";
        /// Lowest learning rate after warm-up; derived as a tenth of optimizer.lr.
        min_lr: Option<f64> = None, "lr_min", "final_lr", "end_lr";
        /// Memory of Adam's first and second moments.
        betas: [f64; 2] = [0.9, 0.95], "adam_beta1", "adam_beta2", "beta1", "beta2", "adam_betas";
        /// Added to the root of Adam's second moment.
        eps: f64 = 1e-8, "adam_eps", "adam_epsilon", "epsilon";
        /// Momentum of sgd.
        momentum: f64 = 0.9, "sgd_momentum";
        /// Weight decay of matrices; biases and norms have none.
        weight_decay: f64 = 0.1, "wd", "start_weight_decay";
        /// Weight decay at the end; derived as optimizer.weight_decay.
        weight_decay_end: Option<f64> = None, "end_weight_decay", "weight_decay_final";
        /// Largest global gradient norm; 0 means no clipping.
        clip: f64 = 1.0, "clip_grad", "grad_clip", "max_grad_norm", "gradient_clip_val", "max_norm", "gradient_clipping";
        /// How the optimizer's moments are kept: f32, bf16, or f16 and fp8 with a scale for each 32 elements.
        state_dtype: StateDtype = StateDtype::F32, "exp_avg_dtype", "exp_avg_sq_dtype", "moment_dtype";
        /// How the f32 weights of the optimizer are kept: f32, or as the remainder that bf16 weights lack.
        master_dtype: MasterDtype = MasterDtype::F32, "main_params_dtype", "master_weights", "store_param_remainders", "use_precision_aware_optimizer";
        /// Leave out steps whose gradients are not finite, up to ten in a row, in place of ending the run.
        skip_nonfinite: bool = false, "skip_nan", "skip_nonfinite_grads", "ignore_nan_grads";
    }

    /// The learning rate and weight decay over the run.
    schedule: ScheduleSection {
        /// Steps of linear warm-up; derived as a tenth of the run, at most 2000.
        warmup: Option<u64> = None, "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction", "warmup_steps", "warmup_iters", "warmup_ratio", "num_warmup_steps";
        /// Learning rate that warm-up starts from.
        init_lr: f64 = 0.0, "lr_warmup_init", "warmup_init_lr";
        /// How the learning rate falls after warm-up.
        decay: Decay = Decay::Cosine, "lr_decay_style", "lr_scheduler_type", "lr_schedule", "scheduler", "lr_scheduler", "decay_type";
        /// Step at which the learning rate reaches optimizer.min_lr; derived as train.steps.
        decay_steps: Option<u64> = None, "lr_decay_iters", "lr_decay_samples", "lr_decay_steps";
        /// Length in steps of the last part of wsd; derived as a tenth of schedule.decay_steps.
        wsd_steps: Option<u64> = None, "lr_wsd_decay_iters", "lr_wsd_decay_samples", "wsd_decay_steps", "cooldown_steps";
        /// Shape of the last part of wsd.
        wsd_style: WsdStyle = WsdStyle::Linear, "lr_wsd_decay_style", "cooldown_style";
        /// How weight decay goes from optimizer.weight_decay to optimizer.weight_decay_end.
        weight_decay_style: WeightDecayStyle = WeightDecayStyle::Constant, "weight_decay_incr_style", "wd_incr_style";
        /// Step at which weight decay reaches its end; derived as train.steps.
        weight_decay_steps: Option<u64> = None, "wd_incr_steps", "weight_decay_incr_steps";
    }

    /// Element types.
    precision: PrecisionSection {
        /// Element type of weights and activations in compute.
        dtype: Precision = Precision::Bf16, "params_dtype", "torch_dtype", "mixed_precision", "bf16", "fp16", "fp32", "autocast_dtype", "pipeline_dtype";
        /// Factor on the loss that f16 training begins with. It halves after steps whose gradients are no numbers, which are
        /// left out (one is forgiven), down to 1, and doubles after 1000 good ones, or as many as stand behind it: [65536, 500].
        loss_scale: LossScale = LossScale::default(), "initial_loss_scale", "init_scale", "min_loss_scale", "hysteresis", "loss_scale_window", "growth_interval", "scale_window";
        /// LinearQuant-bit products of the layers' linear maps, and how numbers are scaled into range: none, current (the fastest
        /// to trust), delayed, block, and mxfp8 and nvfp4, which are emulated.
        recipe: QuantRecipe = QuantRecipe::None, "fp8", "fp8_recipe", "enable_fp8", "fp8_scaling", "float8", "fp4", "fp4_recipe", "nvfp4", "mxfp8", "quantization";
        /// What weights of 8-bit products, those of experts too, are between steps: bf16, from which bytes are made in every
        /// step, or fp8, the bytes alone. The same bits of everything, and 1 byte a parameter instead of 2.
        fp8_params: bool = false, "fp8_param", "fp8_param_gather", "fp8_primary_weights", "fp8_model_init", "quantized_model_init", "enable_fsdp_float8_all_gather";
        /// Run the LM head's GEMMs in FP8 as well, by precision.recipe.
        fp8_lm_head: bool = false, "head", "fp8_head", "fp8_output_layer", "fp8_output_proj";
        /// Quantize q, k, v and the softmax probabilities to E4M3 in the forward attention; only Hopper has kernels for it,
        /// other devices emulate it.
        fp8_attention: bool = false, "attention", "fp8_dpa", "fp8_mha", "fp8_dot_product_attention", "fp8_multi_head_attention";
        /// Formats: hybrid (gradients in E5M2) or e4m3; derived from the scaling.
        format: Option<Fp8Format> = None, "fp8_format", "fp8_mode";
        /// Round scales down to powers of two; derived from the scaling.
        pow2_scales: Option<bool> = None, "force_pow_2_scales", "round_scales_to_power_of_2";
        /// Powers of two that delayed scaling leaves free above the largest magnitude.
        margin: u32 = 0, "fp8_margin";
        /// Steps whose largest magnitude delayed scaling goes by; 1 takes the most recent.
        amax_history: usize = 1024, "fp8_amax_history_len", "amax_history_len", "fp8_amax_compute_algo", "amax_compute_algo";
        /// Steps at the start of delayed scaling whose products stay in precision.dtype while magnitudes are collected.
        calibrate: u64 = 0, "fp8_calibration_steps", "calibration_steps", "calibrating";
        /// Steps between looks at how well operands fit their formats, for the log; such a step is slow. 0 means never.
        stats_every: u64 = 0, "log_fp8_stats_interval", "fp8_stats_interval", "tensor_inspect_interval";
        /// What stays in precision.dtype: "first 1" and "last 1" layers, modules by parts of their names ("mlp.down",
        /// "layers.3"), one product of one ("attn.out:weight_grad"; output, input_grad, weight_grad).
        skip: OneOrMany = OneOrMany::default(), "first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "fp8_wgrad", "filter_fqns";
    }

    /// Saved states to resume from.
    checkpoint: CheckpointSection {
        /// Steps between checkpoints; 0 means none on the way.
        every: u64 = 0, "save_interval", "save_steps", "save_every", "checkpoint_interval", "ckpt_interval";
        /// How many of the newest checkpoints stay; 0 means all.
        keep: u64 = 2, "save_total_limit", "keep_last_k", "most_recent_k", "save_top_k", "keep_latest_k", "max_to_keep";
        /// Save when the run ends.
        at_end: bool = true, "save_at_end", "save_last", "save_on_train_end";
    }

    /// How the work is cut over ranks.
    parallel: ParallelSection {
        /// Tensor-parallel ranks.
        tp: usize = 1, "tensor_model_parallel_size", "tensor_parallel_size", "tensor_parallel_degree";
        /// Context-parallel ranks.
        cp: usize = 1, "context_parallel_size", "context_parallel_degree";
        /// Pipeline stages.
        pp: usize = 1, "pipeline_model_parallel_size", "pipeline_parallel_size", "pipeline_parallel_degree";
        /// Chunks of layers per pipeline stage.
        vp: usize = 1, "virtual_pipeline_model_parallel_size";
        /// Data-parallel ranks.
        dp: usize = 1, "data_parallel_size", "data_parallel_replicate_degree", "data_parallel_shard_degree", "world_size", "num_gpus";
        /// Expert-parallel ranks.
        ep: usize = 1, "expert_model_parallel_size", "expert_parallel_size", "expert_parallel_degree";
        /// Tensor-parallel ranks inside an expert; derived as parallel.tp.
        etp: Option<usize> = None, "expert_tensor_parallel_size";
        /// What ranks with equal weights divide among them: 0 nothing, 1 optimizer state, 2 gradients too.
        zero: usize = 1, "use_distributed_optimizer", "zero_stage", "zero_optimization", "data_parallel_sharding_strategy";
        /// Elements that are summed over ranks at once; unset means enough to keep a network busy.
        bucket: Option<u64> = None, "ddp_bucket_size", "bucket_size";
        /// Order of forward and backward passes, in a pipeline and of one micro-batch beside another.
        schedule: PipelineSchedule = PipelineSchedule::OneForwardOneBackward, "pipeline_parallel_schedule", "pipeline_schedule", "overlap_moe_expert_parallel_comm";
        /// Layers of each pipeline stage, such as "Ett|ttt|ttL"; unset means as even as possible.
        stages: Option<String> = None, "pipeline_model_parallel_layout";
        /// Communicate while computing where the two do not depend on each other. The results are the same bits.
        overlap: bool = true, "overlap_grad_reduce", "overlap_param_gather", "tp_comm_overlap", "overlap_p2p_comm";
    }

    /// Values dropped at random while training.
    dropout: DropoutSection {
        /// Share dropped after the embedding and before each residual addition.
        hidden: f64 = 0.0, "hidden_dropout", "resid_pdrop", "embd_pdrop", "dropout", "resid_dropout";
    }

    /// A sample of text when the run ends.
    generate: GenerateSection {
        /// Tokens to write; 0 means no sample.
        tokens: u64 = 0, "max_new_tokens", "num_tokens_to_generate", "max_tokens_to_generate";
        /// Text to continue; unset means from nothing.
        prompt: Option<String> = None, "prompts", "start";
        /// Sharpness: 0 always takes the likeliest token, 1 draws from the model's own distribution.
        temperature: f64 = 0.8, "temp";
        /// Draw from this many likeliest tokens; 0 means all.
        top_k: u64 = 0, "topk";
        /// Draw from the likeliest tokens that hold this share of the probability.
        top_p: f64 = 1.0, "topp", "nucleus";
    }
}
