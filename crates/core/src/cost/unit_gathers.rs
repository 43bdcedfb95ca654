//! All-gathers of sharded weights in a step (ZeRO-3), counted by the rule that passes gather by: [`UnitSlots`].
//!
//! Passes here enter units in the order of [`Chunk`](crate::model::Chunk)'s, and yield where those do, but compute nothing.

use crate::Result;
use crate::model::ChunkUnits;
use crate::model::description::{StepShape, declare_chunks};
use crate::pipeline::{OpKind, PipelineOp, PipelinePlan, ScheduleStep};
use ferrotron_engine::data_parallel::UnitSlots;
use ferrotron_engine::{ParamSpec, UnitId, interleave, run_to_completion, yield_now};
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

/// All-gathers of every unit in a step after the first, which adds the slots.
pub(super) fn unit_gathers(shape: &StepShape, params: &[ParamSpec]) -> Result<Vec<u64>> {
    let layout = shape.param_layout(params);
    let units = params.iter().map(|p| p.unit.0 + 1).max().unwrap_or(0);
    let Some(slots) = layout.unit_slots(params, shape.shard_sizes(), shape.dtype) else {
        return Ok(vec![0; units]);
    };
    let (_, chunks) = declare_chunks(&shape.model, &shape.ranks, &shape.stages, &shape.options)?;
    let (pp, kind) = (shape.ranks.pp, shape.schedule);
    let plan = PipelinePlan { kind, ..PipelinePlan::new(pp.size, chunks.len(), shape.micro_batches) };
    let schedule = plan.schedule()?;
    let state = RefCell::new(State { slots, gathers: vec![0; units] });
    let passes = Passes { shape, chunks: &chunks, chunked_loss: chunked_loss(shape, params)?, state: &state };
    for _ in 0..2 {
        let mut state = state.borrow_mut();
        state.slots.invalidate();
        state.gathers.fill(0);
        drop(state);
        passes.step(schedule.ranks.get(pp.rank).map_or(&[][..], Vec::as_slice));
    }
    Ok(state.into_inner().gathers)
}

/// Whether the LM head computes the loss in chunks: then its weight gradient needs its weight.
fn chunked_loss(shape: &StepShape, params: &[ParamSpec]) -> Result<bool> {
    let name = if shape.model.tied { "embed.tokens" } else { "head.weight" };
    let head = params.iter().find(|p| p.parts.first().is_some_and(|part| part.name == name));
    let quantized = head.is_some_and(|p| p.quant.is_some());
    Ok(match shape.options.loss.chunk {
        Some(chunk) if !quantized => shape.rows()?.all > chunk,
        _ => false,
    })
}

struct State {
    slots: UnitSlots,
    /// All-gathers of each unit.
    gathers: Vec<u64>,
}

/// The passes of a step over this rank's chunks.
struct Passes<'a> {
    shape: &'a StepShape,
    chunks: &'a [ChunkUnits],
    chunked_loss: bool,
    state: &'a RefCell<State>,
}

/// Keeps a unit in its slot.
type Guard = Option<Arc<()>>;

