//! Host memory as tensors of a device: pinned for a GPU, so that copies to and from it run beside computation; on the CPU
//! device plain memory with an account of its own, so that offloading can be tested there. Where the system refuses pinned
//! memory, pageable memory takes its place, with a warning: slower, with the same bits.
//!
//! The pool is stream-ordered like that of device memory: a freed block is reused by the stream that allocated it, which must
//! have waited for other streams that used it.

use crate::cuda::{PageableMemory, PinnedMemory};
use crate::device::DeviceInner;
use crate::host_pages::PlainMemory;
use crate::{Error, Result, format_bytes};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

/// Smallest block: a page.
const MIN_BYTES: usize = 4096;
const LARGE: usize = 64 << 20;
const LARGE_PAGE: usize = 2 << 20;

/// A block of host memory.
pub(crate) struct HostBlock {
    memory: Memory,
    bytes: usize,
}

enum Memory {
    Plain(PlainMemory),
    Pinned(PinnedMemory),
    Pageable(PageableMemory),
    /// Of a meta device: nothing.
    Meta,
}

impl HostBlock {
    pub(crate) fn address(&self) -> usize {
        match &self.memory {
            Memory::Plain(plain) => plain.address(),
            Memory::Pinned(pinned) => pinned.address(),
            Memory::Pageable(pageable) => pageable.address(),
            Memory::Meta => 0,
        }
    }
}

/// Free blocks by stream and size, and the account of host memory.
#[derive(Default)]
pub(crate) struct HostPool {
    free: Mutex<HashMap<(u32, usize), Vec<HostBlock>>>,
    /// Most bytes to allocate; 0: as many as the system gives.
    budget: AtomicUsize,
    reserved: AtomicUsize,
    now: AtomicUsize,
    peak: AtomicUsize,
    /// Whether the user knows that memory is pageable.
    warned: AtomicBool,
}

/// Bytes of host memory that a device's tensors use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostMemoryReport {
    /// Bytes of live tensors.
    pub now: usize,
    /// Their peak.
    pub peak: usize,
    /// Bytes allocated from the system, free blocks included.
    pub reserved: usize,
}

impl HostPool {
    pub(crate) fn set_budget(&self, bytes: Option<usize>) {
        self.budget.store(bytes.unwrap_or(0), Relaxed);
    }

    pub(crate) fn report(&self) -> HostMemoryReport {
        let [now, peak, reserved] = [&self.now, &self.peak, &self.reserved].map(|n| n.load(Relaxed));
        HostMemoryReport { now, peak, reserved }
    }

    /// A free block of the stream, or a new one within the budget.
    pub(crate) fn take(&self, device: &DeviceInner, stream: u32, bytes: usize) -> Result<HostBlock> {
        let class = size_class(bytes);
        let block = self.reuse(stream, class).map_or_else(|| self.allocate(device, class), Ok)?;
        self.peak.fetch_max(self.now.fetch_add(bytes, Relaxed) + bytes, Relaxed);
        Ok(block)
    }

    /// The smallest free block of the stream of which at most a fifth would be unused.
    fn reuse(&self, stream: u32, bytes: usize) -> Option<HostBlock> {
        let mut free = self.lock();
        let fits = |s: u32, size: usize| s == stream && (bytes..=bytes + bytes / 4).contains(&size);
        let found = free.iter().filter(|((s, size), blocks)| fits(*s, *size) && !blocks.is_empty());
        let best = found.map(|(key, _)| *key).min_by_key(|(_, size)| *size)?;
        free.get_mut(&best)?.pop()
    }

    pub(crate) fn free(&self, stream: u32, block: HostBlock, bytes: usize) {
        self.now.fetch_sub(bytes, Relaxed);
        self.lock().entry((stream, block.bytes)).or_default().push(block);
    }

