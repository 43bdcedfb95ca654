use super::{CpuKernels, floats};
use crate::MlaKernels;
use crate::cpu::mla as l;
use crate::mla::check_keys;
use ferrotron_tensor::{Result, Stream, Tensor, read, write};

impl MlaKernels for CpuKernels {
    fn mla_concat_keys(&self, s: &Stream, own: &Tensor, shared: &Tensor, k: &Tensor) -> Result<()> {
        const OP: &str = "mla_concat_keys";
        let [own_rows, shared_rows, k_rows] = check_keys(OP, own, shared, k)?;
        s.launch(OP, &[read(own), read(shared), write(k)], |a| {
            floats!(OP, k.dtype(), T => l::mla_concat_keys::<T>(
                a.threads(), (a.slice(0)?, own_rows), (a.slice(1)?, shared_rows), (a.slice_mut(2)?, k_rows),
            ))
        })
    }

    fn mla_split_keys(&self, s: &Stream, k: &Tensor, own: &Tensor, shared: &Tensor) -> Result<()> {
        const OP: &str = "mla_split_keys";
        let [own_rows, shared_rows, k_rows] = check_keys(OP, own, shared, k)?;
        s.launch(OP, &[read(k), write(own), write(shared)], |a| {
            floats!(OP, k.dtype(), T => l::mla_split_keys::<T>(
                a.threads(), (a.slice(0)?, k_rows), (a.slice_mut(1)?, own_rows), (a.slice_mut(2)?, shared_rows),
            ))
        })
    }
}
