//! Autotuned GEMM algorithms: timed once for each shape, stored on disk, and looked up from then on.
//!
//! Algorithms round differently, so the choice must be the same in every run on a machine: it is made before the first
//! result is used, and a stored choice stands. Where nothing can be stored nothing is tuned, and the heuristics'
//! favourite is used. The choices of a job's table come first; what is chosen besides is noted for that table.

use super::autotune::autotune;
use super::cache;
use super::cublaslt::{Algorithm, CublasLt, GemmKey, GemmPointers, MatmulDesc};
use crate::{GemmChoice, GemmLibrary, GemmSizes, NewChoices};
use ferrotron_tensor::{Arg, Category, DType, Error, Event, GpuInfo, Result, Stream, Tensor, read, write};
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError, RwLock};

/// Smaller GEMMs take no longer than their launch: tuning gains nothing.
const MIN_TUNED_FLOPS: f64 = 4e9;
/// Batch sizes for which a layer's GEMMs are tuned. Generation, with ever new sizes, would wait for each.
const MAX_TUNED_BATCHES: usize = 6;
/// Part of every key on disk: changes with the tuning method and with the format of keys.
const CACHE_VERSION: u32 = 2;

/// cuBLASLt, and the algorithm of each GEMM.
pub(super) struct GemmCache {
    library: CublasLt,
    /// What tuned choices depend on besides the GEMM.
    description: GemmLibrary,
    folder: Option<PathBuf>,
    known: RwLock<HashMap<GemmKey, Option<Arc<GemmPlan>>>>,
    /// Whether it was reported that the library refused a microscaling format.
    refused: Once,
    /// Batch sizes seen of each layer's GEMM.
    batches: Mutex<HashMap<GemmKey, HashSet<usize>>>,
    job: Mutex<JobChoices>,
}

/// The choices of a job.
struct JobChoices {
    /// By the GEMM's name. What is no choice of this version is as if untuned.
    table: HashMap<String, Choice>,
    new: NewChoices,
    /// Made and not taken yet.
    made: Vec<GemmChoice>,
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
    /// FP4: f32 `[2]`, alpha and beta.
    pub(super) factors: Option<&'a Tensor>,
    pub(super) accumulate: bool,
}

/// A choice, as stored.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Choice {
    /// The alternative.
    Candidate,
    /// The library's algorithm with that code.
    Algorithm([u64; 8]),
    /// Not tuned: the alternative if there is one, else the heuristics' favourite. Never on disk.
    Untuned,
}

impl Choice {
    fn encode(self) -> Vec<u8> {
        match self {
            Choice::Candidate => vec![0],
            Choice::Untuned => vec![2],
            Choice::Algorithm(code) => {
                std::iter::once(1).chain(code.iter().flat_map(|word| word.to_le_bytes())).collect()
            }
        }
    }

