//! Autotuned GEMM algorithms: timed once for each shape, stored on disk, and looked up from then on.
//!
//! Algorithms round differently, so the choice must be the same in every run on a machine: it is made before the first
//! result is used, and a stored choice stands. Where nothing can be stored nothing is tuned, and the heuristics'
//! favourite is used.

use super::autotune::autotune;
use super::cache;
use super::cublaslt::{Algorithm, CublasLt, GemmKey, GemmPointers, MatmulDesc};
use crate::GemmSizes;
use ferrotron_tensor::{Arg, Category, DType, Error, Event, GpuInfo, Result, Stream, Tensor, read, write};
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// Smaller GEMMs take no longer than their launch: tuning gains nothing.
const MIN_TUNED_FLOPS: f64 = 4e9;
/// Batch sizes for which a layer's GEMMs are tuned. Generation, with ever new sizes, would wait for each.
const MAX_TUNED_BATCHES: usize = 6;
/// Part of every key on disk: changes with the tuning method and with the format of keys.
const CACHE_VERSION: u32 = 2;

/// cuBLASLt, and the algorithm of each GEMM.
pub(super) struct GemmCache {
    library: CublasLt,
    /// GPU, driver and library: what tuned choices depend on besides the GEMM.
    card: String,
    folder: Option<PathBuf>,
    known: RwLock<HashMap<GemmKey, Option<Arc<GemmPlan>>>>,
    /// Batch sizes seen of each layer's GEMM.
    batches: Mutex<HashMap<GemmKey, HashSet<usize>>>,
}

struct GemmPlan {
    desc: MatmulDesc,
    algorithm: Algorithm,
}

/// An alternative to a cuBLASLt epilogue, timed against it (separate kernels): writes the tensor it is given.
pub(super) type Candidate<'a> = &'a dyn Fn(&Tensor) -> Result<()>;

/// Operands of a GEMM.
pub(super) struct Operands<'a> {
    pub(super) a: &'a Tensor,
    pub(super) b: &'a Tensor,
    pub(super) c: &'a Tensor,
    pub(super) bias: Option<Arg<'a>>,
    /// What the epilogue reads or writes besides the result.
    pub(super) aux: Option<Arg<'a>>,
    /// FP8: inverse scales of `a` and `b`.
    pub(super) scales: Option<[&'a Tensor; 2]>,
    pub(super) accumulate: bool,
}

/// A tuned choice, as stored.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Choice {
    /// The alternative.
    Candidate,
    /// The library's algorithm with that code.
    Algorithm([u64; 8]),
}

impl Choice {
    fn encode(self) -> Vec<u8> {
        match self {
            Choice::Candidate => vec![0],
            Choice::Algorithm(code) => {
                std::iter::once(1).chain(code.iter().flat_map(|word| word.to_le_bytes())).collect()
            }
        }
    }

    fn decode(bytes: &[u8]) -> Option<Choice> {
        match bytes {
            [0] => Some(Choice::Candidate),
            [1, code @ ..] if code.len() == 64 => {
                let mut words = [0; 8];
                for (word, bytes) in words.iter_mut().zip(code.as_chunks::<8>().0) {
                    *word = u64::from_le_bytes(*bytes);
                }
                Some(Choice::Algorithm(words))
            }
            _ => None,
        }
    }
}

impl GemmCache {
    pub(super) fn open(card: &GpuInfo) -> Result<GemmCache> {
        let library = CublasLt::open()?;
        let (major, minor) = card.capability;
        let card = format!(
            "{}, sm_{major}{minor}, {} multiprocessors, driver {}, cuBLASLt {}, method {CACHE_VERSION}",
            card.name,
            card.multiprocessors,
            card.driver,
            library.version(),
        );
        let (known, batches) = Default::default();
        Ok(GemmCache { library, card, folder: cache::folder(), known, batches })
    }

