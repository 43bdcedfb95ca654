//! A dense MLP.

use super::layer::{Input, LayerBuilder};

impl LayerBuilder<'_> {
    /// `down(act(gate(x))·up(x))`, or `down(act(up(x)))` without a gate, declared as `<name>.*`.
    pub(super) fn mlp(&mut self, name: &str, input: Input) {
        let gated = self.shape.model.gated;
        let up = format!("{name}.{}", if gated { "gate" } else { "up" });
        let (prefix, rows) = (name.rsplit('.').next().unwrap_or("mlp").to_string(), self.rows.all);
        self.linear(&up, input);
        if let Some(width) = self.weight(&up).map(|spec| spec.shape[0]) {
            self.save(&format!("{prefix}.h"), &[rows, width], self.shape.dtype);
        }
        let activation = format!("{prefix}.activation");
        let input = if self.shape.recompute.activation { Input::Dropped } else { Input::Saved(&activation) };
        self.linear(&format!("{name}.down"), input);
    }
}