    fn allocate(&self, device: &DeviceInner, bytes: usize) -> Result<HostBlock> {
        let budget = self.budget.load(Relaxed);
        let over = |reserved: usize| budget > 0 && reserved + bytes > budget;
        if over(self.reserved.load(Relaxed)) {
            self.trim(device)?;
        }
        let in_use = || format_bytes(self.now.load(Relaxed));
        if over(self.reserved.load(Relaxed)) {
            let [in_use, budget] = [in_use(), format_bytes(budget)];
            let why =
                format!("the budget is {budget}, of which {in_use} are in use; raise offload.host_budget");
            return Err(Error::HostMemory { bytes, why });
        }
        let mut memory = self.pinned(device, bytes);
        if memory.is_err() && self.has_free() {
            // The system may give what blocks of other sizes and streams hold.
            self.trim(device)?;
            memory = self.pinned(device, bytes);
        }
        let memory = memory.or_else(|refused| {
            let memory = pageable(device, bytes).map_err(|e| format!("{refused}; {e}"))?;
            self.warn_pageable(&refused);
            Ok(memory)
        });
        let memory = memory.map_err(|refused: String| {
            let why = format!(
                "{refused}, beside the {} in use; offload less, or give the process more memory (that of a container counts)",
                in_use()
            );
            Error::HostMemory { bytes, why }
        })?;
        self.reserved.fetch_add(bytes, Relaxed);
        Ok(HostBlock { memory, bytes })
    }

    /// Memory that copies run to and from beside computation; the error says why there is none.
    fn pinned(&self, device: &DeviceInner, bytes: usize) -> Result<Memory, String> {
        let all = self.reserved.load(Relaxed).saturating_add(bytes);
        device.host_faults.check_pinned(all).map_err(|e| e.to_string())?;
        match &device.context {
            None if device.meta => Ok(Memory::Meta),
            None => plain(bytes),
            Some(context) => PinnedMemory::new(context, bytes).map(Memory::Pinned).map_err(|e| e.to_string()),
        }
    }

    /// Whether there are blocks that nobody uses.
    fn has_free(&self) -> bool {
        self.lock().values().any(|blocks| !blocks.is_empty())
    }

    /// Says once that memory is not pinned, and what that costs.
    pub(crate) fn warn_pageable(&self, refused: &str) {
        if !self.warned.swap(true, Relaxed) {
            tracing::warn!(
                "the system refuses pinned host memory ({refused}); pageable memory takes its place: results are the same, \
                 but copies to and from it run at a fraction of the link's rate and hold up the step; raise the limits of \
                 locked memory and of the container, or offload less"
            );
        }
    }

