//! What MoE layers need to know of a micro-batch: which rows are tokens, and their place in the batch.

use super::capacity::is_of_rank;
use super::{Capacity, Dispatcher, MoeTraining};
use crate::attention::Layout;
use crate::{GroupRank, Rank, StepContext, StepNumber, Tokens};
use ferrotron_tensor::{Category, DType, Result, Tensor, shape_error};

/// The rows of this rank in a micro-batch.
#[derive(Clone)]
pub struct MoeInput {
    /// i32 `[rows]`: 0 for tokens, -1 for padding.
    pub segments: Tensor,
    /// i32 `[rows]`: sequence of each token; -1 for padding.
    pub sequence_ids: Tensor,
    /// Sequences in the micro-batch, the run of padding at the end of a packed row among them; at most so many where the pass is
    /// captured and they differ from replay to replay.
    pub sequences: usize,
    /// Sequences are documents that share rows, and of any length.
    pub packed: bool,
    /// Tokens of the micro-batch over all ranks.
    pub tokens: usize,
    /// i32 `[rows]`: index of each row's token in the micro-batch; 0 for padding.
    pub token_index: Tensor,
    /// The order in which tokens are dropped over capacity; none where rows are in it, or nothing is dropped.
    pub order: Option<TokenOrder>,
    /// Rows of each rank of the expert group, for the all-gather dispatcher.
    pub rows_per_rank: Vec<usize>,
}

/// Permutation between rows and token order: as in Megatron Core, the first tokens of all sequences come before their second ones.
/// The rows are those of the tp×cp ranks, one rank after another, or of this rank where the capacity is of each rank.
#[derive(Clone)]
pub struct TokenOrder {
    /// i32 `[all]`: for each position in token order, the row it comes from.
    pub to_tokens: Tensor,
    /// i32 `[rows]`: position of each of this rank's rows in token order.
    pub mine: Tensor,
}

/// A micro-batch within its step.
#[derive(Clone, Copy)]
pub struct MoeBatch<'a> {
    /// Its rows.
    pub input: &'a MoeInput,
    /// Step of the run.
    pub step: StepNumber<'a>,
    /// i32 `[rows]`: index of each row's token in the step.
    pub rows: &'a Tensor,
    /// Weight of the micro-batch in means over the step: 1 / (micro-batches of all data-parallel ranks).
    pub micro_batch_weight: f32,
}

/// What [`MoeInput`] says of rows, on the host: `segments`, `sequence_ids` and `token_index`.
pub struct MoeRows {
    /// i32 `[rows]` each.
    pub rows: [Vec<i32>; 3],
    /// Sequences in the micro-batch, the run of padding at the end of a packed row among them.
    pub sequences: usize,
    /// Tokens of the micro-batch over all ranks.
    pub tokens: usize,
}

impl MoeRows {
    /// The rows `tokens` of this rank in a micro-batch of `layout`. `padding[t]` marks token t as padding.
    pub fn new(rank: &Rank, layout: &Layout, tokens: &Tokens, padding: Option<&[bool]>) -> Result<MoeRows> {
        let whole = layout.tokens();
        if padding.is_some_and(|p| p.len() != whole) {
            return shape_error("padding", format!("one flag for each of {whole} tokens is needed"));
        }
        let lengths = layout.lengths();
        let mut sequence = Vec::with_capacity(whole);
        for (number, len) in (0..).zip(&lengths) {
            sequence.resize(sequence.len() + len, number);
        }
        let mine = own_rows(rank, tokens);
        let is_token = |t: usize| padding.is_none_or(|p| !p[t]);
        let of = |f: &dyn Fn(usize) -> i32, none: i32| -> Vec<i32> {
            mine.iter().map(|t| t.filter(|t| is_token(*t)).map_or(none, f)).collect()
        };
        Ok(MoeRows {
            rows: [of(&|_| 0, -1), of(&|t| sequence[t], -1), of(&|t| t as i32, 0)],
            sequences: lengths.len(),
            tokens: (0..whole).filter(|t| is_token(*t)).count(),
        })
    }
}

