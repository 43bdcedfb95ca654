//! The position of a Philox random stream, as device code takes it.

use super::args::kernel_args;
use crate::philox::RandomStream;

kernel_args! {
    header "args/philox.cuh", includes [];

    /// A stream of the counter-based generator Philox4x32-10: its key, and the upper half of its counter.
    #[derive(Default)]
    pub(in crate::cuda) struct PhiloxStream {
        key: [u32; 2],
        lane: [u32; 2],
    }
}

impl From<RandomStream> for PhiloxStream {
    fn from(RandomStream { key, lane }: RandomStream) -> PhiloxStream {
        PhiloxStream { key, lane }
    }
}
