//! Recomputed MoE layers take the routing that was saved with their micro-batch, in whatever order backward passes run.

use super::{layout, recipe};
use ferrotron_core::model::{Decoder, ForwardMode, ModelOptions, PipelineLayout};
use ferrotron_core::train::upload_targets;
use ferrotron_engine::attention::Layout;
use ferrotron_engine::moe::MoeBatch;
use ferrotron_engine::{
    GradBuffer, Params, Rank, Recompute, StepContext, StepNumber, StepState, initial_values,
};
use std::sync::Arc;

const TOKENS: usize = 16;

struct Model {
    rank: Rank,
    decoder: Decoder,
    params: Params,
    state: StepState,
}

impl Model {
    fn new(set: &[&str]) -> Model {
        let set: Vec<String> = set.iter().map(|s| s.to_string()).collect();
        let (r, _) = recipe(&layout("tp=1"), &set);
        let rank = Rank::cpu(1, 3).unwrap();
        let options = ModelOptions { moe_training: Arc::new(r.moe_training()), ..ModelOptions::default() };
        let (decoder, specs) =
            Decoder::new(&rank, &r.model, TOKENS, &PipelineLayout::default(), &options).unwrap();
        let params = Params::allocate(&rank, specs, r.config.precision.dtype.dtype()).unwrap();
        let state = StepState::new(&rank, &params, decoder.moe_layers()).unwrap();
        for (spec, t) in params.specs().iter().zip(params.values()) {
            let values = spec.held().flat_map(|(part, _, r)| initial_values(3, part, 0..r.len()));
            rank.compute.upload_into(t, &values.map(|x| 4.0 * x).collect::<Vec<f32>>()).unwrap();
        }
        Model { rank, decoder, params, state }
    }

    /// Gradients of each of three micro-batches, by micro-batch: all forward passes, then backward passes in `order`.
    fn gradients(&self, recompute: Recompute, order: [usize; 3]) -> [Vec<Vec<f32>>; 3] {
        let chunk = &self.decoder.chunks()[0];
        self.state.moe().unwrap().begin_step(&self.rank.compute).unwrap();
        let inputs = [0, 1, 2].map(|m| {
            let ids: Vec<i32> = (0..TOKENS as i32).map(|i| (i * i * 5 + i * 3 + 71 * m) % 259).collect();
            let sequences = Layout::Rows { count: 1, len: TOKENS };
            let input = self.decoder.input(&self.rank, &ids, None, sequences).unwrap();
            let labels: Vec<i32> = ids.iter().map(|i| (3 * i + 1) % 259).collect();
            let targets = upload_targets(&self.rank, &input.tokens, &labels, 1.0 / 48.0).unwrap();
            (input, targets)
        });
        let pass = |m: usize| {
            let input = inputs[m].0.moe.as_ref().unwrap();
            let moe = MoeBatch {
                input,
                step: StepNumber::Known(0),
                rows: &input.token_index,
                micro_batch_weight: 1.0 / 3.0,
            };
            let context = StepContext::new(&self.rank, &self.params, &self.state);
            StepContext { recompute, moe: Some(moe), ..context }
        };
        let mut saved = [0, 1, 2].map(|m| {
            let (input, targets) = &inputs[m];
            chunk.forward(&pass(m), input, None, ForwardMode::Train(targets)).unwrap().1
        });
        let mut all = [const { Vec::new() }; 3];
        for m in order {
            // A buffer for each micro-batch: the order of their sum would change its last bits.
            let mut grads = GradBuffer::new(self.params.specs());
            let saved = saved[m].take().unwrap();
            chunk
                .backward(&pass(m), saved, &inputs[m].0, None, &mut |g| g.run(&self.rank, &mut grads))
                .unwrap();
            let download = |t| self.rank.compute.download(t).unwrap();
            all[m] = grads.finish(&self.rank).unwrap().iter().map(download).collect();
        }
        all
    }
}

#[test]
fn backward_passes_may_run_in_any_order() {
    let layer = Recompute { layer: true, ..Recompute::default() };
    let mlp = Recompute { mlp: true, ..Recompute::default() };
    for set in [
        &["moe.balance=aux", "moe.z_loss=0.01"][..],
        &["moe.balance=sinkhorn"],
        &["moe.balance=global_aux", "moe.capacity=1.25"],
    ] {
        let model = Model::new(set);
        let in_order = model.gradients(Recompute::default(), [0, 1, 2]);
        assert!(in_order[0] != in_order[1] && in_order[1] != in_order[2]);
        for recompute in [layer, mlp] {
            for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
                let reordered = model.gradients(recompute, order);
                assert!(reordered == in_order, "{set:?}, {recompute:?}: backward order {order:?}");
            }
        }
    }
}
