//! The complete attention block, weight gradients included, against one rank.

use super::ranks::{Grid, local, tokens};
use super::support::{dot, host, move_saved, numbers, rounded, write};
use ferrotron_engine::attention::{
    Attention, AttentionConfig, Layout, MlaConfig, MultiLatentAttention, RopeTable, SelfAttention,
};
use ferrotron_engine::{Declarations, GradBuffer, ParamId, Params, Part, Rank, StepContext, StepState};
use ferrotron_kernels::{AttentionParams, MaskAlign, Norm, RopeStyle};
use ferrotron_tensor::{Category, DType};
use std::collections::BTreeMap;

const HIDDEN: usize = 16;
const DIM: usize = 8;
const PLACES: usize = 80;
const NORM: Norm = Norm { subtract_mean: false, eps: 1e-5, zero_centred: false };

#[derive(Clone, Debug)]
struct Case {
    heads: usize,
    kv_heads: usize,
    bias: bool,
    qk_norm: bool,
    window: Option<usize>,
    softcap: Option<f32>,
    sink: bool,
    /// MLA: rank of the query down-projection, if any.
    latent: Option<Option<usize>>,
    layout: Layout,
}

fn cases() -> Vec<Case> {
    let packed = Layout::Packed { offsets: vec![0, 0, 37, 38, 38, 41, 61] };
    let rows = Layout::Rows { count: 2, len: 23 };
    let base = Case {
        heads: 8,
        kv_heads: 4,
        bias: false,
        qk_norm: false,
        window: None,
        softcap: None,
        sink: false,
        latent: None,
        layout: packed.clone(),
    };
    vec![
        // Ring.
        base.clone(),
        Case { kv_heads: 1, bias: true, qk_norm: true, softcap: Some(2.0), ..base.clone() },
        Case { kv_heads: 2, qk_norm: true, layout: rows.clone(), ..base.clone() },
        Case { kv_heads: 2, bias: true, sink: true, ..base.clone() },
        // Large enough that one rank's rounding error is not small by chance.
        Case { latent: Some(Some(48)), bias: true, ..base.clone() },
        Case { latent: Some(None), sink: true, layout: rows.clone(), ..base.clone() },
        // All-to-all, or all-gather where heads do not divide by cp.
        Case { kv_heads: 8, window: Some(6), bias: true, layout: rows.clone(), ..base.clone() },
        Case { kv_heads: 8, window: Some(6), sink: true, layout: rows, ..base.clone() },
        Case { kv_heads: 2, window: Some(6), sink: true, ..base.clone() },
        Case { latent: Some(Some(12)), window: Some(6), ..base.clone() },
        Case { kv_heads: 2, window: Some(6), qk_norm: true, softcap: Some(1.0), ..base },
    ]
}

/// Output, input gradient and weight gradients, unsharded.
#[derive(Debug, PartialEq)]
struct Result {
    y: Vec<f64>,
    dx: Vec<f64>,
    grads: BTreeMap<String, Vec<f64>>,
}

impl Case {
    fn scores(&self) -> AttentionParams {
        AttentionParams {
            scale: 0.5,
            softcap: self.softcap,
            causal: true,
            align: MaskAlign::TopLeft,
            left: self.window.map(|w| w - 1),
            right: None,
            fp8: false,
        }
    }

    fn declare(&self, d: &mut Declarations, rank: &Rank) -> SelfAttention {
        let (name, rope) = ("attn", Some(Case::table(rank)));
        match self.latent {
            None => {
                SelfAttention::MultiHead(Attention::declare(d, name, self.config(), rope).unwrap().into())
            }
            Some(q_rank) => {
                let config = self.latent_config(q_rank);
                SelfAttention::Mla(MultiLatentAttention::declare(d, name, config, rope).unwrap().into())
            }
        }
    }

