//! Compiles kernel sources to machine code with NVRTC.

use super::libraries::{self, NvidiaLibrary};
use super::sources::{Source, header, includes};
use cudarc::nvrtc::sys::{self, nvrtcResult};
use ferrotron_tensor::{Error, Result};
use std::borrow::Cow;
use std::ffi::{CStr, CString};

/// A compiled source.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// What the driver loads: machine code (a cubin), or for a `compute_..` architecture PTX, which it compiles itself.
    pub code: Vec<u8>,
    /// Resources of its kernels, as ptxas reports them; none of PTX.
    pub kernels: Vec<KernelResources>,
}

/// Resources of a kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelResources {
    /// Its name.
    pub name: String,
    /// Registers of a thread.
    pub registers: usize,
    /// Bytes of register spills, stores plus loads.
    pub spills: usize,
    /// Bytes of static shared memory.
    pub shared: usize,
    /// Its wgmma instructions wait for each other, which costs a quarter of an attention kernel's speed: ptxas does that, and
    /// only says so, where it cannot tell that accumulators are left alone while they are computed.
    pub serialized: bool,
}

/// NVRTC.
pub struct Compiler {
    version: (i32, i32),
}

fn failed(op: &'static str, status: nvrtcResult) -> Error {
    // SAFETY: returns a static string for every status.
    let text = unsafe { CStr::from_ptr(sys::nvrtcGetErrorString(status)) };
    Error::Cuda { op, what: text.to_string_lossy().into_owned() }
}

fn check(op: &'static str, status: nvrtcResult) -> Result<()> {
    if status == nvrtcResult::NVRTC_SUCCESS { Ok(()) } else { Err(failed(op, status)) }
}

/// Destroys the program when dropped.
struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created by `nvrtcCreateProgram` and not destroyed before.
        let _ = unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
    }
}

impl Compiler {
    /// Loads NVRTC.
    pub fn open() -> Result<Compiler> {
        if !NvidiaLibrary::Nvrtc.open() {
            let what = format!(
                "the compiler of the kernels was not found (looked for {} on the loader's path and in {}); install it, \
                 or name its folder in {}",
                NvidiaLibrary::Nvrtc.file(),
                folder_list(),
                libraries::FOLDER_VARIABLE
            );
            return Err(Error::Unsupported { op: "NVRTC", what });
        }
        let mut version = (0, 0);
        // SAFETY: the library is loaded; pointers to two integers.
        check("version of NVRTC", unsafe { sys::nvrtcVersion(&mut version.0, &mut version.1) })?;
        Ok(Compiler { version })
    }

    /// Major and minor version.
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Cache key: everything that decides the machine code, which is the compiler, its options, and the texts of the
    /// source and its headers.
    pub fn key(&self, source: &Source, arch: &str) -> Result<Vec<u8>> {
        let (major, minor) = self.version;
        let defines = source.variant.defines();
        let mut key = format!("NVRTC {major}.{minor} {:?}\n{defines}{}", options(arch), source.text);
        for (name, text) in headers(source)? {
            key.push_str(&format!("\n#header \"{name}\"\n{text}"));
        }
        Ok(key.into_bytes())
    }

    /// Compiles a source for an architecture such as `sm_90a`; for one such as `compute_86` only to PTX.
    pub fn compile(&self, source: &Source, arch: &str) -> Result<Compiled> {
        let nul = |e: std::ffi::NulError| Error::Cuda { op: "kernel source", what: e.to_string() };
        let text = format!("{}#line 1 \"{}.cu\"\n{}", source.variant.defines(), source.name, source.text);
        let (text, file) = (CString::new(text).map_err(nul)?, format!("{}.cu", source.name));
        let file = CString::new(file).map_err(nul)?;
        let (mut names, mut texts) = (Vec::new(), Vec::new());
        for (name, text) in headers(source)? {
            names.push(CString::new(name).map_err(nul)?);
            texts.push(CString::new(text.into_owned()).map_err(nul)?);
        }
        let pointers = |all: &[CString]| all.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
        let options =
            options(arch).into_iter().map(CString::new).collect::<Result<Vec<_>, _>>().map_err(nul)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: strings that outlive the call, and as many header texts as names.
        let created = unsafe {
            sys::nvrtcCreateProgram(
                &mut raw,
                text.as_ptr(),
                file.as_ptr(),
                names.len() as i32,
                pointers(&texts).as_ptr(),
                pointers(&names).as_ptr(),
            )
        };
        check("kernel source", created)?;
        let program = Program(raw);
        // SAFETY: a live program and that many options.
        let status =
            unsafe { sys::nvrtcCompileProgram(program.0, options.len() as i32, pointers(&options).as_ptr()) };
        let log = log(&program)?;
        if status != nvrtcResult::NVRTC_SUCCESS {
            return Err(Error::Cuda {
                op: "compile a kernel",
                what: format!("{}.cu for {arch}:\n{log}", source.name),
            });
        }
        Ok(Compiled { code: code(&program, is_virtual(arch))?, kernels: usage(&log) })
    }
}

