//! Rates of the link between device and host memory, measured with pinned memory.

use super::ceiling::median;
use crate::Result;
use ferrotron_engine::Rank;
use ferrotron_tensor::{Category, DType, Stream, Tensor};

/// Bytes per second of large copies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkRates {
    /// To the host, alone.
    pub to_host: f64,
    /// From the host, alone.
    pub from_host: f64,
    /// Of each direction, with both at once.
    pub both: f64,
}

/// Measures the link with copies of `bytes`, a few times each.
pub fn link_rates(rank: &Rank, bytes: usize) -> Result<LinkRates> {
    let s = &rank.compute;
    let on_device = |s: &Stream| Tensor::empty(s, &[bytes], DType::U8, Category::Workspace);
    // Streams of their own, so that both directions can run at once.
    let (out, back) = (rank.device().stream("copy to host")?, rank.device().stream("copy from host")?);
    let (from, to) = (on_device(s)?, on_device(s)?);
    let (there, here) = (Tensor::host(s, &[bytes], DType::U8)?, Tensor::host(s, &[bytes], DType::U8)?);
    s.zero(&from)?;
    s.copy(&from, &there)?;
    s.copy(&from, &here)?;
    s.copy(&here, &to)?;
    s.synchronize()?;
    let time = |sends: bool, receives: bool| -> Result<f64> {
        let mut times = Vec::new();
        for _ in 0..5 {
            let start = s.record()?;
            out.wait(&start)?;
            back.wait(&start)?;
            sends.then(|| out.copy(&from, &there)).transpose()?;
            receives.then(|| back.copy(&here, &to)).transpose()?;
            s.wait(&out.record()?)?;
            s.wait(&back.record()?)?;
            times.push(s.record()?.since(&start)?.as_secs_f64());
        }
        Ok(bytes as f64 / median(times))
    };
    Ok(LinkRates { to_host: time(true, false)?, from_host: time(false, true)?, both: time(true, true)? })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn every_direction_has_a_rate() {
        let r = link_rates(&Rank::cpu(1, 1).unwrap(), 1 << 20).unwrap();
        assert!([r.to_host, r.from_host, r.both].iter().all(|x| x.is_finite() && *x > 0.0), "{r:?}");
    }
}