impl Passes<'_> {
    fn step(&self, steps: &[ScheduleStep]) {
        // LM heads that deferred weight gradients hold.
        let mut deferred: HashMap<(usize, usize), Guard> = HashMap::new();
        for step in steps {
            match step {
                ScheduleStep::Run(op) => self.run(*op, &mut deferred),
                ScheduleStep::Pair(forward, backward) => {
                    let (f, b) = (&self.chunks[forward.chunk], &self.chunks[backward.chunk]);
                    let backward = async { Ok::<_, ()>(self.backward(b, false).await) };
                    let forward = async {
                        self.forward(f).await;
                        Ok(())
                    };
                    let _ = interleave(backward, forward);
                }
                ScheduleStep::Exchange(_) => {}
            }
        }
    }

    fn run(&self, op: PipelineOp, deferred: &mut HashMap<(usize, usize), Guard>) {
        let (chunk, key) = (&self.chunks[op.chunk], (op.chunk, op.micro_batch));
        match op.kind {
            OpKind::Forward => run_to_completion(self.forward(chunk)),
            OpKind::Backward => drop(run_to_completion(self.backward(chunk, false))),
            OpKind::BackwardInput => {
                deferred.insert(key, run_to_completion(self.backward(chunk, true)));
            }
            OpKind::WeightGrad => drop(deferred.remove(&key)),
        }
    }

    fn enter_at(&self, order: &[UnitId], at: usize) -> Guard {
        order.get(at).and_then(|unit| self.enter(*unit, &order[at + 1..]))
    }

    fn enter(&self, unit: UnitId, next: &[UnitId]) -> Guard {
        let state = &mut *self.state.borrow_mut();
        let entered = state.slots.enter(unit, next, self.shape.overlap)?;
        entered.gathers.iter().for_each(|(_, unit)| state.gathers[unit.0] += 1);
        Some(entered.users)
    }

    /// Uses a weight of a unit.
    fn touch(&self, unit: UnitId) {
        drop(self.enter(unit, &[]));
    }

    async fn forward(&self, chunk: &ChunkUnits) {
        if chunk.first_layer > 0 {
            drop(self.enter_at(&chunk.forward, 0));
        }
        for (i, layer) in chunk.layers.clone().enumerate() {
            let _unit = self.enter_at(&chunk.forward, chunk.layer(i));
            self.layer_forward(chunk.forward[chunk.layer(i)], layer).await;
        }
        if !chunk.has_output() {
            return;
        }
        let _unit = self.enter_at(&chunk.backward, 0);
        for (unit, number) in &chunk.mtp {
            let mtp = self.enter(*unit, &[]);
            chunk.mtp_tables.iter().for_each(|table| self.touch(*table));
            self.layer_forward(*unit, self.shape.model.layers + number).await;
            self.touch(*unit);
            drop(mtp);
            self.touch(chunk.backward[0]);
        }
    }

    /// Gives back the LM head that its weight gradient holds where that is deferred.
    async fn backward(&self, chunk: &ChunkUnits, deferred: bool) -> Guard {
        let mut held = None;
        if chunk.has_output() {
            let _unit = self.enter_at(&chunk.backward, 0);
            if self.chunked_loss && deferred {
                held = self.enter(chunk.backward[0], &[]);
            }
            for (unit, number) in chunk.mtp.iter().rev() {
                let mtp = self.enter(*unit, &[]);
                self.layer_backward(*unit, self.shape.model.layers + number).await;
                self.touch(*unit);
                drop(mtp);
            }
            self.touch(chunk.backward[0]);
        }
        for (i, layer) in chunk.layers.clone().enumerate().rev() {
            let at = chunk.layer_backward(i);
            let _unit = self.enter_at(&chunk.backward, at);
            self.layer_backward(chunk.backward[at], layer).await;
        }
        held
    }

    /// A layer of which the unit is entered.
    async fn layer_forward(&self, unit: UnitId, layer: usize) {
        let m = &self.shape.model;
        let Some(moe) = m.moe_layer(layer) else { return };
        yield_now().await;
        self.touch(unit);
        yield_now().await;
        // After the experts' outputs have arrived.
        if moe.latent.is_some() || m.post_norms {
            self.touch(unit);
        }
    }

    async fn layer_backward(&self, unit: UnitId, layer: usize) {
        if self.shape.model.moe_layer(layer).is_none() {
            return;
        }
        let recomputed = [self.shape.recompute.layer, self.shape.recompute.mlp];
        for _ in recomputed.iter().filter(|again| **again) {
            self.layer_forward(unit, layer).await;
        }
        for _ in 0..2 {
            yield_now().await;
            self.touch(unit);
        }
    }
}