    /// Returns free blocks to the system. Freeing pinned memory waits for the device.
    pub(crate) fn trim(&self, device: &DeviceInner) -> Result<()> {
        let blocks = std::mem::take(&mut *self.lock());
        let bytes: usize = blocks.values().flatten().map(|b| b.bytes).sum();
        // The system may give the addresses to anyone.
        device.check(|checker| {
            blocks.values().flatten().for_each(|b| checker.forget(b.address()..b.address() + b.bytes));
            Ok(())
        })?;
        drop(blocks);
        self.reserved.fetch_sub(bytes, Relaxed);
        Ok(())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<(u32, usize), Vec<HostBlock>>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Memory for which copies to and from it wait.
fn pageable(device: &DeviceInner, bytes: usize) -> Result<Memory, String> {
    match &device.context {
        None => plain(bytes),
        Some(context) => PageableMemory::new(context, bytes).map(Memory::Pageable).map_err(|e| e.to_string()),
    }
}

fn plain(bytes: usize) -> Result<Memory, String> {
    PlainMemory::new(bytes).map(Memory::Plain).ok_or_else(|| "there is no more".to_string())
}

/// Rounds up to a multiple of a quarter of the power of two below, so that sizes which vary a little share blocks and under
/// a quarter is unused; of large blocks, which are most of the memory, to a large page.
fn size_class(bytes: usize) -> usize {
    let bytes = bytes.max(MIN_BYTES);
    if bytes >= LARGE {
        return bytes.next_multiple_of(LARGE_PAGE);
    }
    let step = ((bytes + 1).next_power_of_two() / 8).max(MIN_BYTES);
    bytes.next_multiple_of(step)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Category, DType, Device, HostBuffer, HostFault, Instrumentation, Tensor, Threads};
    use std::sync::Arc;

    fn device() -> Device {
        let watch = Instrumentation { race_check: true, ..Default::default() };
        Device::cpu_instrumented(Threads::new(1).unwrap(), watch)
    }

    #[test]
    fn size_classes_hold_the_request_and_waste_under_a_quarter() {
        for bytes in (1..9000).chain([1 << 20, (1 << 20) + 1, 3_000_001, 1 << 30]) {
            let class = size_class(bytes);
            assert!(
                class >= bytes && class <= MIN_BYTES.max(bytes + bytes / 4 + MIN_BYTES),
                "{bytes} -> {class}"
            );
            assert_eq!(size_class(class), class, "{bytes}");
        }
    }

    #[test]
    fn host_memory_has_its_own_account_and_is_reused() {
        let device = device();
        let s = device.stream("offload").unwrap();
        let x = s.upload(&[1f32, 2.0, 3.0], &[3], Category::Activations).unwrap();
        let used = device.memory().total_now;
        let host = Tensor::host(&s, &[3], DType::F32).unwrap();
        s.copy(&x, &host).unwrap();
        let report = device.memory();
        assert_eq!((report.total_now, report.host.now, report.host.reserved), (used, 12, MIN_BYTES));
        let back = Tensor::empty(&s, &[3], DType::F32, Category::Activations).unwrap();
        s.copy(&host, &back).unwrap();
        assert_eq!(s.download::<f32>(&back).unwrap(), [1.0, 2.0, 3.0]);
        drop(host);
        let again = Tensor::host(&s, &[4], DType::F32).unwrap();
        let report = device.memory().host;
        assert_eq!((report.now, report.peak, report.reserved), (16, 16, MIN_BYTES));
        drop(again);
    }

    #[test]
    fn the_budget_is_kept_and_named() {
        let device = device();
        device.set_host_budget(Some(3 * MIN_BYTES));
        let s = device.stream("offload").unwrap();
        let a = Tensor::host(&s, &[2 * MIN_BYTES], DType::U8).unwrap();
        let e = Tensor::host(&s, &[2 * MIN_BYTES], DType::U8).unwrap_err().to_string();
        assert!(
            e.contains("the budget is 12.0 KiB, of which 8.0 KiB are in use")
                && e.contains("offload.host_budget"),
            "{e}"
        );
        drop(a);
        // Free blocks of another size are returned first.
        Tensor::host(&s, &[3 * MIN_BYTES], DType::U8).unwrap();
    }

    /// Messages of warnings.
    #[derive(Clone, Default)]
    struct Warnings(Arc<Mutex<Vec<String>>>);

    impl tracing::field::Visit for Warnings {
        fn record_debug(&mut self, _: &tracing::field::Field, value: &dyn std::fmt::Debug) {
            self.0.lock().unwrap().push(format!("{value:?}"));
        }
    }

    impl tracing::Subscriber for Warnings {
        fn enabled(&self, metadata: &tracing::Metadata) -> bool {
            *metadata.level() == tracing::Level::WARN
        }
        fn new_span(&self, _: &tracing::span::Attributes) -> tracing::span::Id {
            tracing::span::Id::from_u64(1)
        }
        fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record) {}
        fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
        fn event(&self, event: &tracing::Event) {
            event.record(&mut self.clone());
        }
        fn enter(&self, _: &tracing::span::Id) {}
        fn exit(&self, _: &tracing::span::Id) {}
    }

    #[test]
    fn pageable_memory_replaces_pinned_memory_that_is_refused_and_one_warning_says_so() {
        let warnings = Warnings::default();
        tracing::subscriber::with_default(warnings.clone(), || {
            let device = device();
            let s = device.stream("offload").unwrap();
            let x = s.upload(&[1f32, 2.0, 3.0], &[3], Category::Activations).unwrap();
            let before = Tensor::host(&s, &[3], DType::F32).unwrap();
            assert!(warnings.0.lock().unwrap().is_empty());
            device.inject(HostFault::PinnedRefused);
            let mut buffer = HostBuffer::new(&device, 12).unwrap();
            s.copy_to_host(&x, &mut buffer, 0).unwrap();
            for host in [before, Tensor::host(&s, &[3], DType::F32).unwrap()] {
                s.copy(&x, &host).unwrap();
                let back = Tensor::empty(&s, &[3], DType::F32, Category::Activations).unwrap();
                s.copy(&host, &back).unwrap();
                assert_eq!(s.download::<f32>(&back).unwrap(), [1.0, 2.0, 3.0]);
                assert_eq!(s.read_host(&host, <[u8]>::to_vec).unwrap(), buffer.bytes().unwrap());
            }
            // The budget is kept.
            device.set_host_budget(Some(3 * MIN_BYTES));
            let e = Tensor::host(&s, &[4 * MIN_BYTES], DType::U8).unwrap_err().to_string();
            assert!(e.contains("offload.host_budget"), "{e}");
        });
        let said = warnings.0.lock().unwrap();
        let [warning] = &said[..] else { panic!("{said:?}") };
        for part in
            ["refuses pinned host memory", "refused by a test", "fraction of the link's rate", "offload less"]
        {
            assert!(warning.contains(part), "{warning}");
        }
    }

