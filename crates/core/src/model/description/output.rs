//! Embedding, LM head with the loss, and multi-token prediction.

use super::layer::{Input, LayerBuilder};
use super::shape::Group;
use super::{Block, Gemm, LayerDescription};
use crate::model::config::Positions;
use ferrotron_comm::OpKind;
use ferrotron_engine::quant::LinearGemm;
use ferrotron_tensor::DType;

impl LayerBuilder<'_> {
    /// The embedding of the tokens.
    pub(super) fn embedding(mut self, name: &str) -> LayerDescription {
        self.lookup(name);
        self.finish()
    }

    fn lookup(&mut self, name: &str) {
        let (m, rows) = (&self.shape.model, self.rows);
        self.begin(Block::Embedding, false);
        self.save(&format!("{name}.ids"), &[rows.all], DType::I32);
        if m.positions == Positions::Learned {
            self.save(&format!("{name}.positions"), &[rows.local], DType::I32);
        }
        // Each rank looks up its rows of the table: partial embeddings are reduce-scattered, their gradients gathered.
        let moved = self.moved(m.hidden, self.shape.dtype.size());
        self.forward(Group::Tp, OpKind::ReduceScatter, moved);
        let trained = self.weight("embed.tokens").is_none_or(|spec| !spec.group.frozen);
        if !self.detached && trained {
            self.backward(Group::Tp, OpKind::AllGather, moved);
        }
    }

    /// Final norm, LM head and loss.
    pub(super) fn output(mut self) -> LayerDescription {
        self.begin(Block::Norm, false);
        self.norm("final_norm", self.rows.local, self.shape.model.hidden);
        self.lm_head(self.shape.model.mtp.is_some());
        self.finish()
    }

    /// LM head and loss of normed hidden states; `followed`: an MTP layer continues from them.
    fn lm_head(&mut self, followed: bool) {
        let rows = self.rows;
        self.begin(Block::Output, false);
        let module = if self.shape.model.tied { "embed.tokens" } else { "head" };
        if followed && self.weight(module).is_some_and(|spec| spec.quant.is_some_and(|q| q.wgrad)) {
            // An FP8 head saves a copy, but the norm of the next MTP layer needs the values.
            self.begin(Block::Norm, false);
            self.save("final", &[rows.local, self.shape.model.hidden], self.shape.dtype);
            self.begin(Block::Output, false);
        }
        self.linear(module, Input::Saved("final"));
        // Maximum, sum, label's logit and mean of each row's logits, from every rank's columns.
        let statistics = ((self.shape.ranks.tp.size - 1) * rows.all * 4 * 4) as u64;
        self.forward(Group::Tp, OpKind::AllGather, statistics);
        let Some(vocab) = self.weight(module).map(|spec| spec.shape[0]) else { return };
        let dtype = self.shape.dtype;
        match self.shape.options.loss.chunk.filter(|chunk| *chunk < rows.all) {
            // The loss overwrites the logits with their gradient.
            None => self.save("dlogits", &[rows.all, vocab], dtype),
            // The gradient of the hidden states is saved; wgrad computes the logits of each chunk once more.
            Some(chunk) => {
                self.save("dx", &[rows.all, self.shape.model.hidden], dtype);
                self.begin(Block::Output, true);
                self.save("dlogits", &[chunk, vocab], dtype);
                let trained = self.weight(module).is_none_or(|spec| !spec.group.frozen);
                if !self.detached && trained {
                    self.backward(Group::Tp, OpKind::AllGather, statistics);
                    let of_head = |g: &&mut Gemm| g.gemm == LinearGemm::Fprop && g.names[0] == module;
                    self.layer.gemms.iter_mut().filter(of_head).for_each(|g| g.recomputed = true);
                }
            }
        }
    }

    /// The MTP layer of a depth: `norm(layer(W_eh·[enorm(embedding); hnorm(h)]))` and the LM head.
    pub(super) fn mtp_layer(mut self, depth: usize) -> LayerDescription {
        let (m, rows) = (&self.shape.model, self.rows);
        let module = depth.min(m.mtp_modules().saturating_sub(1));
        self.detached = self.shape.options.mtp.detach;
        self.lookup("embed");
        self.begin(Block::Norm, false);
        self.norm("enorm", rows.local, m.hidden);
        self.norm_statistics("hnorm", rows.local);
        self.begin(Block::Mlp, false);
        self.linear(&format!("mtp.{module}.eh"), Input::Kept("eh.input"));
        self.transformer_layer(&format!("mtp.{module}.layer"), m.layers + module);
        self.begin(Block::Norm, false);
        self.norm("norm", rows.local, m.hidden);
        self.lm_head(depth + 1 < m.mtp_depth());
        self.finish()
    }
}
