//! Building the description of one layer: norms, linear layers, and how recomputation changes both.

use super::shape::{Group, Rows, StepShape};
use super::{Block, Collective, Gemm, LayerDescription, Lifetime, Pass, SavedTensor};
use crate::model::config::NormKind;
use ferrotron_comm::OpKind;
use ferrotron_engine::lora::{LORA_A, LORA_B, LORA_M, fused_module};
use ferrotron_engine::quant::{LinearGemm, LinearQuant, Role};
use ferrotron_engine::{ParamSpec, Split};
use ferrotron_kernels::BLOCK;
use ferrotron_tensor::DType;
use std::borrow::Cow;
use std::collections::HashMap;

/// FP8 rows are padded to so many elements.
const FP8_ALIGN: usize = 16;

/// What a linear layer saves of its input.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Input<'a> {
    /// The tensor of that name, or an FP8 copy of it that wgrad reads.
    Saved(&'a str),
    /// The tensor of that name in the compute dtype: another module saves it anyway.
    Kept(&'a str),
    /// Nothing: backward recomputes it.
    Dropped,
}

/// How tensor-parallel ranks share a linear layer.
#[derive(Clone, Copy, PartialEq)]
enum Parallel {
    Column,
    Row,
    Replicated,
}

/// A layer under description.
pub(super) struct LayerBuilder<'a> {
    pub(super) shape: &'a StepShape,
    params: &'a HashMap<&'a str, &'a ParamSpec>,
    pub(super) rows: Rows,
    pub(super) layer: LayerDescription,
    /// The part of the layer that is being described, and whether backward recomputes it.
    block: Block,
    pub(super) recomputed: bool,
    /// A detached MTP layer: embedding and LM head get no gradient from it.
    pub(super) detached: bool,
}

