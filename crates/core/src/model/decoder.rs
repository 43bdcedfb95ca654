//! A whole decoder: embedding, layers, final norm, head and loss.

use super::config::{ModelConfig, Positions, RopeConfig};
use super::layer::{Layer, LayerSaved, norm_of};
use ferrotron_engine::attention::{KvCache, Layout, RopeTable};
use ferrotron_engine::{
    Declarations, Embedding, EmbeddingSaved, GradBuffer, Head, HeadSaved, Keep, NormLayer, NormSaved,
    ParamSpec, Pass, Rank, Saved, SavedTensor, Targets,
};
use ferrotron_kernels::RopeStyle;
use ferrotron_kernels::rope_tables::RopeTables;
use ferrotron_tensor::{Category, Result, Tensor, shape_error};

/// Place of the dropout after the embedding; layers count from 0, so it has the layer number past them.
const AFTER_EMBEDDING: u32 = 0;

/// A decoder-only transformer.
pub struct Decoder {
    config: ModelConfig,
    embedding: Embedding,
    layers: Vec<Layer>,
    final_norm: NormLayer,
    /// Output matrix and loss.
    pub head: Head,
    positions: usize,
}

/// Token ids with their places, on the device.
pub struct Input {
    /// i32 `[tokens]`
    pub ids: Tensor,
    /// i32 `[tokens]`
    pub positions: Tensor,
    /// Which tokens see each other.
    pub layout: Layout,
}

/// What backward needs of a whole forward pass.
pub struct DecoderSaved {
    head: HeadSaved,
    final_norm: NormSaved,
    layers: Vec<Keep<LayerSaved>>,
    embedding: EmbeddingSaved,
}

impl Saved for DecoderSaved {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        self.head.tensors(f);
        self.final_norm.tensors(f);
        self.layers.tensors(f);
        self.embedding.tensors(f);
    }
}

impl Decoder {
    /// Puts a model together for sequences of up to `positions` tokens, and declares its parameters.
    pub fn new(rank: &Rank, config: &ModelConfig, positions: usize) -> Result<(Decoder, Vec<ParamSpec>)> {
        let c = config.clone();
        let mut d = Declarations::at(rank.place());
        let learned = (c.positions == Positions::Learned).then_some(c.max_positions);
        let embedding =
            Embedding::declare(&mut d, "embed", c.vocab, c.hidden, learned, c.embed_scale, c.init_std)?;
        // Layers with the same RoPE share one table.
        let mut tables: Vec<(RopeConfig, RopeTable)> = Vec::new();
        let mut layers = Vec::with_capacity(c.layers);
        for i in 0..c.layers {
            let table = match c.rope(i) {
                None => None,
                Some(rope) => Some(match tables.iter().find(|t| t.0 == *rope) {
                    Some(t) => t.1.clone(),
                    None => {
                        let t = rope_table(rank, rope, positions)?;
                        tables.push((rope.clone(), t.clone()));
                        t
                    }
                }),
            };
            layers.push(Layer::declare(&mut d, &c, i, table)?);
        }
        let final_norm = NormLayer::declare(&mut d, "final_norm", c.hidden, norm_of(&c))?;
        let tied = c.tied.then_some(embedding.tokens);
        let head = Head::declare(&mut d, "head", c.vocab, c.hidden, tied, c.final_softcap, c.init_std)?;
        let positions = learned.unwrap_or(positions);
        Ok((Decoder { config: c, embedding, layers, final_norm, head, positions }, d.finish()))
    }

    /// The architecture.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Sequences can be this long.
    pub fn max_positions(&self) -> usize {
        self.positions
    }

    /// Uploads a batch, checking ids, positions and lengths. Without `positions`, sequences count from 0.
    pub fn input(
        &self,
        rank: &Rank,
        ids: &[i32],
        positions: Option<&[i32]>,
        layout: Layout,
    ) -> Result<Input> {
        layout.check(ids.len())?;
        let counted;
        let positions = match positions {
            Some(p) => p,
            None => {
                counted = count_positions(&layout, ids.len());
                &counted
            }
        };
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
        // Rows divide over the ranks that share every layer; the last may be padding that nobody looks at.
        let rows = rank.padded(ids.len());
        let upload = |x: &[i32]| {
            let mut x = x.to_vec();
            x.resize(rows, 0);
            rank.compute.upload(&x, &[rows], Category::Activations)
        };
        Ok(Input { ids: upload(ids)?, positions: upload(positions)?, layout })
    }

    /// Hidden states after the final norm `[tokens, hidden]`; and, with `train`, what backward needs.
    fn hidden(&self, p: &Pass, input: &Input, train: bool) -> Result<(Tensor, Option<Body>)> {
        let (x, embedding) = self.embedding.forward(p, &input.ids, &input.positions)?;
        let mut x = p.dropout(self.layers.len() as u32, AFTER_EMBEDDING, x)?;
        let mut layers = Vec::with_capacity(self.layers.len());
        for layer in &self.layers {
            let (y, saved) = layer.forward(p, &x, &input.layout, &input.positions)?;
            layers.extend(train.then_some(saved));
            x = y;
        }
        let (y, final_norm) = self.final_norm.forward(p, &x)?;
        Ok((y, train.then_some((final_norm, layers, embedding))))
    }

