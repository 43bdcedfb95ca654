//! What mixtures are told of a micro-batch: which of its rows are tokens, and whose.

use super::Dispatcher;
use crate::attention::Layout;
use crate::{GroupRank, Rank, StepContext, Tokens};
use ferrotron_tensor::{Category, DType, Result, Tensor, shape_error};

/// The rows of a rank in a micro-batch.
#[derive(Clone)]
pub struct MoeInput {
    /// i32 `[rows]`: 0 for tokens, -1 for rows that are none.
    pub segments: Tensor,
    /// i32 `[rows]`: a token's sequence; -1 for rows that are none.
    pub sequence_ids: Tensor,
    /// Sequences of the micro-batch.
    pub sequences: usize,
    /// Tokens of the micro-batch, all ranks' together.
    pub tokens: usize,
    /// i32 `[rows]`: number of each row's token in the micro-batch; 0 for rows that are none.
    pub token_index: Tensor,
    /// Where the rows of all ranks that share the micro-batch stand in the order of its tokens.
    pub order: Option<TokenOrder>,
    /// Rows of each rank that experts get tokens from.
    pub rows_per_rank: Vec<usize>,
}

/// Rows of several ranks, back to back, and in the order of tokens.
#[derive(Clone)]
pub struct TokenOrder {
    /// i32 `[all]`: which row of the ranks' comes to each place in the order of tokens.
    pub to_tokens: Tensor,
    /// i32 `[rows]`: which place in the order of tokens each row of this rank has.
    pub mine: Tensor,
}

/// A micro-batch in its step.
#[derive(Clone, Copy)]
pub struct MoeBatch<'a> {
    /// Its rows.
    pub input: &'a MoeInput,
    /// Step of the run.
    pub step: u64,
    /// i32 `[rows]`: number of each row's token in the step.
    pub rows: &'a Tensor,
    /// 1 / (micro-batches of the step, those of all data-parallel ranks): its share in means over the step.
    pub micro_batch_weight: f32,
}

impl MoeInput {
    /// Of the rows `tokens` of this rank in a micro-batch of `layout`. `padding` says of each token whether it is none.
    /// Every rank of a stage calls it.
    pub fn new(
        rank: &Rank,
        layout: &Layout,
        tokens: &Tokens,
        padding: Option<&[bool]>,
        dispatcher: Dispatcher,
    ) -> Result<MoeInput> {
        let whole = layout.tokens();
        if padding.is_some_and(|p| p.len() != whole) {
            return shape_error(
                "padding",
                format!("it must say of each of {whole} tokens whether it is one"),
            );
        }
        let mut sequence = Vec::with_capacity(whole);
        let mut count = 0;
        for len in layout.lengths() {
            sequence.resize(sequence.len() + len, count);
            count += 1;
        }
        let mine = own_rows(rank, tokens);
        let n = mine.len();
        let is_token = |t: usize| padding.is_none_or(|p| !p[t]);
        let of = |f: &dyn Fn(usize) -> i32, none: i32| -> Result<Tensor> {
            let values: Vec<i32> = mine.iter().map(|t| t.filter(|t| is_token(*t)).map_or(none, f)).collect();
            rank.compute.upload(&values, &[n], Category::Activations)
        };
        let rows_per_rank = match (dispatcher, rank.etp_ep_group.size()) {
            (Dispatcher::AllGather, 2..) => {
                let all = rank.etp_ep_group.all_gather_bytes(&(n as u64).to_le_bytes(), "rows of ranks")?;
                let number = |b: &Vec<u8>| b.as_slice().try_into().map_or(0, u64::from_le_bytes) as usize;
                all.iter().map(number).collect()
            }
            _ => vec![n],
        };
        Ok(MoeInput {
            segments: of(&|_| 0, -1)?,
            sequence_ids: of(&|t| sequence[t], -1)?,
            sequences: count as usize,
            tokens: (0..whole).filter(|t| is_token(*t)).count(),
            token_index: of(&|t| t as i32, 0)?,
            order: order(rank, layout, n)?,
            rows_per_rank,
        })
    }
}

/// The token of each row of the residual stream on this rank.
fn own_rows(rank: &Rank, tokens: &Tokens) -> Vec<Option<usize>> {
    let n = tokens.rows().len() / rank.tp.size();
    tokens.rows()[rank.tp.rank() * n..][..n].to_vec()
}

/// Every rank can tell which tokens the others have.
fn order(rank: &Rank, layout: &Layout, rows: usize) -> Result<Option<TokenOrder>> {
    if rank.tp_cp_group.size() == 1 {
        return Ok(None);
    }
    let (tp, cp) = (rank.tp.size(), rank.cp.size());
    // tp is the faster axis of the group.
    let mut all: Vec<Option<usize>> = Vec::with_capacity(rows * tp * cp);
    for c in 0..cp {
        all.extend(Tokens::new(layout, GroupRank { rank: c, size: cp }, tp)?.rows());
    }
    let mut sorted: Vec<usize> = (0..all.len()).collect();
    sorted.sort_by_key(|row| all[*row].unwrap_or(usize::MAX));
    let mut places = vec![0i32; all.len()];
    for (place, row) in sorted.iter().enumerate() {
        places[*row] = place as i32;
    }
    let first = rank.tp_cp_group.rank() * rows;
    let to_tokens: Vec<i32> = sorted.iter().map(|row| *row as i32).collect();
    let s = &rank.compute;
    Ok(Some(TokenOrder {
        to_tokens: s.upload(&to_tokens, &[all.len()], Category::Activations)?,
        mine: s.upload(&places[first..first + rows], &[rows], Category::Activations)?,
    }))
}

impl StepContext<'_> {
    /// i32 `[rows]`: 0 for tokens, -1 for rows that are none; without a micro-batch, all are tokens.
    pub(crate) fn segments(&self, rows: usize) -> Result<Tensor> {
        match self.moe {
            Some(moe) => Ok(moe.input.segments.clone()),
            None => self.rank.compute.zeros(&[rows], DType::I32, Category::Workspace),
        }
    }

    /// The state of mixtures; an error where the model has none.
    pub(crate) fn moe_state(&self) -> Result<&super::MoeState> {
        match self.params.moe() {
            Some(m) => Ok(m),
            None => shape_error("mixture", "the model declares none"),
        }
    }
}