impl MoeInput {
    /// Describes the rows `tokens` of this rank in a micro-batch of `layout`. `padding[t]` marks token t as padding.
    /// Collective over a pipeline stage.
    pub fn new(
        rank: &Rank,
        layout: &Layout,
        tokens: &Tokens,
        padding: Option<&[bool]>,
        training: &MoeTraining,
    ) -> Result<MoeInput> {
        let MoeRows { rows, sequences, tokens: count } = MoeRows::new(rank, layout, tokens, padding)?;
        let n = rows[0].len();
        let [segments, sequence_ids, token_index] =
            rows.map(|values| rank.compute.upload(&values, &[n], Category::Activations));
        let rows_per_rank = match (training.dispatcher, rank.etp_ep_group.size()) {
            (Dispatcher::AllGather, 2..) => {
                let all = rank.etp_ep_group.all_gather_bytes(&(n as u64).to_le_bytes(), "rows per rank")?;
                let number = |b: &Vec<u8>| b.as_slice().try_into().map_or(0, u64::from_le_bytes) as usize;
                all.iter().map(number).collect()
            }
            _ => vec![n],
        };
        Ok(MoeInput {
            segments: segments?,
            sequence_ids: sequence_ids?,
            sequences,
            packed: matches!(layout, Layout::Packed { .. }),
            tokens: count,
            token_index: token_index?,
            order: training.capacity.map_or(Ok(None), |c| order(rank, c, (layout, tokens), n))?,
            rows_per_rank,
        })
    }
}

/// The token of each of this rank's rows of the residual stream.
fn own_rows(rank: &Rank, tokens: &Tokens) -> Vec<Option<usize>> {
    let n = tokens.rows().len() / rank.tp.size();
    tokens.rows()[rank.tp.rank() * n..][..n].to_vec()
}

/// Order in which a capacity drops the tokens of rows; every rank can compute which tokens the others hold.
fn order(
    rank: &Rank,
    capacity: Capacity,
    (layout, tokens): (&Layout, &Tokens),
    rows: usize,
) -> Result<Option<TokenOrder>> {
    let place = |t: usize| match *layout {
        Layout::Rows { count, len } => t % len * count + t / len,
        Layout::Packed { .. } => t,
    };
    let (tp, cp) = (rank.tp.size(), rank.cp.size());
    let (all, first) = if is_of_rank(capacity, rank) {
        (own_rows(rank, tokens), 0)
    } else {
        // tp is the fastest axis of the group.
        let mut all: Vec<Option<usize>> = Vec::with_capacity(rows * tp * cp);
        for c in 0..cp {
            // Every rank has as many rows.
            let of = Tokens::new(layout, GroupRank { rank: c, size: cp }, tp)?;
            all.extend(of.padded_to(rows * tp).rows());
        }
        (all, rank.tp_cp_group.rank() * rows)
    };
    if all.len() == rows && all.iter().flatten().map(|t| place(*t)).is_sorted() {
        return Ok(None);
    }
    let mut sorted: Vec<usize> = (0..all.len()).collect();
    sorted.sort_by_key(|row| all[*row].map_or(usize::MAX, &place));
    let mut places = vec![0i32; all.len()];
    for (place, row) in sorted.iter().enumerate() {
        places[*row] = place as i32;
    }
    let to_tokens: Vec<i32> = sorted.iter().map(|row| *row as i32).collect();
    let s = &rank.compute;
    Ok(Some(TokenOrder {
        to_tokens: s.upload(&to_tokens, &[all.len()], Category::Activations)?,
        mine: s.upload(&places[first..first + rows], &[rows], Category::Activations)?,
    }))
}

impl StepContext<'_> {
    /// i32 `[rows]`: 0 for tokens, -1 for padding; without a description of the micro-batch, all rows are tokens.
    pub(crate) fn segments(&self, rows: usize) -> Result<Tensor> {
        match self.moe {
            Some(moe) => Ok(moe.input.segments.clone()),
            None => self.rank.compute.zeros(&[rows], DType::I32, Category::Workspace),
        }
    }

    /// State of the MoE layers; an error where the model has none.
    pub(crate) fn moe_state(&self) -> Result<&super::MoeState> {
        match self.state.moe() {
            Some(m) => Ok(m),
            None => shape_error("MoE", "the model declares no MoE layer"),
        }
    }
}
