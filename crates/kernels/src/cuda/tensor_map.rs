//! TMA tensor maps: descriptions of tensors from which Hopper's TMA copies boxes to shared memory.

use super::args::kernel_args;
use cudarc::driver::sys::{self, CUresult};
use ferrotron_tensor::{Error, Result};
use std::ffi::c_void;

kernel_args! {
    header "args/tensor_map.cuh", includes [];

    /// A TMA tensor map (CUtensorMap) as the driver encodes it: opaque.
    #[derive(Default)]
    pub(super) struct TensorMap align(64) {
        words: [u64; 16],
    }
}

// Kernels read the map where the driver encoded it.
const _: () = assert!(size_of::<TensorMap>() == size_of::<sys::CUtensorMap>());

/// Bytes of a row of a box: the width of the swizzle.
const WIDTH: u32 = 128;

/// Map of a bf16 view with `sizes` `[channels, tokens, heads, batch]`, contiguous channels, the other axes' strides in
/// elements, and rows on 16-byte boundaries. A box has 64 channels of `rows` tokens of one head; elements outside the
/// tensor are read as 0.
pub(super) fn tensor_map(address: u64, sizes: [usize; 4], steps: [usize; 3], rows: u32) -> Result<TensorMap> {
    encode(sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, address, sizes, steps, rows)
}

/// Map of an FP8 view; a box has 128 bytes of `rows` rows.
pub(super) fn fp8_tensor_map(
    address: u64,
    sizes: [usize; 4],
    steps: [usize; 3],
    rows: u32,
) -> Result<TensorMap> {
    encode(sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, address, sizes, steps, rows)
}

fn encode(
    kind: sys::CUtensorMapDataType,
    bytes: u32,
    address: u64,
    sizes: [usize; 4],
    steps: [usize; 3],
    rows: u32,
) -> Result<TensorMap> {
    const OP: &str = "tensor map";
    let dims = sizes.map(|n| n as u64);
    // The stride of an axis of size 1 is not used, but must be valid.
    let mut strides = [16u64; 3];
    for (i, stride) in strides.iter_mut().enumerate() {
        if sizes[i + 1] > 1 {
            *stride = steps[i] as u64 * u64::from(bytes);
        }
    }
    let (boxes, each) = ([WIDTH / bytes, rows, 1, 1], [1u32; 4]);
    let mut map = TensorMap::default();
    // SAFETY: arrays of as many elements as the rank, and an aligned output; the driver checks the values and only
    // writes the map. Kernels that use the address hold the tensor in their launch.
    let status = unsafe {
        sys::cuTensorMapEncodeTiled(
            std::ptr::from_mut(&mut map).cast(),
            kind,
            4,
            address as *mut c_void,
            dims.as_ptr(),
            strides.as_ptr(),
            boxes.as_ptr(),
            each.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    match status {
        CUresult::CUDA_SUCCESS => Ok(map),
        status => Err(Error::Cuda {
            op: OP,
            what: format!("{status:?} for {sizes:?}, steps {steps:?}, {rows} rows"),
        }),
    }
}
