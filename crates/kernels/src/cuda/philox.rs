//! Philox random streams, as device code takes them.

use super::args::kernel_args;
use crate::StepKey;
use crate::philox::RandomStream;
use ferrotron_tensor::{Launch, Result};

kernel_args! {
    header "args/philox.cuh", includes [];

    /// A stream of the counter-based generator Philox4x32-10: its key, and the upper half of its counter.
    #[derive(Default)]
    pub(in crate::cuda) struct PhiloxStream {
        key: [u32; 2],
        lane: [u32; 2],
    }

    /// What the stream of a step's random draws is derived from, as `RandomStream::of_step` does.
    #[derive(Default)]
    pub(in crate::cuda) struct StepStream {
        seed: [u32; 2],
        layer: u32,
        site: u32,
        step: u64,
        /// i32 that is added to the step, or 0.
        device_step: u64,
        domain: u32,
        pad: u32,
    }
}

impl StepStream {
    /// The stream of `key` in a domain; its step on the device, if there is one, is argument `step` of the launch.
    pub(in crate::cuda) fn new(l: &Launch, key: StepKey, step: usize, domain: u32) -> Result<StepStream> {
        let StepKey { key, step: device } = key;
        let device_step = device.map_or(Ok(0), |_| l.address(step))?;
        let seed = [key.seed as u32, (key.seed >> 32) as u32];
        Ok(StepStream { seed, layer: key.layer, site: key.site, step: key.step, device_step, domain, pad: 0 })
    }
}

impl From<RandomStream> for PhiloxStream {
    fn from(RandomStream { key, lane }: RandomStream) -> PhiloxStream {
        PhiloxStream { key, lane }
    }
}
