//! A dense MLP.

use super::Pass;
use super::layer::{Input, LayerBuilder};
use super::shape::Group;
use ferrotron_comm::OpKind;

impl LayerBuilder<'_> {
    /// `down(act(gate(x))·up(x))`, or `down(act(up(x)))` without a gate, declared as `<name>.*`. With `output_recomputed` a
    /// recomputation of the block computes its output too, and not only what backward reads.
    pub(super) fn mlp(&mut self, name: &str, input: Input, output_recomputed: bool) {
        let gated = self.shape.model.gated;
        let up = format!("{name}.{}", if gated { "gate" } else { "up" });
        let (prefix, rows) = (name.rsplit('.').next().unwrap_or("mlp").to_string(), self.rows.all);
        let chunk = self.shape.mlp_chunk.filter(|chunk| *chunk < self.rows.local);
        if let Some(chunk) = chunk {
            return self.mlp_in_chunks([&up, &format!("{name}.down")], &prefix, chunk);
        }
        self.linear(&up, input);
        if let Some(width) = self.weight(&up).map(|spec| spec.shape[0]) {
            self.save(&format!("{prefix}.h"), &[rows, width], self.shape.dtype);
        }
        let activation = format!("{prefix}.activation");
        let input = if self.shape.recompute.activation { Input::Dropped } else { Input::Saved(&activation) };
        self.down(&format!("{name}.down"), input, output_recomputed);
    }

    /// The down-projection, whose output backward does not need.
    fn down(&mut self, down: &str, input: Input, output_recomputed: bool) {
        let Some(spec) = self.weight(down) else { return };
        self.save_input(spec, input, self.rows.all, false);
        let recomputed = self.recomputed;
        // DoRA's backward reads it.
        self.recomputed = recomputed && (output_recomputed || self.is_dora(spec));
        self.linear(down, Input::Dropped);
        if recomputed && !self.recomputed && self.shape.ranks.tp.size > 1 {
            // Its input is quantized once more, for wgrad.
            if spec.quant.is_some_and(|q| q.recipe.measures() && q.wgrad) {
                self.send(Group::Tp, OpKind::AllReduce, self.all_reduce(Group::Tp, 4), Pass::Recompute);
            }
        }
        self.recomputed = recomputed;
    }

    /// An MLP that computes `chunk` tokens of a rank at a time and saves its input alone: backward recomputes each chunk.
    fn mlp_in_chunks(&mut self, [up, down]: [&str; 2], prefix: &str, chunk: usize) {
        let rows = chunk * self.shape.ranks.tp.size;
        let dtype = self.shape.dtype;
        let (name, dropped) = (format!("normed_{prefix}"), self.shape.recomputes_norms());
        if let Some(spec) = self.weight(up).filter(|_| !dropped) {
            self.save(&name, &[self.rows.local, spec.shape[1]], dtype);
        }
        let recomputed = std::mem::replace(&mut self.recomputed, true);
        self.linear(up, Input::Dropped);
        if let Some(width) = self.weight(up).map(|spec| spec.shape[0]) {
            self.save(&format!("{prefix}.h"), &[rows, width], dtype);
        }
        if let Some(spec) = self.weight(down) {
            self.save(&format!("{prefix}.activation"), &[rows, spec.shape[1]], dtype);
        }
        self.down(down, Input::Dropped, false);
        self.recomputed = recomputed;
    }
}