    /// Logits `[tokens, V]`.
    pub fn logits(&self, p: &Pass, input: &Input) -> Result<Tensor> {
        let (x, _) = self.hidden(p, input, false)?;
        self.head.logits(p, &x)
    }

    /// Loss of each token f32 `[tokens]`, without weights.
    pub fn evaluate(&self, p: &Pass, input: &Input, targets: &Targets) -> Result<Tensor> {
        let (x, _) = self.hidden(p, input, false)?;
        Ok(self.head.loss(p, &x, targets, false)?.0)
    }

    /// The same for training: also what backward needs.
    pub fn forward(&self, p: &Pass, input: &Input, targets: &Targets) -> Result<(Tensor, DecoderSaved)> {
        let (x, body) = self.hidden(p, input, true)?;
        let (loss, head) = self.head.loss(p, &x, targets, true)?;
        match (body, head) {
            (Some((final_norm, layers, embedding)), Some(head)) => {
                Ok((loss, DecoderSaved { head, final_norm, layers, embedding }))
            }
            _ => shape_error("forward", "a training pass kept nothing"),
        }
    }

    /// Adds the gradient of `Σ weight·loss` to `grads`.
    pub fn backward(
        &self,
        p: &Pass,
        saved: DecoderSaved,
        input: &Input,
        grads: &mut GradBuffer,
    ) -> Result<()> {
        let (dx, g) = self.head.backward(p, saved.head)?;
        g.run(p.rank, grads)?;
        let (mut dx, g) = self.final_norm.backward(p, saved.final_norm, &dx, None)?;
        g.run(p.rank, grads)?;
        for (layer, saved) in self.layers.iter().zip(saved.layers).rev() {
            let (d, g) = layer.backward(p, saved, &input.layout, &input.positions, &dx)?;
            g.run(p.rank, grads)?;
            dx = d;
        }
        let dx = p.dropout(self.layers.len() as u32, AFTER_EMBEDDING, dx)?;
        self.embedding.backward(p, saved.embedding, &dx)?.run(p.rank, grads)
    }

    /// Empty caches for `batch` sequences of up to `capacity` tokens.
    pub fn caches(&self, p: &Pass, batch: usize, capacity: usize) -> Result<Vec<KvCache>> {
        let c = &self.config;
        // Key heads are shared out, or, where there are fewer than ranks, shared by neighbours.
        let heads = (c.kv_heads / p.rank.tp.size()).max(1);
        (0..c.layers)
            .map(|_| KvCache::new(&p.rank.compute, batch, capacity, heads, c.head_dim, p.dtype()))
            .collect()
    }

    /// Logits `[batch, V]` of the last of the new tokens of each sequence, of the columns this rank holds; all tokens
    /// join the caches.
    pub fn decode(&self, p: &Pass, input: &Input, caches: &mut [KvCache]) -> Result<Tensor> {
        let (mut x, _) = self.embedding.forward(p, &input.ids, &input.positions)?;
        for (layer, cache) in self.layers.iter().zip(caches) {
            x = layer.decode(p, &x, cache, &input.layout, &input.positions)?;
        }
        let batch = match input.layout {
            Layout::Rows { count, .. } => count,
            Layout::Packed { .. } => return shape_error("decode", "sequences of equal length are needed"),
        };
        let tokens = input.layout.tokens();
        let new = tokens / batch.max(1);
        let x = p.all_rows(&x, "hidden states")?.narrow(0, 0, tokens)?;
        let last = x.view(&[batch, new, self.config.hidden])?.select(1, new.saturating_sub(1))?;
        let rows = p.empty(&[batch, self.config.hidden])?;
        p.rank.kernels.copy(&p.rank.compute, &last, &rows)?;
        let (y, _) = self.final_norm.forward(p, &rows)?;
        self.head.logits_of(p, &y)
    }
}

type Body = (NormSaved, Vec<Keep<LayerSaved>>, EmbeddingSaved);

fn count_positions(layout: &Layout, tokens: usize) -> Vec<i32> {
    match layout {
        Layout::Rows { len, .. } => (0..tokens).map(|i| (i % len) as i32).collect(),
        Layout::Packed { offsets } => offsets.windows(2).flat_map(|w| 0..w[1] - w[0]).collect(),
    }
}

fn rope_table(rank: &Rank, rope: &RopeConfig, positions: usize) -> Result<RopeTable> {
    let RopeTables { cos, sin, half } =
        RopeTables::new(rope.theta, rope.rotary_dim, &rope.scaling, positions)?;
    let upload = |x: &[f32]| rank.compute.upload(x, &[positions, half], Category::Parameters);
    Ok(RopeTable {
        cos: upload(&cos)?,
        sin: upload(&sin)?,
        style: if rope.interleaved { RopeStyle::Interleaved } else { RopeStyle::Half },
    })
}