    fn decode(bytes: &[u8]) -> Option<Choice> {
        match bytes {
            [0] => Some(Choice::Candidate),
            [2] => Some(Choice::Untuned),
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

    /// In hexadecimal.
    fn to_word(self) -> String {
        self.encode().iter().map(|b| format!("{b:02x}")).collect()
    }

    fn from_word(word: &str) -> Option<Choice> {
        let digits: Vec<u8> = word.chars().map(|c| c.to_digit(16).map(|d| d as u8)).collect::<Option<_>>()?;
        let (pairs, rest) = digits.as_chunks::<2>();
        let bytes: Vec<u8> = pairs.iter().map(|[high, low]| high << 4 | low).collect();
        if rest.is_empty() { Choice::decode(&bytes) } else { None }
    }
}

impl GemmCache {
    pub(super) fn open(card: &GpuInfo) -> Result<GemmCache> {
        let library = CublasLt::open()?;
        // The library does not know what a card stands for.
        let (major, minor) = card.native;
        let description = GemmLibrary {
            card: format!("{}, sm_{major}{minor}, {} multiprocessors", card.name, card.multiprocessors),
            driver: card.driver,
            cublaslt: library.version(),
            method: CACHE_VERSION,
        };
        let job = JobChoices { table: HashMap::new(), new: NewChoices::Used, made: Vec::new() };
        let (known, batches) = Default::default();
        let (folder, job) = (cache::folder(), Mutex::new(job));
        Ok(GemmCache { library, description, folder, known, refused: Once::new(), batches, job })
    }

    pub(super) fn description(&self) -> &GemmLibrary {
        &self.description
    }

    fn job(&self) -> MutexGuard<'_, JobChoices> {
        self.job.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn use_choices(&self, choices: &[GemmChoice], new: NewChoices) {
        let choice = |c: &GemmChoice| Choice::from_word(&c.algorithm).unwrap_or(Choice::Untuned);
        let table = choices.iter().map(|c| (c.gemm.clone(), choice(c))).collect();
        {
            let mut job = self.job();
            (job.table, job.new) = (table, new);
        }
        self.known.write().unwrap_or_else(PoisonError::into_inner).clear();
    }

    pub(super) fn has_new_choices(&self) -> bool {
        !self.job().made.is_empty()
    }

    pub(super) fn take_choices(&self) -> Vec<GemmChoice> {
        std::mem::take(&mut self.job().made)
    }

    /// Whether the library refused a microscaling format, and that was reported.
    #[cfg(test)]
    pub(super) fn has_reported_refusal(&self) -> bool {
        self.refused.is_completed()
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
                if plan.is_none() && key.is_microscaled() {
                    self.refused.call_once(|| self.report_refused(&key));
                }
                let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
                known.entry(key).or_insert(plan).clone()
            }
        };
        match plan {
            Some(plan) => self.run(s, op, (&plan.desc, &plan.algorithm), o, o.c).map(|()| true),
            None => Ok(false),
        }
    }

    fn report_refused(&self, key: &GemmKey) {
        let GemmSizes { m, n, k, .. } = key.sizes;
        tracing::warn!(
            "cuBLASLt {} does not multiply {} operands ([{m}, {k}] by [{n}, {k}]) on this GPU ({}); such GEMMs are emulated",
            self.description.cublaslt,
            if key.types[0] == DType::U8 { "NVFP4" } else { "MXFP8" },
            self.description.card
        );
    }

    fn find(
        &self,
        s: &Stream,
        key: &GemmKey,
        o: &Operands,
        candidate: Option<Candidate>,
    ) -> Result<Option<GemmPlan>> {
        let desc = match MatmulDesc::new(key) {
            // The library is older than the format.
            Err(Error::Cuda { .. }) if key.is_microscaled() => return Ok(None),
            desc => desc?,
        };
        let is_large = is_large(key);
        // Untuned: the candidate where there is one, or the heuristics' favourite.
        let untuned = || match candidate {
            Some(_) => Ok(None),
            None => Ok(self.library.algorithms(key, &desc)?.first().copied()),
        };
        // A choice as an algorithm (None: the candidate).
        let meant = |choice| match choice {
            Choice::Candidate if candidate.is_some() => Ok(None),
            Choice::Algorithm(code) => match self.library.algorithm(&desc, code) {
                Some(algorithm) => Ok(Some(algorithm)),
                None => untuned(),
            },
            Choice::Candidate | Choice::Untuned => untuned(),
        };
        let gemm = format!("{key:?}");
        let of_job = if is_large { self.job().table.get(&gemm).copied() } else { None };
        let algorithm = match of_job {
            Some(choice) => meant(choice)?,
            None if !is_large => untuned()?,
            None => {
                let choice = self.choose(s, key, &desc, o, candidate)?;
                let mut job = self.job();
                job.made.push(GemmChoice { gemm, algorithm: choice.to_word() });
                let new = job.new;
                drop(job);
                if new == NewChoices::Used { meant(choice)? } else { untuned()? }
            }
        };
        Ok(algorithm.map(|algorithm| GemmPlan { desc, algorithm }))
    }