    fn latent_config(&self, q_rank: Option<usize>) -> MlaConfig {
        MlaConfig {
            hidden: HIDDEN,
            heads: self.heads,
            q_rank,
            kv_rank: 10,
            nope: 4,
            rope: DIM,
            v: 6,
            norm: NORM,
            down_bias: self.bias,
            out_bias: self.bias,
            sink: self.sink,
            scores: self.scores(),
            std: (0.1, 0.1),
        }
    }

    fn config(&self) -> AttentionConfig {
        AttentionConfig {
            hidden: HIDDEN,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: DIM,
            qkv_bias: self.bias,
            out_bias: self.bias,
            scores: self.scores(),
            qk_norm: self.qk_norm.then_some(NORM),
            qk_norm_all_heads: false,
            sink: self.sink,
            std: (0.1, 0.1),
        }
    }

    fn table(rank: &Rank) -> RopeTable {
        let angle = |i: usize| (i / (DIM / 2)) as f64 * 10f64.powf(-((i % (DIM / 2)) as f64));
        let up = |f: fn(f64) -> f64| {
            let x: Vec<f32> = (0..PLACES * DIM / 2).map(|i| f(angle(i)) as f32).collect();
            rank.compute.upload(&x, &[PLACES, DIM / 2], Category::Parameters).unwrap()
        };
        RopeTable { cos: up(f64::cos), sin: up(f64::sin), style: RopeStyle::Half }
    }

    /// Deterministic weights of a logical tensor.
    fn weights(part: &Part, dtype: DType) -> Vec<f64> {
        let seed = part.name.bytes().fold(7, |h: u64, b| h.wrapping_mul(31).wrapping_add(u64::from(b)));
        let (n, gain) = (part.shape.iter().product(), part.name.contains("norm"));
        rounded(dtype, numbers(seed, n).iter().map(|x| x * 0.6 + if gain { 1.0 } else { 0.0 }).collect())
    }

    /// Runs in `dtype` on inputs rounded to `values`.
    fn run(&self, grid: Grid, dtype: DType, values: DType, moving: bool) -> Result {
        let positions: Vec<i32> = self.layout.lengths().iter().flat_map(|n| 0..*n as i32).collect();
        let n = positions.len();
        let [x, dy] = [1, 2].map(|seed| rounded(values, numbers(seed, n * HIDDEN)));
        let parts = grid.run(|rank| {
            let mut d = Declarations::at(rank.place());
            let attention = self.declare(&mut d, rank);
            let params = Params::allocate(rank, d.finish(), dtype).unwrap();
            for (t, spec) in params.values().iter().zip(params.specs()) {
                let held = spec
                    .held()
                    .flat_map(|(part, cut, _)| cut.take(&part.shape, &Case::weights(part, values)));
                write(rank, t, &held.collect::<Vec<_>>());
            }
            let tokens = tokens(rank, &self.layout);
            // Between blocks a tensor-parallel rank holds a sequence shard.
            let rows = tokens.rows().len() / rank.tp.size();
            let share = |all: &[f64]| {
                let t = rank.activation(&[rows, HIDDEN], dtype).unwrap();
                let mine = &local(&tokens, HIDDEN, all)[rank.tp.rank() * rows * HIDDEN..][..rows * HIDDEN];
                write(rank, &t, mine);
                t
            };
            let places = tokens.take(&positions, 0).unwrap();
            let places = rank.compute.upload(&places, &[places.len()], Category::Activations).unwrap();
            let state = StepState::new(rank, &params, &[]).unwrap();
            let pass = StepContext::new(rank, &params, &state);
            let (y, mut saved) = attention.forward(&pass, &share(&x), tokens.layout(), &places).unwrap();
            if moving {
                assert!(move_saved(rank, &params, &mut saved) >= 4);
            }
            let (dx, work) = attention.backward(&pass, saved, tokens.layout(), &places, &share(&dy)).unwrap();
            let mut buffer = GradBuffer::new(params.specs());
            work.run(rank, &mut buffer).unwrap();
            buffer.finish(rank).unwrap();
            let mut grads = Vec::new();
            for (i, spec) in params.specs().iter().enumerate() {
                let held = host(rank, &buffer.get(ParamId(i)).unwrap());
                for (part, cut, range) in spec.held() {
                    let mut whole = vec![0.0; part.shape.iter().product()];
                    cut.put(&part.shape, &held[range], &mut whole);
                    grads.push((part.name.clone(), whole));
                }
            }
            (tokens, host(rank, &y), host(rank, &dx), grads)
        });
        let mut all =
            Result { y: vec![f64::NAN; n * HIDDEN], dx: vec![f64::NAN; n * HIDDEN], grads: BTreeMap::new() };
        for ranks in parts.chunks(grid.tp) {
            let (mut y, mut dx) = (Vec::new(), Vec::new());
            for rank in ranks {
                y.extend_from_slice(&rank.1);
                dx.extend_from_slice(&rank.2);
            }
            ranks[0].0.put(&y, HIDDEN, &mut all.y).unwrap();
            ranks[0].0.put(&dx, HIDDEN, &mut all.dx).unwrap();
            // Every rank has a partial sum of each gradient, over its tokens or heads.
            for (name, grad) in ranks.iter().flat_map(|r| &r.3) {
                let sum = all.grads.entry(name.clone()).or_insert_with(|| vec![0.0; grad.len()]);
                sum.iter_mut().zip(grad).for_each(|(s, g)| *s += g);
            }
        }
        all
    }
}