/// Whether an architecture is one of PTX.
fn is_virtual(arch: &str) -> bool {
    arch.starts_with("compute_")
}

/// The machine code of a compiled program, or its PTX.
fn code(program: &Program, ptx: bool) -> Result<Vec<u8>> {
    let mut size = 0;
    // SAFETY: a compiled program; a pointer for the size, then a buffer of that size. The size of PTX includes the zero at
    // its end, which the driver needs.
    unsafe {
        let status = match ptx {
            true => sys::nvrtcGetPTXSize(program.0, &mut size),
            false => sys::nvrtcGetCUBINSize(program.0, &mut size),
        };
        check("size of machine code", status)?;
        let mut code = vec![0u8; size];
        let status = match ptx {
            true => sys::nvrtcGetPTX(program.0, code.as_mut_ptr().cast()),
            false => sys::nvrtcGetCUBIN(program.0, code.as_mut_ptr().cast()),
        };
        check("machine code", status)?;
        Ok(code)
    }
}

/// The headers that a source includes, directly or not.
fn headers(source: &Source) -> Result<Vec<(String, Cow<'static, str>)>> {
    let mut found: Vec<(String, Cow<'static, str>)> = Vec::new();
    let mut next: Vec<String> = includes(source.text).map(String::from).collect();
    while let Some(name) = next.pop() {
        if found.iter().any(|(known, _)| *known == name) {
            continue;
        }
        let Some(text) = header(&name) else {
            let what = format!("{}.cu includes {name}, which there is not", source.name);
            return Err(Error::Cuda { op: "kernel source", what });
        };
        next.extend(includes(&text).map(String::from));
        found.push((name, text));
    }
    Ok(found)
}

fn options(arch: &str) -> Vec<String> {
    let mut all = vec![
        format!("--gpu-architecture={arch}"),
        "-std=c++17".into(),
        "-default-device".into(),
        "-lineinfo".into(),
    ];
    if !is_virtual(arch) {
        all.push("--ptxas-options=-v".into());
    }
    all
}

fn folder_list() -> String {
    let all: Vec<String> = libraries::folders().iter().map(|f| f.display().to_string()).collect();
    all.join(", ")
}

fn log(program: &Program) -> Result<String> {
    let mut size = 0;
    // SAFETY: a live program; a pointer for the size, then a buffer of that size.
    let bytes = unsafe {
        check("size of the log", sys::nvrtcGetProgramLogSize(program.0, &mut size))?;
        let mut bytes = vec![0u8; size.max(1)];
        check("log", sys::nvrtcGetProgramLog(program.0, bytes.as_mut_ptr().cast()))?;
        bytes
    };
    Ok(String::from_utf8_lossy(&bytes).trim_end_matches('\0').trim().to_string())
}

/// Parses the report of ptxas: for every kernel a line with its name, then its spills, then its registers. Before that, what it
/// noticed while compiling.
fn usage(log: &str) -> Vec<KernelResources> {
    let number_before = |line: &str, what: &str| -> usize {
        let head = line.split(what).next().filter(|h| h.len() < line.len());
        head.and_then(|h| h.split_whitespace().last()).and_then(|n| n.parse().ok()).unwrap_or(0)
    };
    let mut all: Vec<KernelResources> = Vec::new();
    let serialized: Vec<&str> =
        log.lines().filter(|l| l.contains("wgmma.mma_async instructions are serialized")).collect();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let name = rest.split('\'').next().unwrap_or_default().to_string();
            let serialized = serialized.iter().any(|l| l.contains(&format!("'{name}'")));
            all.push(KernelResources { name, serialized, ..KernelResources::default() });
        } else if let Some(last) = all.last_mut() {
            if line.contains("spill stores") {
                last.spills =
                    number_before(line, " bytes spill stores") + number_before(line, " bytes spill loads");
            } else if line.contains(" registers") {
                last.registers = number_before(line, " registers");
                last.shared = number_before(line, " bytes smem");
            }
        }
    }
    all
}
