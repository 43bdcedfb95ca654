//! Compiled kernels: loads modules from the cache or from NVRTC, looks up functions, launches them.

use super::args::DeviceType;
use super::compile::Compiler;
use super::functions::Functions;
use super::grid::check_grid;
use super::sources::{SOURCES, Source, Variant, variants};
use super::{Kernel, LaunchConfig, cache};
use cudarc::driver::sys::{self, CUresult};
use ferrotron_tensor::{Error, GpuInfo, Launch, Result};
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::{Mutex, PoisonError, RwLock};

/// Where the kernels came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelCacheStats {
    /// Sources compiled now.
    pub compiled: usize,
    /// Sources found in the cache.
    pub cached: usize,
}

/// Loaded modules, and the functions looked up so far.
pub(super) struct Modules {
    modules: RwLock<HashMap<(&'static str, Variant), sys::CUmodule>>,
    arch: String,
    /// Shared memory that a block may have, in bytes.
    shared_memory: u32,
    functions: Functions<(&'static str, Variant, &'static str), sys::CUfunction>,
    cache_stats: KernelCacheStats,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Modules {}
// SAFETY: as above.
unsafe impl Sync for Modules {}

/// The architecture to compile for; `a` enables Hopper's architecture-specific instructions. Machine code of an older
/// architecture does not run on a card that stands for it: that card's driver compiles PTX of it.
pub fn architecture(card: &GpuInfo) -> String {
    let (major, minor) = card.capability;
    let kind = if card.stands_for_another() { "compute" } else { "sm" };
    format!("{kind}_{major}{minor}{}", if (major, minor) == (9, 0) { "a" } else { "" })
}

/// The context that is current on this thread.
#[derive(Clone, Copy)]
struct Context(sys::CUcontext);

// SAFETY: a context may be current on any thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    fn current() -> Result<Context> {
        let mut context = std::ptr::null_mut();
        // SAFETY: the out-pointer is a local.
        check("load kernels", unsafe { sys::cuCtxGetCurrent(&mut context) })?;
        Ok(Context(context))
    }

    fn enter(&self) -> Result<()> {
        // SAFETY: a context that is current on another thread.
        check("load kernels", unsafe { sys::cuCtxSetCurrent(self.0) })
    }
}

fn check(op: &'static str, status: CUresult) -> Result<()> {
    if status == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(Error::Cuda { op, what: format!("{status:?}") })
}

impl Modules {
    /// Loads every source for a GPU whose context is current.
    pub(super) fn load(card: &GpuInfo) -> Result<Modules> {
        let arch = architecture(card);
        let compiler = Compiler::open()?;
        let (folder, context) = (cache::folder(), Context::current()?);
        let next = Mutex::new(SOURCES.iter().filter(|s| s.is_for(&arch)));
        let done = Mutex::new(Vec::new());
        let work = || {
            loop {
                let source = next.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some(source) = source else { return };
                // The driver compiles PTX as it loads it, which takes as long.
                let made = make(&compiler, source, &arch, folder.as_deref()).and_then(|(code, cached)| {
                    context.enter()?;
                    Ok((Module(loaded(&code)?), cached))
                });
                done.lock().unwrap_or_else(PoisonError::into_inner).push((*source, made));
            }
        };
        let workers = std::thread::available_parallelism().map_or(1, usize::from).min(SOURCES.len().max(1));
        std::thread::scope(|s| (0..workers).for_each(|_| drop(s.spawn(work))));
        let (mut modules, mut cache_stats) = (HashMap::new(), KernelCacheStats::default());
        for (source, made) in done.into_inner().unwrap_or_else(PoisonError::into_inner) {
            let (Module(module), cached) = made?;
            *(if cached { &mut cache_stats.cached } else { &mut cache_stats.compiled }) += 1;
            modules.insert((source.name, source.variant), module);
        }
        let (modules, functions) = (RwLock::new(modules), Functions::default());
        Ok(Modules { modules, arch, shared_memory: card.shared_memory, functions, cache_stats })
    }

    /// The module of a kernel; variants are compiled on first use. The GPU's context is current wherever kernels are
    /// launched.
    fn module(&self, kernel: Kernel) -> Result<sys::CUmodule> {
        let key = (kernel.source, kernel.variant);
        let known = self.modules.read().unwrap_or_else(PoisonError::into_inner).get(&key).copied();
        if let Some(module) = known {
            return Ok(module);
        }
        let Some(source) = variants().find(|s| (s.name, s.variant) == key) else {
            let what = format!("there is no {}{} for this GPU", kernel.source, kernel.variant.suffix());
            return Err(Error::Cuda { op: kernel.name, what });
        };
        let mut modules = self.modules.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = modules.get(&key) {
            return Ok(*module);
        }
        let (code, _) = make(&Compiler::open()?, &source, &self.arch, cache::folder().as_deref())?;
        let module = loaded(&code)?;
        modules.insert(key, module);
        Ok(module)
    }

