//! The text that a finished run samples.

use ferrotron_core::model::generate::{Prompt, Sampling, generate};
use ferrotron_core::train::Run;
use ferrotron_engine::StepContext;

/// Samples text from the trained model if the recipe asks for it and tokens are bytes. The tensor-parallel group of
/// rank 0 does it together, or all ranks where a forward pass takes all of them.
pub(super) fn sample(run: &Run) -> ferrotron_core::Result<Option<String>> {
    let (g, rank) = (&run.resolved.config.generate, &run.trainer.rank);
    // Generation needs all layers and all tokens on a rank: with pipeline or context parallelism it is left to
    // `generate`.
    let takes_part = rank.tp.ranks().contains(&0) || run.trainer.forward_is_collective();
    let able = rank.pp.size() == 1 && rank.cp.size() == 1 && takes_part;
    if g.tokens == 0 || run.resolved.model.vocab != 256 || !able {
        return Ok(None);
    }
    let prompt = g.prompt.clone().filter(|p| !p.is_empty()).unwrap_or_else(|| "\n".into());
    let ids: Vec<i32> = prompt.bytes().map(i32::from).collect();
    let sampling = Sampling {
        temperature: g.temperature as f32,
        top_k: g.top_k as usize,
        top_p: g.top_p as f32,
        seed: run.resolved.config.train.seed,
    };
    let t = &run.trainer;
    let pass = StepContext::new(&t.rank, &t.model.params, &t.model.step_state);
    let out = generate(
        &t.model.decoder,
        &pass,
        Prompt { tokens: &ids, max_new: g.tokens as usize, stop: &[] },
        sampling,
        &mut |_| true,
    )?;
    let bytes: Vec<u8> = out.iter().map(|id| *id as u8).collect();
    Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
}
