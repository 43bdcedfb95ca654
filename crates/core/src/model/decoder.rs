//! A decoder as one rank holds it: the whole model, or its pipeline stages.

use super::chunk::Chunk;
use super::config::{ModelConfig, Positions, RopeConfig};
use super::declare::ModelDeclaration;
use super::layer_split::LayerPlacement;
use super::mtp_config::MtpTraining;
use super::pipeline_layout::PipelineLayout;
use crate::optimizer::ParamGroups;
use ferrotron_engine::attention::{KvCache, Layout, RopeTable};
use ferrotron_engine::lora::LoraPolicy;
use ferrotron_engine::moe::{MoeInput, MoeLayerSpec, MoeTraining};
use ferrotron_engine::quant::Policy;
use ferrotron_engine::{Declarations, LossOptions, ParamSpec, Rank, StepContext, Targets, Tokens};
use ferrotron_kernels::rope_tables::RopeTables;
use ferrotron_kernels::{CapturedSequences, RopeStyle};
use ferrotron_tensor::{Category, DType, Result, Stream, Tensor, shape_error};
use std::sync::Arc;

/// A decoder-only transformer, or this rank's pipeline stages of one.
pub struct Decoder {
    config: ModelConfig,
    placement: LayerPlacement,
    chunks: Vec<Chunk>,
    positions: usize,
    p2p_streams: [Stream; 2],
    moe_layers: Vec<MoeLayerSpec>,
    moe_training: Arc<MoeTraining>,
    mtp: MtpTraining,
}

/// Options of a model besides its architecture.
#[derive(Clone, Debug, Default)]
pub struct ModelOptions {
    /// Which GEMMs run in FP8, and by which recipe.
    pub policy: Policy,
    /// Which linears have LoRA adapters.
    pub lora: LoraPolicy,
    /// Router, losses, capacity and dispatch of MoE layers.
    pub moe_training: Arc<MoeTraining>,
    /// Loss weight and detachment of MTP layers.
    pub mtp: MtpTraining,
    /// How the LM head computes the loss: in chunks of tokens, with label smoothing.
    pub loss: LossOptions,
    /// Parameter groups of the optimizer.
    pub groups: Arc<ParamGroups>,
}

/// Token ids and positions of a micro-batch, on the device.
pub struct Input {
    /// i32 `[N]`: token ids of this context-parallel rank.
    pub ids: Tensor,
    /// i32 `[N]`: positions.
    pub positions: Tensor,
    /// Sequences of the whole micro-batch: which tokens attend to each other.
    pub layout: Layout,
    /// The token of the micro-batch in each row.
    pub tokens: Tokens,
    /// T = N / tp: rows of the residual stream on this rank (sequence parallelism).
    pub rows: usize,
    /// Which rows are tokens, and of which sequence, for MoE layers.
    pub moe: Option<MoeInput>,
    /// Inputs of the MTP layers, one for each depth; empty outside of training.
    pub mtp: Vec<MtpInput>,
    /// Packed sequences of a captured pass, which differ from replay to replay; `layout` then stands for all of them.
    pub captured: Option<Arc<CapturedSequences>>,
}

/// What is special about the tokens of a micro-batch.
#[derive(Clone, Copy, Debug, Default)]
pub struct InputOptions<'a> {
    /// True for tokens that are padding: MoE layers route them to no expert.
    pub padding: Option<&'a [bool]>,
    /// Its length varies from micro-batch to micro-batch; see [`Tokens::with_few_row_counts`].
    pub varies: bool,
}

/// Inputs of the MTP layer that looks d tokens ahead, for the rows of an [`Input`].
pub struct MtpInput {
    /// i32 `[N]`: ids of the tokens d ahead, 0 past the end of a document.
    pub ids: Tensor,
    /// i32 `[N]`: their positions, likewise.
    pub positions: Tensor,
    /// Labels of the tokens after them.
    pub targets: Targets,
}

