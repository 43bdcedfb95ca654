//! Text generation: sampling tokens from a model.

use super::Decoder;
use crate::{Error, Result};
use ferrotron_engine::StepContext;
use ferrotron_engine::attention::Layout;
use ferrotron_kernels::philox::RandomStream;
use ferrotron_tensor::{DType, Tensor, bf16, f16};

/// How the next token is sampled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 always takes the most probable token.
    pub temperature: f32,
    /// Sample from this many of the most probable tokens; 0 for all.
    pub top_k: usize,
    /// Sample from the most probable tokens that together have this probability; 1 for all.
    pub top_p: f32,
    /// Equal seeds sample equal text.
    pub seed: u64,
}

impl Sampling {
    /// Rejects values out of range.
    pub fn check(&self) -> Result<()> {
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return Err(Error::Invalid(format!("temperature {} must be 0 or more", self.temperature)));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err(Error::Invalid(format!("top_p {} must be above 0 and at most 1", self.top_p)));
        }
        Ok(())
    }

    /// Samples a token from `logits`, as draw number `n` of the seed.
    pub fn sample(&self, logits: &[f32], n: u64) -> usize {
        let best = (0..logits.len()).fold(0, |b, i| if logits[i] > logits[b] { i } else { b });
        if self.temperature == 0.0 || logits.is_empty() {
            return best;
        }
        let mut order: Vec<usize> = (0..logits.len()).collect();
        // Most probable first, ties to the lower id: the same sample on every machine.
        order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
        if self.top_k > 0 {
            order.truncate(self.top_k);
        }
        let top = f64::from(logits[order[0]]);
        let weights: Vec<f64> = order
            .iter()
            .map(|i| ((f64::from(logits[*i]) - top) / f64::from(self.temperature)).exp())
            .collect();
        let total: f64 = weights.iter().sum();
        let mut cumulative = 0.0;
        let mut count = weights.len();
        for (i, w) in weights.iter().enumerate() {
            cumulative += w;
            if cumulative >= total * f64::from(self.top_p) {
                count = i + 1;
                break;
            }
        }
        let mut left = f64::from(RandomStream::named(self.seed, "sampling").uniform(n)) * cumulative;
        for (i, w) in order.iter().zip(&weights).take(count) {
            left -= w;
            if left < 0.0 {
                return *i;
            }
        }
        order[count - 1]
    }
}

/// A prompt and when to stop.
#[derive(Clone, Copy, Debug)]
pub struct Prompt<'a> {
    /// At least one token.
    pub tokens: &'a [i32],
    /// New tokens at most.
    pub max_new: usize,
    /// Tokens that end the text.
    pub stop: &'a [i32],
}

/// Continues a prompt and returns the new tokens. Ends after `max_new` tokens, at a stop token, when `on_token`
/// returns false, or at the model's last position. Ranks that share the model call it together and sample the same
/// tokens; it ends for all of them when `on_token` returns false on one.
pub fn generate(
    decoder: &Decoder,
    pass: &StepContext,
    prompt: Prompt,
    sampling: Sampling,
    on_token: &mut dyn FnMut(i32) -> bool,
) -> Result<Vec<i32>> {
    sampling.check()?;
    // This is no part of a training step, and quantized weights stay valid.
    let pass = &StepContext { train: false, ..*pass };
    pass.state.begin_evaluation();
    let output = continue_prompt(decoder, pass, prompt, sampling, on_token);
    pass.state.end_evaluation();
    output
}

