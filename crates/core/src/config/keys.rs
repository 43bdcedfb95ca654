//! Every key of a recipe, declared once: meaning, name, type, default, and what other systems call it.

use super::table::{KeyInfo, KeyType, SectionInfo, keys, read};
use super::types::{
    BadStepPolicy, ByteCount, Count, CudaGraphMode, DataFormat, DataSplit, Decay, DispatcherType, DropPolicy,
    Fp8Format, FsdpOuter, MasterDtype, MuonSettings, OffloadedActivations, OffloadedState, OneOrMany,
    OptimizerCompute, OptimizerKind, Packing, ParamGroupList, PipelineSchedule, PositionKind, Precision,
    QuantRecipe, Recompute, RouterPrecision, SaveFailurePolicy, StateDtype, TimeSpan, Truncation,
    WeightDecayStyle, WsdStyle,
};
use super::{LossScale, MlaDims};
use crate::model::config::{Activation, NormKind};
use crate::model::moe_config::ScoreKind;
use serde::{Deserialize, Serialize};

keys! {
    /// Model architecture: a preset, a Hugging Face folder, or explicit sizes; sizes beside a preset override it.
    model: ModelSection {
        /// Named architecture, trained from random weights.
        preset: Option<String> = None, "name", "model_name", "recipe", "architecture", "model_type";
        /// Hugging Face folder or checkpoint to start from: architecture, weights and, unless data.tokenizer is set, tokenizer.
        hf: Option<String> = None, "hf_model", "hf_path", "pretrained_checkpoint", "pretrained_model_name_or_path", "load";
        /// Number of decoder layers.
        layers: Option<usize> = None, "num_layers", "num_hidden_layers", "n_layer", "n_layers";
        /// Hidden size: width of the residual stream.
        hidden: Option<usize> = None, "hidden_size", "n_embd", "d_model", "dim", "embedding_dim";
        /// Number of query heads.
        heads: Option<usize> = None, "num_attention_heads", "n_head", "n_heads", "num_heads";
        /// Number of key/value heads (query groups); derived as model.heads.
        kv_heads: Option<usize> = None, "num_query_groups", "num_key_value_heads", "n_kv_heads";
        /// Head dimension; derived as hidden / heads.
        head_dim: Option<usize> = None, "kv_channels", "d_head";
        /// Intermediate size of the MLP (of one branch if gated); derived as 8/3 hidden if gated, else 4 hidden.
        ffn: Option<usize> = None, "ffn_hidden_size", "intermediate_size", "n_inner", "d_ff";
        /// Vocabulary size without padding.
        vocab: Option<usize> = None, "vocab_size";
        /// Longest sequence the model supports; derived as data.seq_len.
        max_positions: Option<usize> = None, "max_position_embeddings", "n_positions", "block_size";
        /// Normalization of all layers; rmsnorm unless a preset says otherwise.
        norm: Option<NormKind> = None, "normalization", "norm_type";
        /// Epsilon added to the variance in a norm; 1e-5 unless a preset says otherwise.
        norm_eps: Option<f64> = None, "layernorm_epsilon", "rms_norm_eps", "norm_epsilon", "layer_norm_epsilon", "layer_norm_eps";
        /// Activation function of the MLP; silu unless a preset says otherwise.
        activation: Option<Activation> = None, "hidden_act", "hidden_activation", "activation_func", "activation_function";
        /// Gated linear unit in the MLP (SwiGLU, GeGLU).
        gated: Option<bool> = None, "gated_linear_unit", "swiglu", "use_glu";
        /// Bias in the q, k and v projections.
        qkv_bias: Option<bool> = None, "add_qkv_bias", "attention_bias";
        /// Bias in the attention output projection.
        proj_bias: Option<bool> = None, "o_bias", "attention_out_bias";
        /// Bias in the MLP projections.
        mlp_bias: Option<bool> = None, "add_bias_linear", "bias";
        /// Normalize each head of q and k before RoPE.
        qk_norm: Option<bool> = None, "qk_layernorm", "use_qk_norm";
        /// Attention sinks: a learned logit per head in the softmax of attention.
        attn_sink: Option<bool> = None, "softmax_type", "attention_sinks", "sinks", "learnable_softmax_offset";
        /// Multi-head latent attention (MLA): ranks of the compressed queries and keys/values, and head dimensions nope_dim +
        /// rope_dim of q and k and v_dim of v.
        mla: Option<MlaDims> = None, "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim";
        /// Position embedding: rope or learned.
        positions: Option<PositionKind> = None, "position_embedding_type", "use_rotary_position_embeddings";
        /// Base of the rotary frequencies; 10000 unless a preset says otherwise.
        rope_theta: Option<f64> = None, "rotary_base", "rope_base";
        /// Sliding-window attention: a token attends to itself and the window - 1 tokens before it, in the local layers of the
        /// preset, or in all layers if it has none.
        window: Option<usize> = None, "sliding_window", "window_size", "window_attn";
        /// Share the weights of the embedding and the LM head.
        tied: Option<bool> = None, "tie_word_embeddings", "share_embeddings_and_output_weights", "untie_embeddings_and_output_weights", "tie_embeddings", "weight_tying";
        /// Standard deviation of initial weights; 0.02 unless a preset says otherwise.
        init_std: Option<f64> = None, "init_method_std", "initializer_range";
    }

    /// Mixture of experts (MoE): the architecture, and how tokens are routed in training.
    moe: MoeSection {
        /// Number of experts in an MoE layer; unset means a dense model.
        experts: Option<usize> = None, "num_experts", "num_moe_experts", "num_local_experts", "n_routed_experts";
        /// Experts per token (top-k); 2 unless a preset says otherwise.
        topk: Option<usize> = None, "moe_router_topk", "router_topk", "num_experts_per_tok", "experts_per_token";
        /// Intermediate size of an expert (of one branch if gated); derived as model.ffn.
        ffn: Option<usize> = None, "moe_ffn_hidden_size", "moe_intermediate_size";
        /// Every how many layers is an MoE layer, counted from the first.
        layer_freq: Option<usize> = None, "moe_layer_freq";
        /// Indices of layers, from 0, that stay dense.
        dense_layers: Option<Vec<usize>> = None, "first_k_dense_replace", "mlp_only_layers";
        /// Score function of the router: softmax, sigmoid or sqrt_softplus.
        score_function: Option<ScoreKind> = None, "moe_router_score_function", "scoring_func";
        /// Take the softmax over all experts before the top-k, instead of over the selected ones after it.
        pre_softmax: Option<bool> = None, "moe_router_pre_softmax";
        /// Group-limited routing: [number of expert groups, groups per token].
        groups: Option<[usize; 2]> = None, "moe_router_num_groups", "moe_router_group_topk", "n_group", "topk_group";
        /// Scaling factor of the routing probabilities.
        route_scale: Option<f64> = None, "moe_router_topk_scaling_factor", "routed_scaling_factor";
        /// Add a bias per expert to the scores for top-k selection only, updated to balance the load without a loss.
        expert_bias: Option<bool> = None, "moe_router_enable_expert_bias";
        /// Bias in the router.
        router_bias: Option<bool> = None, "moe_router_bias";
        /// Bias in the experts.
        bias: Option<bool> = None, "moe_bias";
        /// Latent size of the experts, where it differs from the hidden size.
        latent: Option<usize> = None, "moe_latent_size";
        /// Intermediate size of the shared expert, which every token uses; unset means none.
        shared_ffn: Option<usize> = None, "moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", "n_shared_experts";
        /// Multiply the shared expert's output by a learned sigmoid gate.
        shared_gate: Option<bool> = None, "moe_shared_expert_gate";
        /// Load balancing: the auxiliary losses "aux", "seq_aux" and "global_aux" (over micro-batch, sequence, global batch),
        /// which may be combined, or the routing methods "sinkhorn" or "quantile".
        balance: OneOrMany = OneOrMany::default(), "moe_router_load_balancing_type", "load_balancing_type";
        /// Coefficient of each auxiliary loss of moe.balance; derived as 0.01.
        coefficients: Vec<f64> = Vec::new(), "moe_aux_loss_coeff", "router_aux_loss_coef", "aux_loss_coeff", "aux_loss_alpha";
        /// Divide the gradient of "global_aux" by the data-parallel size, as Megatron Core does.
        global_over_dp: bool = false, "moe_global_aux_loss_over_dp";
        /// Decay of the moving average of quantiles, for moe.balance = "quantile".
        quantile_keep: f64 = 0.0, "moe_router_qb_ema";
        /// Coefficient of the router z-loss, the mean squared logsumexp of the router's logits.
        z_loss: f64 = 0.0, "moe_z_loss_coeff", "router_z_loss_coef";
        /// Input jitter: multiply the router's input by uniform noise in [1 - jitter, 1 + jitter].
        jitter: f64 = 0.0, "moe_input_jitter_eps", "router_jitter_noise";
        /// Dtype of the router's logits: model (the model's dtype), f32 or f64.
        router_dtype: RouterPrecision = RouterPrecision::F32, "moe_router_dtype";
        /// Update rate of moe.expert_bias.
        bias_rate: f64 = 1e-3, "moe_router_bias_update_rate", "bias_update_speed";
        /// Capacity factor: most tokens per expert as a multiple of the mean; unset means dropless.
        capacity: Option<f64> = None, "moe_expert_capacity_factor", "capacity_factor";
        /// Which tokens an expert over its capacity keeps: the most probable ones, or the first of every sequence.
        drop_policy: DropPolicy = DropPolicy::Probable, "moe_token_drop_policy";
        /// Pad each expert's input with zeros to its capacity, so that messages have a fixed size; with moe.capacity_per_rank.
        pad_to_capacity: bool = false, "moe_pad_expert_input_to_capacity";
        /// Apply the capacity per rank, as Megatron Core does, instead of per micro-batch; results then depend on the layout.
        capacity_per_rank: bool = false, "moe_capacity_per_rank";
        /// Random routing for benchmarks: 0 is balanced, larger values give a more uneven load.
        force_balance: Option<f64> = None, "moe_router_force_load_balancing", "moe_router_force_biased";
        /// Token dispatcher between expert-parallel ranks.
        dispatcher: DispatcherType = DispatcherType::AllToAll, "moe_token_dispatcher_type", "moe_flex_dispatcher_backend";
        /// Headroom of all_to_all messages beyond what the recent steps sent, as a share, so that the host need not wait for the counts
        /// on GPUs; 0: it reads them in every layer.
        split_headroom: f64 = 0.25;
        /// MoE metrics to log: "losses", "imbalance", "entropy", "dropped", "loads" (tokens per expert), "per_layer" (each of
        /// them per layer as well), "all"; [] for none.
        log: OneOrMany = OneOrMany(vec!["losses".into(), "imbalance".into()]), "moe_per_layer_logging", "moe_metrics";
        /// Record the routing of every token and step in this folder.
        record: Option<String> = None, "moe_router_trace";
        /// Replay routing recorded in this folder instead of the router's top-k.
        replay: Option<String> = None, "moe_enable_routing_replay";
    }

    /// Multi-token prediction (MTP): extra layers after the decoder, each predicting one more token ahead.
    mtp: MtpSection {
        /// Number of MTP layers, one per additional predicted token; 0 means none.
        layers: usize = 0, "mtp_num_layers", "num_nextn_predict_layers", "num_mtp_layers";
        /// Weight of the mean MTP loss in the total loss.
        loss_weight: f64 = 0.1, "mtp_loss_scaling_factor", "mtp_loss_coeff";
        /// Share one layer over all MTP depths.
        shared_layer: bool = false, "mtp_use_repeated_layer";
        /// Detach MTP layers: their loss sends no gradient into the decoder, embedding or LM head.
        detach: bool = false, "mtp_detach_heads";
    }

    /// Training data.
    data: DataSection {
        /// Text or JSONL files, folders or globs (also .gz and .zst), prefixes of .bin/.idx pairs from `ferrotron data build`,
        /// one or a list of them, or "embedded" for the small built-in corpus.
        path: OneOrMany = OneOrMany::default(), "data_path", "train_data_path", "dataset", "dataset_path", "dataset_name", "blend", "data_prefix";
        /// Blend weight of each path; derived as equal weights.
        weights: Vec<f64> = Vec::new(), "blend_weights", "data_weights";
        /// Tokenizer folder or tokenizer.json; unset means byte-level tokens.
        tokenizer: Option<String> = None, "tokenizer_model", "tokenizer_type", "tokenizer_name_or_path", "tokenizer_path", "vocab_file";
        /// What lines of a .jsonl are: text in data.field, or chat, which are conversations (messages, ShareGPT conversations,
        /// or prompt and completion) with a loss on the assistant's turns; auto goes by the first line.
        format: DataFormat = DataFormat::Auto, "dataset_type", "dataset_format", "data_format";
        /// JSONL field that holds the text of a document.
        field: String = "text".into(), "text_field", "text_key", "dataset_text_field", "json_keys", "text_column";
        /// Chat template: a Jinja file, or "none" to join prompt and completion as they are; unset means that of the tokenizer's
        /// folder.
        chat_template: Option<String> = None, "chat_template_path", "chat_template_jinja", "custom_chat_template";
        /// How to truncate conversations longer than data.seq_len tokens.
        truncation: Truncation = Truncation::KeepStart, "truncation_mode", "truncation_side", "truncation_method", "excess_length_strategy";
        /// Folder of tokenized text files; derived as FERROTRON_CACHE/data or the user's cache folder.
        cache: Option<String> = None, "data_cache_path", "dataset_prepared_path", "cache_dir";
        /// Refuse data that was made with another tokenizer than the run's; `data build` stores the tokenizer's digest.
        check_tokenizer: bool = true, "verify_tokenizer";
        /// Split of documents into training, validation and test.
        split: DataSplit = DataSplit([99.0, 1.0, 0.0]), "train_val_test_split";
        /// Sequence length in tokens; derived as model.max_positions, at most 4096.
        seq_len: Option<usize> = None, "seq_length", "sequence_length", "max_length", "max_seq_length", "context_length", "encoder_seq_length";
        /// Reset position ids and the attention mask at document boundaries.
        reset_at_documents: bool = false, "reset_position_ids", "reset_attention_mask", "document_mask", "cross_document_attention";
        /// How documents become sequences: none concatenates texts and cuts every data.seq_len tokens, and gives a conversation
        /// a row of its own; documents packs whole texts or conversations, each with its own positions and attention and no
        /// label across them; longer texts are cut, longer conversations follow data.truncation; padding_free makes every text
        /// or conversation a sample of its own length, and concatenates those of a micro-batch without padding.
        packing: Packing = Packing::None, "sequence_packing", "pack_sequences", "packed_sequence", "packed_sequence_size", "packed_sequence_specs", "best_fit_packing", "padding_free", "remove_padding", "flatten";
        /// Mask the end-of-document token in the loss.
        mask_eod_loss: bool = false, "eod_mask_loss";
        /// Id of the end-of-document token; derived from the tokenizer, 0 for bytes.
        eod: Option<u32> = None, "eod_id", "eos_token_id", "eod_token", "eos_id";
        /// Seed of the data shuffle.
        seed: u64 = 1234, "data_seed", "dataset_seed", "shuffle_seed";
    }

    /// Length of the run, batch size and recomputation.
    train: TrainSection {
        /// Number of optimizer steps; set this, train.tokens or train.epochs.
        steps: Option<u64> = None, "train_iters", "max_steps", "max_iters", "iterations", "num_train_steps", "num_steps", "total_steps";
        /// Number of training tokens, from which the steps follow; set this, train.steps or train.epochs.
        tokens: Option<Count> = None, "train_tokens", "num_tokens", "max_tokens", "training_tokens";
        /// Number of epochs: how often the run reads the training data, from which the steps follow; set this, train.steps or
        /// train.tokens.
        epochs: Option<f64> = None, "num_epochs", "num_train_epochs", "max_epochs";
        /// Global batch size in sequences.
        global_batch: usize = 32, "global_batch_size", "batch_size", "train_batch_size", "gbs";
        /// Micro-batch size in sequences; derived so that a micro-batch has at most 4096 tokens and, where the batch allows, a
        /// pipeline four micro-batches per stage.
        micro_batch: Option<usize> = None, "micro_batch_size", "local_batch_size", "per_device_train_batch_size", "mbs", "train_micro_batch_size_per_gpu";
        /// Batch-size ramp-up: [initial batch size, increment, samples until train.global_batch].
        ramp: Option<[u64; 3]> = None, "rampup_batch_size", "batch_size_rampup";
        /// Steps between log lines.
        log_every: u64 = 1, "log_interval", "log_freq", "logging_steps", "log_every_n_steps";
        /// Seed of initial weights and dropout.
        seed: u64 = 1234, "random_seed", "init_seed", "seed_everything";
        /// Tokens whose logits exist at a time while the LM head computes the loss, which saves memory and computes logits
        /// twice; derived where the logits of a micro-batch would take more than 8 GiB, 0 means all tokens at once.
        loss_chunk: Option<usize> = None, "loss_chunk_size", "chunked_cross_entropy", "cross_entropy_chunk_size", "logits_chunk_size", "ce_chunk_size";
        /// Tokens of a rank that a dense MLP computes at a time, for long sequences; backward recomputes them. Unset means all.
        mlp_chunk: Option<usize> = None, "mlp_chunk_size", "tiled_mlp", "mlp_chunks_for_prefill", "sequence_tiled_mlp";
        /// Label smoothing ε: the target is 1 - ε for the label and ε/(V - 1) for every other token, as in Megatron.
        label_smoothing: f64 = 0.0, "label_smoothing_factor", "smoothing";
        /// Activation recomputation (checkpointing): "none", "full" for whole layers, or a list of modules.
        recompute: Recompute = Recompute::None, "recompute_granularity", "recompute_modules", "recompute_activations", "recompute_method", "activation_checkpointing", "activation_checkpoint", "gradient_checkpointing";
        /// Capture a training step as a CUDA graph and replay it; auto does so where kernel launches take more than a fifth of
        /// the step time, or 3 ms of it on one rank.
        cuda_graph: CudaGraphMode = CudaGraphMode::Auto, "cuda_graphs", "enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl", "cuda_graph_scope", "use_cuda_graph";
        /// Log the number of zero elements in the reduced gradient as num_zeros.
        log_num_zeros: bool = false, "log_num_zeros_in_grad", "num_zeros_in_grad";
        /// Save and end the run after the step in which so much time has passed since the process began, "3h50m", so that a
        /// requeued job resumes; a Slurm job ends so by itself, fault.exit_margin seconds before its time limit.
        exit_after: Option<TimeSpan> = None, "exit_duration_in_mins", "exit_duration", "max_time", "time_limit", "walltime";
        /// Log the energy that the GPUs use in training steps, without evaluations and checkpoints.
        energy: bool = false, "log_energy", "energy_monitor";
    }

    /// Views of the run beside events.jsonl.
    logging: LoggingSection {
        /// Write TensorBoard event files to the folder tensorboard of the run: scalars of every event, histograms of tokens per
        /// expert, of FP8 operands and of ranks.
        tensorboard: bool = false, "tensorboard_dir", "enable_tensorboard", "log_to_tensorboard", "use_tensorboard", "tensorboard_log_dir", "save_tb_folder";
    }

    /// Evaluation on validation data during training.
    eval: EvalSection {
        /// Steps between evaluations; 0 means never.
        every: u64 = 0, "eval_interval", "eval_steps", "val_check_interval", "eval_freq", "evaluation_interval", "interval", "freq";
        /// Global batches per evaluation.
        batches: u64 = 8, "eval_iters", "limit_val_batches", "eval_batches";
        /// Early stopping: end the run after this many evaluations in a row without a lower loss; 0 means never.
        patience: u64 = 0, "early_stopping_patience", "early_stopping", "early_stopping_rounds";
        /// Minimum decrease of the validation loss that counts as an improvement for eval.patience.
        min_delta: f64 = 0.0, "early_stopping_threshold", "early_stopping_min_delta";
    }

    /// Optimizer.
    optimizer: OptimizerSection {
        /// Optimizer: adamw (decoupled weight decay), adam (L2 regularization), sgd, lion or muon.
        kind: OptimizerKind = OptimizerKind::AdamW, "optimizer", "optim", "optimizer_type", "name";
        /// Peak learning rate.
        lr: f64 = 3e-4, "learning_rate", "max_lr", "peak_lr";
        /// Minimum learning rate after warm-up; derived as a tenth of optimizer.lr.
        min_lr: Option<f64> = None, "lr_min", "final_lr", "end_lr";
        /// Adam's beta1 and beta2; Lion's are derived as [0.95, 0.98].
        betas: [f64; 2] = [0.9, 0.95], "adam_beta1", "adam_beta2", "beta1", "beta2", "adam_betas";
        /// Adam's epsilon.
        eps: f64 = 1e-8, "adam_eps", "adam_epsilon", "epsilon";
        /// Momentum of SGD.
        momentum: f64 = 0.9, "sgd_momentum";
        /// Nesterov momentum of SGD; false unless set.
        nesterov: Option<bool> = None, "sgd_nesterov";
        /// Constants of Muon, where optimizer.kind or a group of optimizer.groups is "muon".
        muon: Option<MuonSettings> = None, "muon_momentum", "muon_num_ns_steps", "muon_scale_mode", "muon_extra_scale_factor", "muon_tp_mode", "muon_use_nesterov", "muon_coefficient_type", "muon_scalar_optimizer", "muon_fp32_matmul_prec";
        /// Parameter groups: learning-rate and weight-decay factors, optimizer, state dtype and freezing by kind of parameter
        /// (embedding, lm_head, router, expert, matrix, adapter, bias, norm) or by name; the first group that selects a parameter
        /// counts.
        groups: Option<ParamGroupList> = None, "param_groups", "parameter_groups", "decoupled_lr", "config_overrides", "no_weight_decay_cond", "scale_lr_cond", "lr_mult", "freeze", "frozen_params";
        /// Weight decay of matrices; biases and norms are not decayed.
        weight_decay: f64 = 0.1, "wd", "start_weight_decay";
        /// Weight decay at the end of its schedule; derived as optimizer.weight_decay.
        weight_decay_end: Option<f64> = None, "end_weight_decay", "weight_decay_final";
        /// Gradient clipping by global norm; 0 means none.
        clip: f64 = 1.0, "clip_grad", "grad_clip", "max_grad_norm", "gradient_clip_val", "max_norm", "gradient_clipping";
        /// Dtype of the optimizer's moments: f32, bf16, or f16 and fp8 with a scale per block of 32 elements.
        state_dtype: StateDtype = StateDtype::F32, "exp_avg_dtype", "exp_avg_sq_dtype", "moment_dtype";
        /// Storage of f32 master weights: f32, or remainder, the 16 bits that bf16 weights lack.
        master_dtype: MasterDtype = MasterDtype::F32, "main_params_dtype", "master_weights", "store_param_remainders", "use_precision_aware_optimizer";
        /// Skip steps with non-finite gradients, at most ten in a row, instead of ending the run.
        skip_nonfinite: bool = false, "skip_nan", "skip_nonfinite_grads", "ignore_nan_grads";
    }

    /// LoRA: low-rank adapters are trained beside the linears of a frozen base model.
    lora: LoraSection {
        /// Rank of the adapters; 0 means none: the whole model is trained.
        rank: usize = 0, "r", "lora_r", "lora_rank", "lora_dim", "peft", "peft_scheme", "adapter_dim";
        /// Numerator of the scale: a linear computes (W + alpha / rank · B·A)·x; derived as lora.rank.
        alpha: Option<f64> = None, "lora_alpha";
        /// Linears with adapters: "all-linear" (all of attention and MLP), names as in Hugging Face ("q_proj", "down_proj") or
        /// Megatron ("linear_qkv", "linear_fc1"), or patterns ("*.layers.0.*").
        targets: OneOrMany = OneOrMany(vec!["all-linear".into()]), "target_modules", "lora_target_modules";
        /// Linears without adapters, by names or patterns like lora.targets.
        exclude: OneOrMany = OneOrMany::default(), "exclude_modules";
        /// One A for the linears that are computed together (q, k and v; gate and up), instead of one for each.
        fused: bool = false, "canonical_lora", "performant_lora", "fused_lora";
        /// DoRA: rows of W + alpha / rank · B·A are scaled to trained lengths m, which begin as those of W.
        dora: bool = false, "use_dora", "dora_enable";
        /// Factor on the learning rate of B (LoRA+).
        b_lr_factor: f64 = 1.0, "loraplus_lr_ratio", "lora_plus_ratio", "lora_plus";
        /// PEFT folder whose adapters are trained further; it gives rank, alpha, targets and dora. model.hf names their base model.
        adapter: Option<String> = None, "lora_model_dir", "adapter_name_or_path", "peft_ckpt_path";
    }

    /// Schedules of the learning rate and weight decay.
    schedule: ScheduleSection {
        /// Linear warm-up in steps; derived as a tenth of the run, at most 2000.
        warmup: Option<u64> = None, "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction", "warmup_steps", "warmup_iters", "warmup_ratio", "num_warmup_steps";
        /// Initial learning rate of the warm-up.
        init_lr: f64 = 0.0, "lr_warmup_init", "warmup_init_lr";
        /// Decay style of the learning rate after warm-up.
        decay: Decay = Decay::Cosine, "lr_decay_style", "lr_scheduler_type", "lr_schedule", "scheduler", "lr_scheduler", "decay_type";
        /// Step at which the learning rate reaches optimizer.min_lr; derived as train.steps.
        decay_steps: Option<u64> = None, "lr_decay_iters", "lr_decay_samples", "lr_decay_steps";
        /// Length of the decay phase of WSD in steps; derived as a tenth of schedule.decay_steps.
        wsd_steps: Option<u64> = None, "lr_wsd_decay_iters", "lr_wsd_decay_samples", "wsd_decay_steps", "cooldown_steps";
        /// Decay style of the WSD decay phase.
        wsd_style: WsdStyle = WsdStyle::Linear, "lr_wsd_decay_style", "cooldown_style";
        /// Style of the change from optimizer.weight_decay to optimizer.weight_decay_end.
        weight_decay_style: WeightDecayStyle = WeightDecayStyle::Constant, "weight_decay_incr_style", "wd_incr_style";
        /// Step at which weight decay reaches optimizer.weight_decay_end; derived as train.steps.
        weight_decay_steps: Option<u64> = None, "wd_incr_steps", "weight_decay_incr_steps";
    }

    /// Dtypes and quantization.
    precision: PrecisionSection {
        /// Dtype of weights and activations.
        dtype: Precision = Precision::Bf16, "params_dtype", "torch_dtype", "mixed_precision", "bf16", "fp16", "fp32", "autocast_dtype", "pipeline_dtype";
        /// Initial loss scale of f16 training, or [initial scale, growth interval]. The scale halves on overflow, skipping the
        /// step (hysteresis 2, minimum 1), and doubles after 1000 steps, or growth interval steps, without.
        loss_scale: LossScale = LossScale::default(), "initial_loss_scale", "init_scale", "min_loss_scale", "hysteresis", "loss_scale_window", "growth_interval", "scale_window";
        /// Quantization recipe of the GEMMs of linear layers: none, fp8-current, fp8-delayed or fp8-block scaling, or mxfp8 or
        /// nvfp4, which are emulated on devices before Blackwell.
        recipe: QuantRecipe = QuantRecipe::None, "fp8", "fp8_recipe", "enable_fp8", "fp8_scaling", "float8", "fp4", "fp4_recipe", "nvfp4", "mxfp8", "quantization";
        /// Keep quantized weights in FP8 only, without a bf16 copy: 1 byte per parameter instead of 2, with bit-identical
        /// results.
        fp8_params: bool = false, "fp8_param", "fp8_param_gather", "fp8_primary_weights", "fp8_model_init", "quantized_model_init", "enable_fsdp_float8_all_gather";
        /// Run the LM head's GEMMs in FP8 as well, by precision.recipe.
        fp8_lm_head: bool = false, "head", "fp8_head", "fp8_output_layer", "fp8_output_proj";
        /// Quantize q, k, v and the softmax probabilities to E4M3 in the forward attention; only Hopper has kernels for it,
        /// other devices emulate it.
        fp8_attention: bool = false, "attention", "fp8_dpa", "fp8_mha", "fp8_dot_product_attention", "fp8_multi_head_attention";
        /// FP8 format: hybrid (gradients in E5M2, the rest in E4M3) or e4m3; derived from precision.recipe.
        format: Option<Fp8Format> = None, "fp8_format", "fp8_mode";
        /// Round scales of fp8-current and fp8-block down to powers of two; derived from precision.recipe.
        pow2_scales: Option<bool> = None, "force_pow_2_scales", "round_scales_to_power_of_2";
        /// Margin of delayed scaling: powers of two of headroom above amax, at most 64.
        margin: u32 = 0, "fp8_margin";
        /// Length of the amax history of delayed scaling in steps; 1 uses the most recent amax.
        amax_history: usize = 1024, "fp8_amax_history_len", "amax_history_len", "fp8_amax_compute_algo", "amax_compute_algo";
        /// Steps at the start of delayed scaling that record amax and compute in precision.dtype.
        calibrate: u64 = 0, "fp8_calibration_steps", "calibration_steps", "calibrating";
        /// Steps between logged statistics of quantized operands (saturation, underflow, error), which slow a step down; 0
        /// means never.
        stats_every: u64 = 0, "log_fp8_stats_interval", "fp8_stats_interval", "tensor_inspect_interval";
        /// What stays in precision.dtype: "first 1" and "last 1" layers, modules by part of their name ("mlp.down",
        /// "layers.3"), or one GEMM of a module ("attn.out:weight_grad"; output, input_grad, weight_grad).
        skip: OneOrMany = OneOrMany::default(), "first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "fp8_wgrad", "filter_fqns";
    }

    /// Checkpoints.
    checkpoint: CheckpointSection {
        /// Steps between checkpoints; 0 means none during the run.
        every: u64 = 0, "save_interval", "save_steps", "save_every", "checkpoint_interval", "ckpt_interval", "interval";
        /// Number of newest checkpoints to keep; 0 means all.
        keep: u64 = 2, "save_total_limit", "keep_last_k", "most_recent_k", "save_top_k", "keep_latest_k", "max_to_keep";
        /// Keep the checkpoint with the lowest validation loss, too, as checkpoints/best; it is saved after the evaluation.
        best: bool = false, "load_best_model_at_end", "save_best", "save_best_only", "save_best_model", "metric_for_best_model";
        /// Save a checkpoint at the end of the run.
        at_end: bool = true, "save_at_end", "save_last", "save_on_train_end";
        /// When a checkpoint cannot be written (a full disk): continue tells it at once and tries again at the next one, stop ends
        /// the run. Earlier checkpoints stay either way, and a run whose last checkpoint failed ends with an error.
        on_failure: SaveFailurePolicy = SaveFailurePolicy::Continue, "save_failure", "ignore_save_errors";
    }

    /// Parallelism over ranks.
    parallel: ParallelSection {
        /// Tensor-parallel size.
        tp: usize = 1, "tensor_model_parallel_size", "tensor_parallel_size", "tensor_parallel_degree";
        /// Context-parallel size.
        cp: usize = 1, "context_parallel_size", "context_parallel_degree";
        /// Pipeline-parallel size.
        pp: usize = 1, "pipeline_model_parallel_size", "pipeline_parallel_size", "pipeline_parallel_degree";
        /// Virtual pipeline size: model chunks per pipeline rank.
        vp: usize = 1, "virtual_pipeline_model_parallel_size";
        /// Data-parallel size.
        dp: usize = 1, "data_parallel_size", "world_size", "num_gpus";
        /// Expert-parallel size.
        ep: usize = 1, "expert_model_parallel_size", "expert_parallel_size", "expert_parallel_degree";
        /// Tensor-parallel size of experts; derived as parallel.tp.
        etp: Option<usize> = None, "expert_tensor_parallel_size";
        /// ZeRO stage: 0 none, 1 shards optimizer state over data-parallel ranks, 2 gradients too, 3 weights too (FSDP).
        zero: usize = 1, "use_distributed_optimizer", "zero_stage", "zero_optimization", "data_parallel_sharding_strategy";
        /// With parallel.zero = 3: ranks that shard weights, gradients and optimizer state between them (HSDP); unset means
        /// all data-parallel ranks. Groups of this size hold the same shards.
        fsdp_group: Option<usize> = None, "hsdp", "data_parallel_shard_size";
        /// With parallel.fsdp_group, the optimizer state of a shard on the groups that hold it: replicate (HSDP), or optimizer,
        /// which shards it over them too (HFSDP).
        fsdp_outer: FsdpOuter = FsdpOuter::Replicate, "outer_dp_sharding_strategy", "hfsdp";
        /// Bytes of data-parallel communication in flight: "800MB". With parallel.zero = 3, of layers gathered ahead, and of
        /// gradients being reduced; derived as two layers. Otherwise two buckets; derived so that they saturate the network.
        comm_unit: Option<ByteCount> = None, "suggested_communication_unit_size", "ddp_bucket_size", "bucket_size";
        /// Pipeline schedule: 1f1b, zero-bubble, or paired, which overlaps the expert all-to-all of one micro-batch with the
        /// computation of another.
        schedule: PipelineSchedule = PipelineSchedule::OneForwardOneBackward, "pipeline_parallel_schedule", "pipeline_schedule", "overlap_moe_expert_parallel_comm";
        /// Pipeline layout, such as "Ett|ttt|ttL": the layers of each stage; unset means as even as possible.
        stages: Option<String> = None, "pipeline_model_parallel_layout";
        /// Overlap communication with computation; results are bit-identical.
        overlap: bool = true, "overlap_grad_reduce", "overlap_param_gather", "tp_comm_overlap", "overlap_p2p_comm";
    }

    /// Offloading to host memory; results are bit-identical.
    offload: OffloadSection {
        /// Activations kept in host memory between forward and backward: "off"; "auto", which measures the
        /// link and the layers and moves what costs no time, and what must move for a step to fit; a number of layers (the
        /// first ones of each model chunk); or a list of modules whose saved tensors move in all layers but the last of a chunk.
        activations: OffloadedActivations = OffloadedActivations::Off, "cpu_offloading", "cpu_offloading_num_layers", "cpu_offloading_activations", "fine_grained_activation_offloading", "offload_modules", "activation_offload";
        /// Fraction of the optimizer state (master weights and moments) kept in host memory, from 0 to 1: whole buckets of
        /// parameters. A step reads and writes it there over the link. "auto": as much as must be there for a step to fit on
        /// the device by the estimate of its memory.
        optimizer: OffloadedState = OffloadedState::Fraction(0.0), "optimizer_cpu_offload", "optimizer_offload_fraction", "offload_optimizer", "cpu_offload";
        /// What updates optimizer state in host memory: "device" streams it through the device in chunks, "cpu" updates it in
        /// place with the CPU, and "auto" measures both in the first steps of a run on a GPU and takes the faster.
        optimizer_compute: OptimizerCompute = OptimizerCompute::Device, "optimizer_offload_compute", "offload_compute";
        /// Weights kept in host memory, with parallel.zero = 3 and any number of ranks: passes fetch them unit by unit, ahead of
        /// their use as parallel.comm_unit allows, and updated weights are copied back.
        weights: bool = false, "offload_weights", "cpu_offloading_weights", "param_offload", "offload_param";
        /// Gradients accumulated in host memory, with parallel.zero = 3 and any number of ranks: every micro-batch after the
        /// first copies them to the device and back.
        gradients: bool = false, "offload_gradients", "offload_grads", "grad_offload";
        /// Smallest activation to offload.
        min_bytes: ByteCount = ByteCount(1 << 20), "min_offloaded_tensor_size";
        /// Most host memory to use on each rank; unset means as much as the system gives.
        host_budget: Option<ByteCount> = None, "cpu_offloading_budget", "pinned_memory_limit";
    }

    /// Faults: in-job restart, snapshots in memory, silent data corruption, stragglers, fault injection.
    fault: FaultSection {
        /// In-job restarts: how often a job of processes forms its groups anew after a rank has died, stalled or failed, and goes
        /// on from the newest state that all ranks have; 0 ends the job at the first failure.
        restarts: u64 = 0, "max_restarts", "inprocess_max_iterations", "in_job_restarts", "max_rank_faults";
        /// Failures after which the process of a rank is excluded by name: it is not replaced by itself any more.
        rank_failures: u64 = 3, "max_rank_failures";
        /// Soft time limit in seconds: a rank that has not joined the restart by then is replaced.
        soft_timeout: f64 = 60.0, "inprocess_soft_timeout", "soft_timeout_seconds";
        /// Hard time limit in seconds: a process that has not aborted its failed communicators by then is killed.
        hard_timeout: f64 = 90.0, "inprocess_hard_timeout", "hard_timeout_seconds";
        /// Heartbeat timeout in seconds: a process that is silent for longer is declared dead, and replaced.
        heartbeat_timeout: f64 = 15.0, "heartbeat_timeout", "rank_heartbeat_timeout", "initial_rank_heartbeat_timeout";
        /// Least timeout that a run learns, in seconds: once steps, evaluations or saves were seen often enough, a rank waits for
        /// others ten times the longest of them, at least this (saves: five times this) and at most --timeout; 0 means --timeout always.
        min_timeout: f64 = 60.0, "calculated_timeouts", "section_timeouts", "safety_factor", "rank_section_timeouts";
        /// Delay in seconds before restarting again when no step was completed since the last restart; doubled each time, up to 60.
        backoff: f64 = 1.0, "restart_delay", "monitor_interval";
        /// Without a spare and a restarted process: go on with fewer data-parallel replicas and the same global batch. Sums are
        /// then taken in another order, so that the last bits differ.
        shrink: bool = false, "shrink_on_failure", "elastic", "min_nodes";
        /// Steps between snapshots of the training state in host memory, each mirrored on another rank; 0 means none, and a
        /// restart reads the newest checkpoint.
        snapshot_every: u64 = 0, "local_checkpoint_interval", "non_persistent_save_interval", "non_persistent_local_ckpt_dir", "in_memory_checkpoint";
        /// What to do with a step whose loss or gradient is not finite or spikes, and is the same when it is run again: stop,
        /// skip (its update is not applied), or rollback (the window since the snapshot is skipped).
        on_bad_step: BadStepPolicy = BadStepPolicy::Stop, "rerun_mode", "check_for_nan_in_loss_and_grad", "nan_policy";
        /// Run a step again, from the last snapshot, when its loss or gradient norm is not finite or spikes: other bits the second
        /// time are a hardware fault.
        rerun: bool = false, "rerun_state_machine", "validate_results", "error_injection_rate";
        /// A loss this many times above its running maximum is a spike; 0 means no bound.
        spike: f64 = 0.0, "check_for_spiky_loss", "spiky_loss_factor", "spike_threshold";
        /// Steps between comparisons of the hashes of parameters over data-parallel replicas; 0 means never.
        hash_every: u64 = 0, "check_weight_hash_across_dp_replicas_interval", "param_hash_interval";
        /// Steps between verifications, each of which runs the steps since the last snapshot again and compares the hashes of
        /// parameters and of everything that was sent; 0 means never.
        verify_every: u64 = 0, "sdc_check_interval", "report_determinism_stats";
        /// Let other processes run the steps of a verification: ranks change places, so that hardware that computes the same wrong
        /// bits every time is found too. For processes that can restart (fault.restarts); fault.snapshot_every = fault.verify_every.
        verify_on_partner: bool = false, "sdc_check_on_partner", "replica_check";
        /// Steps over which section times of ranks are compared, and reported; 0 means never.
        straggler_every: u64 = 0, "log_straggler", "straggler_report_time_interval", "straggler_minmax_count";
        /// A rank whose speed, relative to the median of ranks or to its own history, is below this is a straggler.
        straggler_threshold: f64 = 0.87, "gpu_relative_perf_threshold", "gpu_individual_perf_threshold";
        /// Seconds before the end of the job's time, as Slurm tells it, at which the run saves and exits.
        exit_margin: f64 = 120.0, "preemption_margin", "exit_signal_handler", "preempt_time";
        /// Faults to inject, for tests and drills: "kill:rank=2,step=30"; see docs/faults.md.
        inject: OneOrMany = OneOrMany::default(), "fault_injector", "ft_simulated_fault", "simulated_fault";
    }

    /// Dropout.
    dropout: DropoutSection {
        /// Dropout probability after the embedding and before each residual addition.
        hidden: f64 = 0.0, "hidden_dropout", "resid_pdrop", "embd_pdrop", "dropout", "resid_dropout";
    }

    /// Text generation at the end of the run.
    generate: GenerateSection {
        /// Tokens to generate; 0 means none.
        tokens: u64 = 0, "max_new_tokens", "num_tokens_to_generate", "max_tokens_to_generate";
        /// Prompt; unset means none.
        prompt: Option<String> = None, "prompts", "start";
        /// Sampling temperature; 0 is greedy.
        temperature: f64 = 0.8, "temp";
        /// Top-k sampling: draw from the k most probable tokens; 0 means all.
        top_k: u64 = 0, "topk";
        /// Top-p (nucleus) sampling: draw from the most probable tokens with this total probability.
        top_p: f64 = 1.0, "topp", "nucleus";
    }
}