impl Decoder {
    /// Builds this rank's chunks for sequences of up to `positions` tokens and declares their parameters.
    pub fn new(
        rank: &Rank,
        config: &ModelConfig,
        positions: usize,
        layout: &PipelineLayout,
        options: &ModelOptions,
    ) -> crate::Result<(Decoder, Vec<ParamSpec>)> {
        let c = config.clone();
        let placement = layout.place(&c, rank.pp.size())?;
        let params = Declarations::of(rank)
            .with_policy(options.policy.clone())
            .with_lora(options.lora.clone())
            .with_moe_training(&options.moe_training)
            .with_loss(options.loss);
        // Layers with the same RoPE share one table.
        let mut tables: Vec<(RopeConfig, RopeTable)> = Vec::new();
        let mut table = |layer: usize| -> Result<Option<RopeTable>> {
            let Some(rope) = c.rope(layer) else { return Ok(None) };
            if let Some((_, table)) = tables.iter().find(|t| t.0 == *rope) {
                return Ok(Some(table.clone()));
            }
            let table = rope_table(rank, rope, positions)?;
            tables.push((rope.clone(), table.clone()));
            Ok(Some(table))
        };
        let mut model = ModelDeclaration::new(params, &c, options.mtp, rank.pp.size() > 1, &mut table);
        let chunks = (0..placement.vp())
            .filter_map(|chunk| placement.at(rank.pp.rank(), chunk))
            .map(|stage| Chunk::declare(&mut model, stage))
            .collect::<Result<Vec<_>>>()?;
        let moe_layers = model.params.moe_layers().to_vec();
        let specs = model.finish(&options.groups);
        let positions = if c.positions == Positions::Learned { c.max_positions } else { positions };
        let p2p_stream = |name| rank.device().stream(name).map(|s| s.with_rank(rank.world.rank()));
        let p2p_streams = [p2p_stream("activations")?, p2p_stream("their gradients")?];
        let moe_training = options.moe_training.clone();
        let mtp = options.mtp;
        Ok((
            Decoder { config: c, placement, chunks, positions, p2p_streams, moe_layers, moe_training, mtp },
            specs,
        ))
    }

    /// This rank's MoE layers.
    pub fn moe_layers(&self) -> &[MoeLayerSpec] {
        &self.moe_layers
    }

    /// Training options of MoE layers.
    pub fn moe_training(&self) -> &MoeTraining {
        &self.moe_training
    }

    /// Training options of MTP layers.
    pub fn mtp(&self) -> MtpTraining {
        self.mtp
    }

    /// Which layers are on which pipeline stage.
    pub fn placement(&self) -> &LayerPlacement {
        &self.placement
    }

    /// This rank's model chunks, in order.
    pub fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// This rank's model chunks, mutable.
    pub fn chunks_mut(&mut self) -> &mut [Chunk] {
        &mut self.chunks
    }

    /// Streams for point-to-point messages: activations to later stages, gradients to earlier ones.
    pub(crate) fn p2p_streams(&self) -> &[Stream; 2] {
        &self.p2p_streams
    }

    /// The architecture.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Longest sequence this decoder was built for.
    pub fn max_positions(&self) -> usize {
        self.positions
    }

    /// Uploads a micro-batch after checking ids, positions and lengths. Without `positions`, every sequence counts
    /// from 0.
    pub fn input(
        &self,
        rank: &Rank,
        ids: &[i32],
        positions: Option<&[i32]>,
        layout: Layout,
    ) -> Result<Input> {
        self.input_with(rank, ids, positions, layout, InputOptions::default())
    }

    /// The same with options.
    pub fn input_with(
        &self,
        rank: &Rank,
        ids: &[i32],
        positions: Option<&[i32]>,
        layout: Layout,
        options: InputOptions,
    ) -> Result<Input> {
        let default;
        let positions = match positions {
            Some(p) => p,
            None => {
                layout.check(ids.len())?;
                default = default_positions(&layout, ids.len());
                &default
            }
        };
        self.check_input(ids, positions, &layout)?;
        let tokens = rank.tokens(&layout)?;
        let tokens = if options.varies { tokens.with_few_row_counts(rank.tp.size()) } else { tokens };
        let upload = |x: &[i32]| {
            let mine = tokens.take(x, 0)?;
            rank.compute.upload(&mine, &[mine.len()], Category::Activations)
        };
        let (ids, positions) = (upload(ids)?, upload(positions)?);
        let rows = ids.numel() / rank.tp.size();
        let moe = self.moe_input(rank, &layout, &tokens, options.padding)?;
        let layout = tokens.layout().clone();
        Ok(Input { ids, positions, layout, tokens, rows, moe, mtp: Vec::new(), captured: None })
    }

