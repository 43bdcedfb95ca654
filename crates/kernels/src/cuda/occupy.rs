//! For tests on a GPU: occupies multiprocessors until it is released, as NCCL's kernels do while they wait for a peer.

use super::sources::{Source, Variant};
use super::{CudaKernels, Kernel, LaunchConfig};
use ferrotron_tensor::{Category, DType, Stream, Tensor, write};
use std::time::{Duration, Instant};

/// Words: blocks that run, released, blocks that gave up.
const TEXT: &str = r#"#include "prelude.cuh"
__device__ __forceinline__ u64 nanoseconds() {
    u64 t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}
extern "C" __global__ void occupy(const u64 at) {
    volatile u32* words = reinterpret_cast<volatile u32*>(at);
    if (threadIdx.x > 0) return;
    atomicAdd(reinterpret_cast<u32*>(at), 1u);
    const u64 begin = nanoseconds();
    while (!words[1]) {
        if (nanoseconds() - begin > 20000000000ull) {
            atomicAdd(reinterpret_cast<u32*>(at) + 2, 1u);
            return;
        }
        __nanosleep(1000);
    }
}
"#;

const SOURCE: Source =
    Source { name: "occupy", text: TEXT, may_spill: &[], only: None, variant: Variant::Base, variants: &[] };

/// More than half of a multiprocessor's shared memory: one block on each, and none of a kernel that needs as much.
const SHARED: u32 = 200 << 10;

/// Multiprocessors that are occupied.
pub(super) struct Occupied {
    stream: Stream,
    /// Copies to and from the words while the kernel runs.
    copies: Stream,
    words: Tensor,
}

impl Occupied {
    /// Occupies all multiprocessors but `free`, and returns when they are. What is to run beside it must have been
    /// launched before: the driver may wait for running kernels to load a new one.
    pub(super) fn all_but(k: &CudaKernels, s: &Stream, free: u32) -> Occupied {
        k.modules.add(&SOURCE).unwrap();
        let device = s.device();
        let (stream, copies) = (device.stream("occupy").unwrap(), device.stream("release").unwrap());
        let words = stream.zeros(&[3], DType::I32, Category::Workspace).unwrap();
        stream.synchronize().unwrap();
        let blocks = k.multiprocessors() - free;
        let kernel = Kernel { source: SOURCE.name, variant: SOURCE.variant, name: "occupy" };
        let grid = LaunchConfig { blocks: [blocks, 1, 1], threads: 32, shared: SHARED };
        stream
            .launch("occupy", &[write(&words)], |l| k.launch_kernel(l, kernel, grid, &l.address(0)?))
            .unwrap();
        let occupied = Occupied { stream, copies, words };
        let begin = Instant::now();
        while occupied.word(0) < blocks as i32 {
            assert!(begin.elapsed() < Duration::from_secs(10), "{} of {blocks} blocks run", occupied.word(0));
        }
        occupied
    }

    fn word(&self, at: usize) -> i32 {
        self.copies.download::<i32>(&self.words).unwrap()[at]
    }

    /// Releases them. False if they had given up waiting for that: what ran beside them did not end without them.
    pub(super) fn release(self) -> bool {
        let gave_up = self.word(2);
        self.copies.upload_into(&self.words.narrow(0, 1, 1).unwrap(), &[1i32]).unwrap();
        self.stream.synchronize().unwrap();
        gave_up == 0
    }
}