fn apart(ours: &[f64], theirs: &[f64]) -> Vec<f64> {
    assert_eq!(ours.len(), theirs.len());
    ours.iter().zip(theirs).map(|(a, b)| (a - b).abs()).collect()
}

fn most(x: &[f64]) -> f64 {
    x.iter().fold(0.0, |m, x| if x.is_nan() { f64::NAN } else { x.abs().max(m) })
}

impl Result {
    fn all(&self) -> impl Iterator<Item = (&str, &Vec<f64>)> {
        let named = [("output", &self.y), ("gradient of the input", &self.dx)];
        named.into_iter().chain(self.grads.iter().map(|(name, g)| (&**name, g)))
    }
}

#[test]
fn context_parallel_block_matches_one_rank() {
    let one = Grid { cp: 1, tp: 1, overlap: true };
    for (case, dtype) in cases().iter().flat_map(|c| [(c, DType::F32), (c, DType::BF16)]) {
        let alone = case.run(one, dtype, dtype, false);
        let truth = case.run(one, DType::F32, dtype, false);
        for (cp, tp) in [(1, 2), (2, 1), (2, 2), (4, 1), (4, 2)] {
            let what = format!("{case:?} {dtype} cp {cp} tp {tp}");
            let many = case.run(Grid { cp, tp, overlap: true }, dtype, dtype, false);
            assert!(many.grads.keys().eq(alone.grads.keys()), "{what}");
            for (((name, ours), (_, alone)), (_, truth)) in many.all().zip(alone.all()).zip(truth.all()) {
                if dtype == DType::F32 {
                    let (found, room) = (most(&apart(ours, alone)), 1e-5 * most(alone) + 1e-7);
                    assert!(found <= room, "{what} {name}: {found:.1e} apart, allowed {room:.1e}");
                } else {
                    // In bf16 the bound is one rank's own error, since cancelling sums have no useful relative bound. Partial
                    // sums are rounded twice where one rank rounds once.
                    let error = |x: &[f64]| dot(&apart(x, truth), &apart(x, truth)).sqrt();
                    let (found, room) = (error(ours), 2.0 * error(alone) + 1e-3 * dot(truth, truth).sqrt());
                    assert!(found <= room, "{what} {name}: {found:.1e} from the truth, allowed {room:.1e}");
                }
            }
            let again = case.run(Grid { cp, tp, overlap: false }, dtype, dtype, true);
            assert_eq!(again, many, "{what}: without overlap, and what was saved moved between the passes");
        }
    }
}