impl<'a> LayerBuilder<'a> {
    pub(super) fn new(
        shape: &'a StepShape,
        params: &'a HashMap<&'a str, &'a ParamSpec>,
        rows: Rows,
        name: String,
    ) -> LayerBuilder<'a> {
        let layer = LayerDescription {
            name,
            saved: Vec::new(),
            gemms: Vec::new(),
            attention: None,
            collectives: Vec::new(),
        };
        LayerBuilder { shape, params, rows, layer, block: Block::Norm, recomputed: false, detached: false }
    }

    pub(super) fn finish(self) -> LayerDescription {
        self.layer
    }

    pub(super) fn layer(&mut self) -> &mut LayerDescription {
        &mut self.layer
    }

    /// Starts `block`; `recomputed`: backward recomputes it.
    pub(super) fn begin(&mut self, block: Block, recomputed: bool) {
        (self.block, self.recomputed) = (block, recomputed);
    }

    /// A decoder layer: `r = x + attention(norm(x))`, `y = r + mlp(norm(r))`. Without norms before its blocks, `input` and
    /// `normed_mlp` are x and r themselves.
    pub(super) fn decoder_layer(mut self, name: &str, index: usize) -> LayerDescription {
        self.transformer_layer(name, index);
        self.finish()
    }

    /// The attention and MLP blocks of a layer, also inside an MTP layer.
    pub(super) fn transformer_layer(&mut self, name: &str, index: usize) {
        let (m, r) = (&self.shape.model, self.shape.recompute);
        // Of a recomputed layer the input alone is stored, which is the input of its first norm.
        self.begin(Block::Norm, false);
        if m.pre_norms || r.layer || r.attention {
            self.save("input", &[self.rows.local, m.hidden], self.shape.dtype);
        }
        self.begin(Block::Norm, r.layer);
        if m.pre_norms {
            self.norm_statistics("attn_norm", self.rows.local);
        }
        self.begin(Block::Attention, r.layer || r.attention);
        self.attention(&format!("{name}.attn"), index);
        self.begin(Block::Norm, r.layer);
        if m.post_norms {
            self.norm("attn_post_norm", self.rows.local, m.hidden);
        }
        if m.pre_norms {
            self.norm("mlp_norm", self.rows.local, m.hidden);
        } else if r.mlp {
            self.save("normed_mlp", &[self.rows.local, m.hidden], self.shape.dtype);
        }
        let recomputed = r.layer || r.mlp;
        match m.moe_layer(index) {
            None => {
                self.begin(Block::Mlp, recomputed);
                // Of a whole layer a norm after the block reads the output.
                self.mlp(&format!("{name}.mlp"), self.norm_output("normed_mlp"), r.layer && m.post_norms);
            }
            Some(moe) => {
                self.begin(Block::Moe, recomputed);
                self.moe(&format!("{name}.moe"), moe);
            }
        }
        self.begin(Block::Norm, r.layer);
        if m.post_norms {
            self.norm("mlp_post_norm", self.rows.local, m.hidden);
        }
    }

    /// The output of a norm as the input of a linear layer.
    pub(super) fn norm_output(&self, name: &'static str) -> Input<'static> {
        if self.shape.recomputes_norms() { Input::Dropped } else { Input::Saved(name) }
    }

    /// A tensor saved for backward. A second tensor of a name is the same allocation.
    pub(super) fn save(&mut self, name: &str, shape: &[usize], dtype: DType) {
        if self.layer.saved.iter().any(|t| t.name == name) {
            return;
        }
        let lifetime = if self.recomputed { Lifetime::Recomputed } else { Lifetime::Stored };
        let (name, shape) = (name.to_string(), shape.to_vec());
        self.layer.saved.push(SavedTensor { name, block: self.block, shape, dtype, lifetime });
    }

    /// A tensor that recomputation reads, so that it is stored even where its block is recomputed.
    pub(super) fn save_for_recompute(&mut self, name: &str, shape: &[usize], dtype: DType) {
        let recomputed = std::mem::replace(&mut self.recomputed, false);
        self.save(name, shape, dtype);
        self.recomputed = recomputed;
    }

    /// Input and statistics of a norm over `rows` rows of `width`.
    pub(super) fn norm(&mut self, name: &str, rows: usize, width: usize) {
        self.save(&format!("{name}.x"), &[rows, width], self.shape.dtype);
        self.norm_statistics(name, rows);
    }

    /// 1/σ of each row and, of LayerNorm, its mean.
    pub(super) fn norm_statistics(&mut self, name: &str, rows: usize) {
        self.save(&format!("{name}.rstd"), &[rows], DType::F32);
        if self.shape.model.norm.kind == NormKind::LayerNorm {
            self.save(&format!("{name}.mean"), &[rows], DType::F32);
        }
    }

    /// A collective of forward, which recomputation repeats.
    pub(super) fn forward(&mut self, group: Group, kind: OpKind, bytes: u64) {
        self.send(group, kind, bytes, Pass::Forward);
        if self.recomputed {
            self.send(group, kind, bytes, Pass::Recompute);
        }
    }

    /// A collective of backward.
    pub(super) fn backward(&mut self, group: Group, kind: OpKind, bytes: u64) {
        self.send(group, kind, bytes, Pass::Backward);
    }

    /// A collective of one pass.
    pub(super) fn send(&mut self, group: Group, kind: OpKind, bytes: u64, pass: Pass) {
        if bytes > 0 && self.shape.ranks.size(group) > 1 {
            self.layer.collectives.push(Collective { group, kind, bytes, pass });
        }
    }

    /// Bytes of an all-reduce over a group: `2(n−1)/n` of the tensor.
    pub(super) fn all_reduce(&self, group: Group, bytes: usize) -> u64 {
        all_reduce(self.shape.ranks.size(group), bytes)
    }

    /// Bytes of moving T rows of `width` to or from every other tensor-parallel rank: an all-gather or reduce-scatter.
    pub(super) fn moved(&self, width: usize, element: usize) -> u64 {
        ((self.shape.ranks.tp.size - 1) * self.rows.local * width * element) as u64
    }

    /// The declared weight of a module.
    pub(super) fn weight(&self, module: &str) -> Option<&'a ParamSpec> {
        self.params.get(format!("{module}.weight").as_str()).or_else(|| self.params.get(module)).copied()
    }

    /// GEMMs of a weight for `rows` rows.
    pub(super) fn gemms(&mut self, spec: &ParamSpec, rows: usize) {
        let [n, k] = spec.matrix();
        let each = spec.parts.len() / spec.matrices.max(1);
        let module = |name: &str| name.trim_end_matches(".weight").to_string();
        let names: Vec<String> = spec.parts[..each].iter().map(|p| module(&p.name)).collect();
        let quant = spec.quant.filter(|q| !q.recipe.emulated());
        for (gemm, [m, n, k], fp8) in [
            (LinearGemm::Fprop, [rows, n, k], quant.is_some_and(|q| q.fprop)),
            (LinearGemm::Dgrad, [rows, k, n], quant.is_some_and(|q| q.dgrad)),
            (LinearGemm::Wgrad, [n, k, rows], quant.is_some_and(|q| q.wgrad)),
        ] {
            if gemm == LinearGemm::Wgrad && spec.group.frozen {
                continue;
            }
            let recomputed = self.recomputed && gemm == LinearGemm::Fprop;
            let (names, block, experts) = (names.clone(), self.block, spec.matrices);
            self.layer.gemms.push(Gemm { names, block, gemm, m, n, k, experts, fp8, recomputed });
        }
    }

    /// A linear layer: its GEMMs, what it saves, and what it sends over the tensor-parallel group.
    ///
    /// | weight | rows in → out | forward | backward |
    /// |---|---|---|---|
    /// | column-parallel | T → N | all-gather x | reduce-scatter dx; all-gather x for dW |
    /// | row-parallel | N → T | reduce-scatter y | all-gather dy |
    /// | replicated | T → T | – | – |
    pub(super) fn linear(&mut self, module: &str, input: Input) {
        let Some(spec) = self.weight(module) else { return };
        let (t, rows) = (self.shape.ranks.tp.size, self.rows);
        let parallel = match spec.parts[0].split {
            Split::Replicated => Parallel::Replicated,
            Split::Rows { .. } => Parallel::Column,
            Split::Columns { .. } => Parallel::Row,
        };
        let computed = if parallel == Parallel::Replicated { rows.local } else { rows.all };
        self.gemms(spec, computed);
        let gathered = parallel == Parallel::Column && t > 1;
        let held = if parallel == Parallel::Column { rows.local } else { computed };
        let adapter = self.adapter(spec);
        self.save_input(spec, input, held, gathered);
        let spec = &self.without_wgrad(spec);
        if let Some([a, b]) = adapter {
            let scaled = self.is_dora(spec).then(|| spec.shape[0]);
            self.adapter_gemms(a, b, (parallel, [held, computed]), scaled);
        }
        if t == 1 {
            return;
        }
        let (element, quant) = (self.shape.dtype.size(), spec.quant);
        let own_blocks = rows.local.is_multiple_of(BLOCK);
        match parallel {
            Parallel::Replicated => {}
            Parallel::Column => {
                let width = spec.parts[0].shape[1];
                let fp8_forward = quant.is_some_and(|q| q.fprop && gathers_fp8(&q));
                let fp8_wgrad = quant.is_some_and(|q| {
                    q.wgrad && (q.recipe.per_tensor() || q.recipe.per_block() && own_blocks)
                });
                let size = |fp8: bool| if fp8 { 1 } else { element };
                let block = |fp8: bool| fp8 && quant.is_some_and(|q| q.recipe.per_block());
                let x = self.moved(width, size(fp8_forward))
                    + if block(fp8_forward) { self.scales(rows.local, width) } else { 0 };
                self.forward(Group::Tp, OpKind::AllGather, x);
                self.backward(Group::Tp, OpKind::ReduceScatter, self.moved(width, element));
                let x = self.moved(width, size(fp8_wgrad))
                    + if block(fp8_wgrad) { self.scales(width, rows.local) } else { 0 };
                // A detached LM head has no wgrad; in FP8 its input is gathered all the same.
                let detached = self.detached && self.block == Block::Output && quant.is_none();
                if !detached && !spec.group.frozen {
                    self.backward(Group::Tp, OpKind::AllGather, x);
                }
            }
            Parallel::Row => {
                let width = spec.parts[0].shape[0];
                self.forward(Group::Tp, OpKind::ReduceScatter, self.moved(width, element));
                let both = quant.filter(|q| q.dgrad && q.wgrad);
                let dy = match both {
                    Some(q) if q.recipe.per_tensor() => self.moved(width, 1),
                    // Rows and columns are quantized apart: two bytes of each element, and the scales of both.
                    Some(q) if q.recipe.per_block() && own_blocks => {
                        self.moved(width, 2) + self.scales(rows.local, width) + self.scales(width, rows.local)
                    }
                    _ => self.moved(width, element),
                };
                self.backward(Group::Tp, OpKind::AllGather, dy);
            }
        }
        // Per-tensor current scaling: the amax of input and gradient is all-reduced.
        if let Some(q) = quant.filter(|q| q.recipe.measures()) {
            let amax = self.all_reduce(Group::Tp, 4);
            if q.fprop || q.wgrad {
                self.forward(Group::Tp, OpKind::AllReduce, amax);
            }
            if q.dgrad || q.wgrad {
                self.backward(Group::Tp, OpKind::AllReduce, amax);
            }
        }
    }

    /// A weight as its GEMMs see it: there is no wgrad of a frozen one, and an adapter reads the input as it is.
    pub(super) fn without_wgrad<'s>(&self, spec: &'s ParamSpec) -> Cow<'s, ParamSpec> {
        let wgrad = !spec.group.frozen && self.adapter(spec).is_none();
        match spec.quant {
            // Names of many experts make a copy slow.
            Some(q) if q.wgrad && !wgrad => {
                let quant = Some(LinearQuant { wgrad: false, ..q });
                Cow::Owned(ParamSpec { quant, ..spec.clone() })
            }
            _ => Cow::Borrowed(spec),
        }
    }

    /// A and B of a weight's adapters.
    pub(super) fn adapter(&self, spec: &ParamSpec) -> Option<[&'a ParamSpec; 2]> {
        let first = &spec.parts[..spec.parts.len() / spec.matrices.max(1)];
        let modules: Vec<&str> = first.iter().filter_map(|p| p.name.strip_suffix(".weight")).collect();
        let find = |module: &str, end: &str| self.params.get(format!("{module}{end}").as_str()).copied();
        let b = modules.iter().find_map(|module| find(module, LORA_B))?;
        let a = modules.iter().find_map(|module| find(module, LORA_A));
        Some([a.or_else(|| find(&fused_module(&modules), LORA_A))?, b])
    }

    /// Whether the adapters of a weight are DoRA's, which save the output before it is scaled.
    pub(super) fn is_dora(&self, spec: &ParamSpec) -> bool {
        let modules = spec.parts.iter().filter_map(|p| p.name.strip_suffix(".weight"));
        self.params.keys().any(|name| name.ends_with(LORA_M))
            && modules
                .into_iter()
                .any(|module| self.params.contains_key(format!("{module}{LORA_M}").as_str()))
    }

    /// GEMMs, saved activations and collectives of adapters on a linear that reads `rows[0]` rows of its input; with DoRA, its
    /// `scaled` output features. DoRA's norms, `[out]` values once a step, are not counted.
    ///
    /// | base | h = x·Aᵀ | dh = dy·B |
    /// |---|---|---|
    /// | column-parallel | T rows, all-gathered | N rows, reduce-scattered |
    /// | row-parallel | N rows, reduce-scattered | T rows, all-gathered |
    /// | replicated | T rows | T rows |
    fn adapter_gemms(
        &mut self,
        a: &ParamSpec,
        b: &ParamSpec,
        (parallel, rows): (Parallel, [usize; 2]),
        scaled: Option<usize>,
    ) {
        let [held, computed] = rows;
        let (out_rows, width) = match parallel {
            Parallel::Row => (self.rows.local, a.shape[0]),
            _ => (computed, a.shape[0]),
        };
        self.gemms(a, held);
        self.gemms(b, out_rows);
        let module = b.parts[0].name.trim_end_matches(LORA_B).rsplit('.').next().unwrap_or("x");
        self.save(&format!("lora.{module}"), &[out_rows, width], self.shape.dtype);
        if let Some(out) = scaled {
            self.save(&format!("lora.{module}.unscaled"), &[out_rows, out], self.shape.dtype);
        }
        let moved = self.moved(width, self.shape.dtype.size());
        let (forward, backward) = match parallel {
            Parallel::Replicated => return,
            Parallel::Column => (OpKind::AllGather, OpKind::ReduceScatter),
            Parallel::Row => (OpKind::ReduceScatter, OpKind::AllGather),
        };
        self.forward(Group::Tp, forward, moved);
        self.backward(Group::Tp, backward, moved);
    }

    /// Scales f32 of FP8 blocks of `[r, c]` along c, sent to every other tensor-parallel rank.
    fn scales(&self, r: usize, c: usize) -> u64 {
        ((self.shape.ranks.tp.size - 1) * 4 * c.div_ceil(BLOCK) * r.next_multiple_of(4)) as u64
    }

    /// What wgrad needs of the input `[rows, k]`; `gathered`: it reads the rows of all tensor-parallel ranks.
    pub(super) fn save_input(&mut self, spec: &ParamSpec, input: Input, rows: usize, gathered: bool) {
        if spec.group.frozen && self.adapter(spec).is_none() && !matches!(input, Input::Kept(_)) {
            return;
        }
        let spec = &self.without_wgrad(spec);
        let k = spec.shape[1];
        let name = match input {
            Input::Dropped => return,
            Input::Kept(name) => return self.save(name, &[rows, k], self.shape.dtype),
            Input::Saved(name) => name,
        };
        let module = spec.parts[0].name.trim_end_matches(".weight").rsplit('.').next().unwrap_or("x");
        let copy = format!("{name}.{module}");
        match spec.quant.filter(|q| q.wgrad) {
            Some(q) if q.recipe.per_tensor() && gathered => self.save_fp8(&copy, [rows, k], &q),
            Some(q) if q.recipe.per_block() && gathered && !rows.is_multiple_of(BLOCK) => {
                self.save(name, &[rows, k], self.shape.dtype);
            }
            Some(q) if q.recipe.per_tensor() || q.recipe.per_block() => {
                self.save_fp8(&copy, [k, rows], &q);
            }
            // Emulated formats round into the compute dtype, for each orientation apart.
            Some(_) if !gathered => self.save(&copy, &[rows, k], self.shape.dtype),
            _ => self.save(name, &[rows, k], self.shape.dtype),
        }
    }

    /// An FP8 operand `[r, c]`, contracted along c, and the scales of its blocks.
    pub(super) fn save_fp8(&mut self, name: &str, [r, c]: [usize; 2], quant: &LinearQuant) {
        let recipe = quant.recipe;
        self.save(name, &[r, c.next_multiple_of(FP8_ALIGN)], recipe.format(Role::Input));
        if recipe.per_block() {
            self.save(&format!("{name}.scales"), &recipe.scaling(Role::Input).scales(r, c), DType::F32);
        }
    }
}

/// Whether rows are quantized before they are gathered.
fn gathers_fp8(q: &LinearQuant) -> bool {
    q.recipe.per_tensor() || q.recipe.per_block()
}

/// Bytes a rank sends in an all-reduce of `bytes` over `n` ranks.
pub(super) fn all_reduce(n: usize, bytes: usize) -> u64 {
    (2 * (n as u64 - 1) * bytes as u64) / n as u64
}