fn continue_prompt(
    decoder: &Decoder,
    pass: &StepContext,
    Prompt { tokens: prompt, max_new, stop }: Prompt,
    sampling: Sampling,
    on_token: &mut dyn FnMut(i32) -> bool,
) -> Result<Vec<i32>> {
    let max_positions = decoder.max_positions();
    if prompt.is_empty() || prompt.len() >= max_positions {
        return Err(Error::Invalid(format!(
            "a prompt of {} tokens cannot be continued by a model of {max_positions} positions; give between 1 and {}",
            prompt.len(),
            max_positions.saturating_sub(1)
        )));
    }
    let max_new = max_new.min(max_positions - prompt.len());
    let mut caches = decoder.caches(pass, 1, prompt.len() + max_new)?;
    let mut out = Vec::with_capacity(max_new);
    let mut next: Vec<i32> = prompt.to_vec();
    for n in 0..max_new {
        let at = prompt.len() + n - next.len();
        let positions: Vec<i32> = (at..at + next.len()).map(|p| p as i32).collect();
        let rows = Layout::Rows { count: 1, len: next.len() };
        let input = decoder.input(pass.rank, &next, Some(&positions), rows)?;
        let logits = gather_logits(pass, to_host(pass, &decoder.decode(pass, &input, &mut caches)?)?)?;
        let token = sampling.sample(&logits, n as u64) as i32;
        out.push(token);
        if stop.contains(&token) || !all_continue(pass, on_token(token))? {
            break;
        }
        next = vec![token];
    }
    Ok(out)
}

/// One row of logits from the vocabulary shards of all tensor-parallel ranks.
fn gather_logits(pass: &StepContext, mine: Vec<f32>) -> Result<Vec<f32>> {
    if pass.rank.tp.size() == 1 {
        return Ok(mine);
    }
    let all = pass.rank.tp.all_gather_bytes(bytemuck::cast_slice(&mine), "logits")?;
    Ok(all.iter().flat_map(|b| b.chunks_exact(4)).map(bytemuck::pod_read_unaligned).collect())
}

/// Whether every rank continues.
fn all_continue(pass: &StepContext, mine: bool) -> Result<bool> {
    if pass.rank.tp.size() == 1 {
        return Ok(mine);
    }
    let all = pass.rank.tp.all_gather_bytes(&[mine.into()], "whether to go on")?;
    Ok(all.iter().all(|b| b == &[1]))
}

/// Values of a float tensor on the host, as f32.
pub fn to_host(pass: &StepContext, t: &Tensor) -> Result<Vec<f32>> {
    Ok(match t.dtype() {
        DType::F16 => pass.rank.compute.download::<f16>(t)?.into_iter().map(f32::from).collect(),
        DType::BF16 => pass.rank.compute.download::<bf16>(t)?.into_iter().map(f32::from).collect(),
        _ => pass.rank.compute.download::<f32>(t)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Sampling = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 7 };

    fn frequencies(s: Sampling, logits: &[f32]) -> Vec<f64> {
        let mut counts = vec![0.0; logits.len()];
        (0..20_000).for_each(|n| counts[s.sample(logits, n)] += 1.0 / 20_000.0);
        counts
    }

    #[test]
    fn draws_follow_the_softmax() {
        let logits = [0.0f32, 1.0, 2.0, -1.0];
        let z: f64 = logits.iter().map(|x| f64::from(*x).exp()).sum();
        for (f, x) in frequencies(PLAIN, &logits).iter().zip(logits) {
            assert!((f - f64::from(x).exp() / z).abs() < 0.015, "{f} for {x}");
        }
        let hot = frequencies(Sampling { temperature: 2.0, ..PLAIN }, &logits);
        let z: f64 = logits.iter().map(|x| f64::from(*x / 2.0).exp()).sum();
        assert!((hot[2] - (1f64).exp() / z).abs() < 0.015);
    }

    #[test]
    fn cold_top_k_and_top_p_cut_the_tail() {
        let logits = [1.0f32, 3.0, 2.0, 3.0];
        assert_eq!(Sampling { temperature: 0.0, ..PLAIN }.sample(&logits, 5), 1, "ties to the lower id");
        let k = frequencies(Sampling { top_k: 2, ..PLAIN }, &logits);
        assert!(k[0] == 0.0 && k[2] == 0.0 && (k[1] - 0.5).abs() < 0.02);
        let p = frequencies(Sampling { top_p: 0.5, ..PLAIN }, &[5.0, 0.0, 0.0]);
        assert!(p[0] > 0.999 && p[1] == 0.0 && p[2] == 0.0);
        assert!(Sampling { top_p: 0.0, ..PLAIN }.check().is_err());
        assert!(Sampling { temperature: f32::NAN, ..PLAIN }.check().is_err());
    }
}