    #[cfg(test)]
    pub(super) fn library(&self) -> &CublasLt {
        &self.library
    }

    /// Launches a GEMM. False where the library cannot compute it, or the `candidate` is faster: then nothing was
    /// written that the candidate does not overwrite.
    pub(super) fn gemm(
        &self,
        s: &Stream,
        op: &'static str,
        key: GemmKey,
        o: &Operands,
        candidate: Option<Candidate>,
    ) -> Result<bool> {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
        let plan = match known {
            Some(plan) => plan,
            None => {
                // Without a lock: another rank may have to proceed before this one's operands are ready.
                let plan = self.find(s, &key, o, candidate)?.map(Arc::new);
                let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
                known.entry(key).or_insert(plan).clone()
            }
        };
        match plan {
            Some(plan) => self.run(s, op, (&plan.desc, &plan.algorithm), o, o.c).map(|()| true),
            None => Ok(false),
        }
    }

    fn find(
        &self,
        s: &Stream,
        key: &GemmKey,
        o: &Operands,
        candidate: Option<Candidate>,
    ) -> Result<Option<GemmPlan>> {
        let desc = MatmulDesc::new(key)?;
        let folder = self.folder.as_deref().filter(|_| self.worth_tuning(key));
        let on_disk = format!("{}; {key:?}", self.card);
        let GemmSizes { m, n, k, .. } = key.sizes;
        let name = format!("gemm-{m}x{n}x{k}");
        // A stored choice as an algorithm (None: the candidate), if it applies here.
        let meant = |bytes: Vec<u8>| match Choice::decode(&bytes)? {
            Choice::Candidate => candidate.is_some().then_some(None),
            Choice::Algorithm(code) => self.library.algorithm(&desc, code).map(Some),
        };
        let kept = folder.and_then(|f| cache::load_choice(f, &name, on_disk.as_bytes())).and_then(meant);
        let algorithm = match kept {
            Some(kept) => kept,
            None => {
                let all = self.library.algorithms(key, &desc)?;
                let settled = match folder.filter(|_| !all.is_empty()) {
                    None => None,
                    Some(folder) => match self.autotune(s, &desc, &all, o, candidate) {
                        Ok(choice) => {
                            cache::store_choice(folder, &name, on_disk.as_bytes(), &choice.encode())
                        }
                        // No memory to tune in.
                        Err(Error::OutOfMemory { .. }) => None,
                        Err(e) => return Err(e),
                    },
                };
                // Untuned: the heuristics' favourite, or the candidate where there is one.
                settled.and_then(meant).unwrap_or(all.first().copied().filter(|_| candidate.is_none()))
            }
        };
        Ok(algorithm.map(|algorithm| GemmPlan { desc, algorithm }))
    }

    /// Whether the GEMM is large enough, and its batch size one of the first few.
    fn worth_tuning(&self, key: &GemmKey) -> bool {
        let GemmSizes { m, n, k, .. } = key.sizes;
        if 2.0 * m as f64 * n as f64 * k as f64 <= MIN_TUNED_FLOPS {
            return false;
        }
        // The batch is k of a wgrad, m of the others. FP8 operands are never transposed; there wgrad is the GEMM with
        // an f32 result.
        let mut map = GemmKey { align: [0; 4], ..*key };
        let summed = key.trans[0] || (key.fp8.is_some() && key.types[1] == DType::F32);
        let batch = std::mem::take(if summed { &mut map.sizes.k } else { &mut map.sizes.m });
        let mut batches = self.batches.lock().unwrap_or_else(PoisonError::into_inner);
        let seen = batches.entry(map).or_default();
        seen.contains(&batch) || (seen.len() < MAX_TUNED_BATCHES && seen.insert(batch))
    }