    /// Compiles and loads a source of a test.
    #[cfg(test)]
    pub(super) fn add(&self, source: &Source) -> Result<()> {
        let (code, _) = make(&Compiler::open()?, source, &self.arch, None)?;
        let module = loaded(&code)?;
        let mut modules = self.modules.write().unwrap_or_else(PoisonError::into_inner);
        modules.entry((source.name, source.variant)).or_insert(module);
        Ok(())
    }

    /// Whether the source's base variant is loaded.
    pub(super) fn has(&self, source: &'static str) -> bool {
        self.modules.read().unwrap_or_else(PoisonError::into_inner).contains_key(&(source, Variant::Base))
    }

    /// Shared memory that a block may have, in bytes.
    pub(super) fn shared_memory(&self) -> usize {
        self.shared_memory as usize
    }

    pub(super) fn cache_stats(&self) -> KernelCacheStats {
        self.cache_stats
    }

    /// See [`super::CudaKernels::launch_kernel`].
    pub(super) fn launch_kernel<A: DeviceType>(
        &self,
        l: &Launch,
        kernel: Kernel,
        grid: LaunchConfig,
        args: &A,
    ) -> Result<()> {
        if grid.blocks.contains(&0) || grid.threads == 0 {
            return Ok(());
        }
        check_grid(l.op(), grid.blocks)?;
        if grid.shared > self.shared_memory {
            let what = format!(
                "{} needs {} bytes of shared memory, of which {} has {}",
                kernel.name, grid.shared, self.arch, self.shared_memory
            );
            return Err(Error::Unsupported { op: l.op(), what });
        }
        let function = self.function(kernel, grid.shared)?;
        let stream = l.cuda_stream()?;
        let mut params = [std::ptr::from_ref(args).cast_mut().cast::<c_void>()];
        let [x, y, z] = grid.blocks;
        // SAFETY: one argument by value, which the driver copies; `kernel_args!` gives both sides its layout. The
        // addresses in it come from `Launch::address`, which keeps them inside the launch's arguments.
        let status = unsafe {
            let none = std::ptr::null_mut();
            sys::cuLaunchKernel(
                function,
                x,
                y,
                z,
                grid.threads,
                1,
                1,
                grid.shared,
                stream,
                params.as_mut_ptr(),
                none,
            )
        };
        match status {
            CUresult::CUDA_SUCCESS => Ok(()),
            status => Err(Error::Cuda { op: kernel.name, what: format!("{status:?} for {grid:?}") }),
        }
    }

    fn function(&self, kernel: Kernel, shared: u32) -> Result<sys::CUfunction> {
        let find = || {
            let missing =
                || Error::Cuda { op: kernel.name, what: format!("{}.cu has no such kernel", kernel.source) };
            let module = self.module(kernel)?;
            let name = CString::new(kernel.name).map_err(|_| missing())?;
            let mut raw = std::ptr::null_mut();
            // SAFETY: a loaded module and a name.
            match unsafe { sys::cuModuleGetFunction(&mut raw, module, name.as_ptr()) } {
                CUresult::CUDA_SUCCESS => Ok(raw),
                _ => Err(missing()),
            }
        };
        let allow = |function, bytes: u32| {
            let which = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: a function of a loaded module.
            check(kernel.name, unsafe { sys::cuFuncSetAttribute(function, which, bytes as i32) })
        };
        self.functions.get((kernel.source, kernel.variant, kernel.name), shared, find, allow)
    }
}

/// A loaded module.
struct Module(sys::CUmodule);

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Module {}

/// Loads a complete cubin or PTX, compiled here or checked by the cache, into the current context.
fn loaded(code: &[u8]) -> Result<sys::CUmodule> {
    let mut module = std::ptr::null_mut();
    // SAFETY: a complete cubin, or PTX with a zero at its end; the context is current.
    check("load kernels", unsafe { sys::cuModuleLoadData(&mut module, code.as_ptr().cast()) })?;
    Ok(module)
}

fn make(
    compiler: &Compiler,
    source: &Source,
    arch: &str,
    folder: Option<&std::path::Path>,
) -> Result<(Vec<u8>, bool)> {
    let key = compiler.key(source, arch)?;
    let name = format!("{}{}", source.name.replace('/', "-"), source.variant.suffix());
    if let Some(code) = folder.and_then(|f| cache::load(f, &name, arch, &key)) {
        return Ok((code, true));
    }
    let code = compiler.compile(source, arch)?.code;
    if let Some(folder) = folder {
        cache::store(folder, &name, arch, &key, &code);
    }
    Ok((code, false))
}
