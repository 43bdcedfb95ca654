//! Functions of loaded modules, and the dynamic shared memory that each may use.

use ferrotron_tensor::Result;
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{PoisonError, RwLock};

/// Dynamic shared memory that needs no opt-in: of 48 KiB, what is left beside static shared memory.
const DEFAULT_SHARED: u32 = 32 << 10;

/// Functions that were looked up, with the dynamic shared memory allowed so far. The driver has one limit for each
/// function, whoever sets it: it is only ever raised, by one thread at a time.
pub(super) struct Functions<K, F> {
    known: RwLock<HashMap<K, (F, u32)>>,
}

impl<K, F> Default for Functions<K, F> {
    fn default() -> Functions<K, F> {
        Functions { known: RwLock::default() }
    }
}

impl<K: Eq + Hash, F: Copy> Functions<K, F> {
    /// The function, which may use `shared` bytes afterwards: `find` looks it up the first time, `allow` raises its limit
    /// where that is needed.
    pub(super) fn get(
        &self,
        key: K,
        shared: u32,
        find: impl FnOnce() -> Result<F>,
        allow: impl FnOnce(F, u32) -> Result<()>,
    ) -> Result<F> {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner).get(&key).copied();
        let function = match known {
            Some((function, allowed)) if allowed >= shared => return Ok(function),
            Some((function, _)) => function,
            // May compile a module: without the lock, which other launches need.
            None => find()?,
        };
        let mut all = self.known.write().unwrap_or_else(PoisonError::into_inner);
        let (function, allowed) = all.entry(key).or_insert((function, DEFAULT_SHARED));
        if shared > *allowed {
            allow(*function, shared)?;
            *allowed = shared;
        }
        Ok(*function)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::sources::{Source, Variant};
    use crate::cuda::test_support::gpu;
    use crate::cuda::{Kernel, LaunchConfig};
    use ferrotron_tensor::{Category, DType, write};
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
    use std::time::Duration;

    /// Threads that launch one kernel for the first time: those that need little are slow to set the limit.
    #[test]
    fn the_limit_of_a_function_is_never_lowered() {
        let (functions, limit) = (Functions::default(), AtomicU32::new(0));
        let sizes = [40, 200, 64, 120, 16].map(|kib: u32| kib << 10);
        let start = Barrier::new(sizes.len());
        let wait =
            |bytes: u32| std::thread::sleep(Duration::from_millis(u64::from((220 << 10) - bytes) >> 13));
        std::thread::scope(|s| {
            for size in sizes {
                let (functions, limit, start) = (&functions, &limit, &start);
                s.spawn(move || {
                    start.wait();
                    let allow = |_, bytes| {
                        wait(bytes);
                        limit.store(bytes, SeqCst);
                        Ok(())
                    };
                    functions.get("kernel", size, || Ok(7), allow).unwrap();
                    wait(0);
                    assert!(size <= DEFAULT_SHARED || limit.load(SeqCst) >= size, "{size}");
                });
            }
        });
        assert_eq!(limit.load(SeqCst), 200 << 10);
    }

    #[test]
    fn a_limit_that_the_driver_refuses_is_not_recorded() {
        let functions = Functions::default();
        let refused = || ferrotron_tensor::Error::Cuda { op: "kernel", what: "too much".into() };
        assert!(functions.get("kernel", 1 << 20, || Ok(7), |_, _| Err(refused())).is_err());
        assert!(functions.get("kernel", 1 << 20, || Ok(7), |_, _| Err(refused())).is_err());
        assert_eq!(functions.get("kernel", 0, || Ok(7), |_, _| Err(refused())).unwrap(), 7);
    }

    const TOUCH: &str = "
        struct Touch { unsigned long long to, words; };
        extern \"C\" __global__ void touch(const Touch a) {
            extern __shared__ float dynamic_words[];
            dynamic_words[a.words - 1] = float(a.words);
            *reinterpret_cast<float*>(a.to) = dynamic_words[a.words - 1];
        }";

    /// On a GPU: first launches of one kernel from many threads, each with another size.
    #[test]
    fn threads_may_launch_a_kernel_first_with_different_shared_memory() {
        let Some((k, s)) = gpu() else { return };
        const NAMES: [&str; 8] = ["t0", "t1", "t2", "t3", "t4", "t5", "t6", "t7"];
        for name in NAMES {
            let (text, variant, variants) = (TOUCH, Variant::Base, &[] as &[Variant]);
            k.modules.add(&Source { name, text, may_spill: &[], only: None, variant, variants }).unwrap();
            let start = Barrier::new(8);
            std::thread::scope(|scope| {
                for i in 0..8u32 {
                    let (k, start, device) = (&k, &start, s.device());
                    scope.spawn(move || {
                        let s = device.stream("compute").unwrap();
                        let to = s.zeros(&[1], DType::F32, Category::Workspace).unwrap();
                        let shared = (36 + 8 * (i * 5 % 8)) << 10;
                        start.wait();
                        s.launch("touch", &[write(&to)], |l| {
                            let args = [l.address(0)?, u64::from(shared / 4)];
                            let grid = LaunchConfig { blocks: [1; 3], threads: 1, shared };
                            k.launch_kernel(l, Kernel::new(name, "touch"), grid, &args)
                        })
                        .unwrap();
                        assert_eq!(s.download::<f32>(&to).unwrap(), [(shared / 4) as f32]);
                    });
                }
            });
        }
    }
}