    /// Times the algorithms on the operands. Each overwrites the result; where it is to be accumulated to, a scratch
    /// tensor.
    fn autotune(
        &self,
        s: &Stream,
        desc: &MatmulDesc,
        all: &[Algorithm],
        o: &Operands,
        candidate: Option<Candidate>,
    ) -> Result<Choice> {
        let elsewhere = match (o.accumulate, o.c.shape(), o.c.strides()) {
            (true, [m, n], [step, _]) => {
                let whole = Tensor::empty(s, &[*m, (*step).max(*n)], o.c.dtype(), Category::Workspace)?;
                Some(whole.narrow(1, 0, *n)?)
            }
            _ => None,
        };
        let c = elsewhere.as_ref().unwrap_or(o.c);
        let algorithms: Vec<Option<&Algorithm>> =
            candidate.iter().map(|_| None).chain(all.iter().map(Some)).collect();
        let mut time = |order: &[usize]| {
            let mut marks = vec![s.record()?];
            let mut failed = vec![false; order.len()];
            for (algorithm, failed) in order.iter().zip(&mut failed) {
                let done = match (algorithms[*algorithm], candidate) {
                    (Some(algorithm), _) => self.run(s, "gemm (choosing)", (desc, algorithm), o, c),
                    (None, Some(candidate)) => candidate(c),
                    (None, None) => Ok(()),
                };
                *failed = match done {
                    Err(Error::Cuda { .. }) => true,
                    done => done.map(|()| false)?,
                };
                marks.push(s.record()?);
            }
            let spans = marks.windows(2).zip(failed);
            let took = |(pair, failed): (&[Event], bool)| match pair {
                [start, end] if !failed => Ok(end.since(start)?.as_secs_f64()),
                _ => Ok(f64::INFINITY),
            };
            spans.map(took).collect()
        };
        let best = autotune(algorithms.len(), &mut time)?;
        Ok(algorithms[best].map_or(Choice::Candidate, |a| Choice::Algorithm(a.code.data)))
    }

    fn run(
        &self,
        s: &Stream,
        op: &'static str,
        (desc, algorithm): (&MatmulDesc, &Algorithm),
        o: &Operands,
        c: &Tensor,
    ) -> Result<()> {
        let scratch = match algorithm.workspace {
            0 => None,
            bytes => Some(Tensor::empty(s, &[bytes], DType::U8, Category::Workspace)?),
        };
        let mut args =
            [read(o.a), read(o.b), write(c), read(o.a), read(o.a), read(o.a), read(o.a), read(o.a)];
        let mut count = 3;
        let [scale_a, scale_b] = o.scales.map_or([None; 2], |both| both.map(|t| Some(read(t))));
        let places = [o.bias, o.aux, scratch.as_ref().map(write), scale_a, scale_b].map(|arg| {
            let arg = arg?;
            args[count] = arg;
            count += 1;
            Some(count - 1)
        });
        s.launch(op, &args[..count], |l| {
            let [bias, aux, workspace, scale_a, scale_b] = places.map(|i| i.map_or(Ok(0), |i| l.address(i)));
            let (bias, aux, workspace, scales) = (bias?, aux?, workspace?, [scale_a?, scale_b?]);
            let (a, b, c) = (l.address(0)?, l.address(1)?, l.address(2)?);
            self.library.run(
                l,
                desc,
                algorithm,
                &GemmPointers { a, b, c, bias, aux, scales, workspace },
                o.accumulate,
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_round_trip_and_invalid_bytes_are_rejected() {
        let codes = [
            Choice::Candidate,
            Choice::Algorithm([0; 8]),
            Choice::Algorithm([1, 2, 3, 4, 5, 6, 7, u64::MAX]),
        ];
        for choice in codes {
            let bytes = choice.encode();
            assert_eq!(Choice::decode(&bytes), Some(choice));
            assert_eq!(Choice::decode(&bytes[..bytes.len() - 1]), None);
            assert_eq!(Choice::decode(&[&bytes[..], &[0]].concat()), None);
        }
        assert_eq!(Choice::decode(&[2]), None);
    }
}