    /// The choice on disk, or one made now and stored there.
    fn choose(
        &self,
        s: &Stream,
        key: &GemmKey,
        desc: &MatmulDesc,
        o: &Operands,
        candidate: Option<Candidate>,
    ) -> Result<Choice> {
        let Some(folder) = self.folder.as_deref().filter(|_| self.is_tuned_batch(key)) else {
            return Ok(Choice::Untuned);
        };
        let GemmLibrary { card, driver, cublaslt, method } = &self.description;
        let on_disk = format!("{card}, driver {driver}, cuBLASLt {cublaslt}, method {method}; {key:?}");
        let GemmSizes { m, n, k, .. } = key.sizes;
        let name = format!("gemm-{m}x{n}x{k}");
        let applies = |choice: &Choice| match choice {
            Choice::Candidate => candidate.is_some(),
            Choice::Algorithm(code) => self.library.algorithm(desc, *code).is_some(),
            Choice::Untuned => false,
        };
        let decoded = |bytes: Vec<u8>| Choice::decode(&bytes).filter(applies);
        if let Some(kept) = cache::load_choice(folder, &name, on_disk.as_bytes()).and_then(decoded) {
            return Ok(kept);
        }
        let all = self.library.algorithms(key, desc)?;
        if all.is_empty() {
            return Ok(Choice::Untuned);
        }
        let stored = match self.autotune(s, desc, &all, o, candidate) {
            Ok(choice) => cache::store_choice(folder, &name, on_disk.as_bytes(), &choice.encode()),
            // No memory to tune in.
            Err(Error::OutOfMemory { .. }) => None,
            Err(e) => return Err(e),
        };
        Ok(stored.and_then(decoded).unwrap_or(Choice::Untuned))
    }

    /// Whether the batch size is one of the first few of the layer's GEMM.
    fn is_tuned_batch(&self, key: &GemmKey) -> bool {
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
        let mut args = [read(o.a); 9];
        (args[1], args[2]) = (read(o.b), write(c));
        let mut count = 3;
        let [scale_a, scale_b] = o.scales.map_or([None; 2], |both| both.map(|t| Some(read(t))));
        let factors = o.factors.map(read);
        let places = [o.bias, o.aux, scratch.as_ref().map(write), scale_a, scale_b, factors].map(|arg| {
            let arg = arg?;
            args[count] = arg;
            count += 1;
            Some(count - 1)
        });
        s.launch(op, &args[..count], |l| {
            let [bias, aux, workspace, scale_a, scale_b, factors] =
                places.map(|i| i.map_or(Ok(0), |i| l.address(i)));
            let (bias, aux, workspace) = (bias?, aux?, workspace?);
            let (scales, factors) = ([scale_a?, scale_b?], factors?);
            let (a, b, c) = (l.address(0)?, l.address(1)?, l.address(2)?);
            self.library.run(
                l,
                desc,
                algorithm,
                &GemmPointers { a, b, c, bias, aux, scales, factors, workspace },
                o.accumulate,
            )
        })
    }
}

/// Whether the GEMM takes longer than its launch.
fn is_large(key: &GemmKey) -> bool {
    let GemmSizes { m, n, k, .. } = key.sizes;
    let count = key.stacks.map_or(1, |s| s.count);
    2.0 * count as f64 * m as f64 * n as f64 * k as f64 > MIN_TUNED_FLOPS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_round_trip_and_invalid_bytes_are_rejected() {
        let codes = [
            Choice::Candidate,
            Choice::Untuned,
            Choice::Algorithm([0; 8]),
            Choice::Algorithm([1, 2, 3, 4, 5, 6, 7, u64::MAX]),
        ];
        for choice in codes {
            let bytes = choice.encode();
            assert_eq!(Choice::decode(&bytes), Some(choice));
            assert_eq!(Choice::decode(&bytes[..bytes.len() - 1]), None);
            assert_eq!(Choice::decode(&[&bytes[..], &[0]].concat()), None);
            let word = choice.to_word();
            assert_eq!(Choice::from_word(&word), Some(choice));
            assert_eq!(Choice::from_word(&word[1..]), None);
        }
        assert_eq!(Choice::decode(&[3]), None);
        assert_eq!(["", "0", "zz", "é0", "03"].map(Choice::from_word), [None; 5]);
    }
}