    #[test]
    fn free_blocks_of_other_sizes_are_given_back_before_memory_is_pageable() {
        let warnings = Warnings::default();
        tracing::subscriber::with_default(warnings.clone(), || {
            let device = device();
            device.inject(HostFault::PinnedLimit(8 << 20));
            let [s, other] = ["offload", "reload"].map(|name| device.stream(name).unwrap());
            let host = |s: &crate::Stream, bytes: usize| Tensor::host(s, &[bytes], DType::U8).unwrap();
            drop([(); 8].map(|()| host(&other, 1 << 20)));
            let one = host(&s, 1 << 20);
            assert_eq!(device.memory().host.reserved, 1 << 20);
            let six = host(&s, 6 << 20);
            assert_eq!(device.memory().host.reserved, 7 << 20);
            assert!(warnings.0.lock().unwrap().is_empty());
            // What is in use stays.
            let two = host(&s, 2 << 20);
            assert_eq!((one.bytes(), six.bytes(), two.bytes()), (1 << 20, 6 << 20, 2 << 20));
            let said = warnings.0.lock().unwrap();
            assert!(said.len() == 1 && said[0].contains("refuses pinned host memory"), "{said:?}");
            // The budget counts free blocks, its message what is in use.
            drop((six, two));
            device.set_host_budget(Some(9 << 20));
            let e = Tensor::host(&s, &[10 << 20], DType::U8).unwrap_err().to_string();
            assert!(e.contains("the budget is 9.0 MiB, of which 1.0 MiB are in use"), "{e}");
        });
    }

    #[test]
    fn a_copy_that_fails_is_an_error_that_names_it() {
        let device = device();
        let s = device.stream("offload").unwrap();
        let x = s.zeros(&[3], DType::F32, Category::Activations).unwrap();
        let host = Tensor::host(&s, &[3], DType::F32).unwrap();
        device.inject(HostFault::CopyFails { after: 1 });
        s.copy(&x, &host).unwrap();
        let e = s.copy(&host, &x).unwrap_err().to_string();
        assert!(e.contains("copy from host"), "{e}");
        s.copy(&host, &x).unwrap();
    }

    /// Memory that another thread reads is not written meanwhile, nor afterwards without an event.
    #[test]
    fn host_memory_is_read_in_order() {
        let device = device();
        let (compute, save) = (device.stream("compute").unwrap(), device.stream("checkpoint").unwrap());
        let host = Tensor::host(&compute, &[4], DType::U8).unwrap();
        compute.upload_into(&host, &[1u8, 2, 3, 4]).unwrap();
        let e = save.read_host(&host, |_| ()).unwrap_err().to_string();
        assert!(e.contains("no event between them"), "{e}");
        save.wait(&compute.record().unwrap()).unwrap();
        let part = host.narrow(0, 1, 2).unwrap();
        let (seen, written) = save
            .read_host(&part, |bytes| {
                save.wait(&compute.record().unwrap()).unwrap();
                (bytes.to_vec(), compute.zero(&host.narrow(0, 3, 1).unwrap()))
            })
            .unwrap();
        assert_eq!(seen, [2, 3]);
        assert!(written.unwrap_err().to_string().contains("another thread"));
        assert!(compute.zero(&host).unwrap_err().to_string().contains("no event between them"));
        compute.wait(&save.record().unwrap()).unwrap();
        compute.zero(&host).unwrap();
        let x = compute.zeros(&[1], DType::F32, Category::Workspace).unwrap();
        save.read_host(&x, |_| ()).unwrap_err();
    }

    #[test]
    fn a_block_reused_while_another_stream_copies_is_a_race() {
        let device = device();
        let (offload, reload) = (device.stream("offload").unwrap(), device.stream("reload").unwrap());
        let x = offload.zeros(&[16], DType::F32, Category::Activations).unwrap();
        let run = |ordered: bool| {
            let host = Tensor::host(&offload, &[16], DType::F32)?;
            offload.copy(&x, &host)?;
            reload.wait(&offload.record()?)?;
            let y = Tensor::empty(&reload, &[16], DType::F32, Category::Activations)?;
            reload.copy(&host, &y)?;
            if ordered {
                offload.wait(&reload.record()?)?;
            }
            drop(host);
            let next = Tensor::host(&offload, &[16], DType::F32)?;
            offload.copy(&x, &next)
        };
        run(true).unwrap();
        let e = run(false).unwrap_err().to_string();
        assert!(e.contains("reused too early") && e.contains("on stream 'reload'"), "{e}");
    }
}