    /// What MoE layers need to know of a micro-batch; none in a dense model. Collective over a pipeline stage.
    pub(crate) fn moe_input(
        &self,
        rank: &Rank,
        layout: &Layout,
        tokens: &Tokens,
        padding: Option<&[bool]>,
    ) -> Result<Option<MoeInput>> {
        let moe = self.config.moe.is_some();
        let input = || MoeInput::new(rank, layout, tokens, padding, &self.moe_training);
        moe.then(input).transpose()
    }

    /// Rejects ids outside the vocabulary, positions past the model's, and lengths that differ.
    pub(crate) fn check_input(&self, ids: &[i32], positions: &[i32], layout: &Layout) -> Result<()> {
        layout.check(ids.len())?;
        let inside = |x: &i32, n: usize| usize::try_from(*x).is_ok_and(|x| x < n);
        if let Some(bad) = ids.iter().find(|x| !inside(x, self.config.vocab)) {
            return shape_error(
                "input",
                format!("token id {bad} is not in a vocabulary of {}", self.config.vocab),
            );
        }
        if positions.len() != ids.len() {
            return shape_error("input", format!("{} positions for {} tokens", positions.len(), ids.len()));
        }
        if let Some(bad) = positions.iter().find(|x| !inside(x, self.positions)) {
            return shape_error(
                "input",
                format!("position {bad} is past the {} this model was set up for", self.positions),
            );
        }
        Ok(())
    }

    /// Empty KV caches for `batch` sequences of up to `capacity` tokens.
    pub fn caches(&self, p: &StepContext, batch: usize, capacity: usize) -> Result<Vec<KvCache>> {
        self.chunks.iter().flat_map(Chunk::layers).map(|layer| layer.cache(p, batch, capacity)).collect()
    }

    /// Logits `[batch, V/tp]` of the last new token of each sequence, of this rank's vocabulary shard; all new tokens
    /// are appended to the caches.
    pub fn decode(&self, p: &StepContext, input: &Input, caches: &mut [KvCache]) -> Result<Tensor> {
        let (Layout::Rows { count, .. }, [whole]) = (&input.layout, &self.chunks[..]) else {
            return shape_error("decode", "sequences of equal length on one stage are needed");
        };
        if p.rank.cp.size() > 1 {
            return shape_error(
                "decode",
                "new tokens come one by one: ranks cannot share a sequence; use cp=1",
            );
        }
        whole.decode(p, input, *count, caches)
    }
}

fn default_positions(layout: &Layout, tokens: usize) -> Vec<i32> {
    match layout {
        Layout::Rows { len, .. } => (0..tokens).map(|i| (i % len) as i32).collect(),
        Layout::Packed { offsets } => offsets.windows(2).flat_map(|w| 0..w[1] - w[0]).collect(),
    }
}

fn rope_table(rank: &Rank, rope: &RopeConfig, positions: usize) -> Result<RopeTable> {
    let style = if rope.interleaved { RopeStyle::Interleaved } else { RopeStyle::Half };
    // A device without memory needs no angles; they would be an eighth of a dry run.
    if rank.device().is_meta() {
        let shape = [positions, rope.rotary_dim / 2];
        let empty = || Tensor::empty(&rank.compute, &shape, DType::F32, Category::Parameters);
        return Ok(RopeTable { cos: empty()?, sin: empty()?, style });
    }
    let RopeTables { cos, sin, half } =
        RopeTables::new(rope.theta, rope.rotary_dim, &rope.scaling, positions)?;
    let upload = |x: &[f32]| rank.compute.upload(x, &[positions, half], Category::Parameters);
    Ok(RopeTable { cos: upload(&cos)?, sin: upload(&sin)?, style })
}
