//! cuBLASLt: descriptors, heuristics, and launches of GEMMs.
//!
//! The library is column-major: our row-major `c [m, n]` is its `cᵀ [n, m]`, and `cᵀ = op(b)ᵀ·op(a)ᵀ`. So A and B are
//! swapped, nothing is moved, and a bias over our columns is its bias over rows.

use super::autotune::MAX_CANDIDATES;
use super::libraries::NvidiaLibrary;
use crate::{GemmSizes, ScalingMode};
use cudarc::cublaslt::sys::{
    self, cublasLtEpilogue_t as LtEpilogue, cublasLtMatmulAlgoConfigAttributes_t as Config,
    cublasLtMatmulDescAttributes_t as Attribute, cublasLtMatmulMatrixScale_t as Mode,
    cublasLtMatmulPreferenceAttributes_t as Preference, cublasLtMatrixLayoutAttribute_t as Layout,
    cublasLtPointerMode_t as PointerMode, cublasLtReductionScheme_t as Reduction, cublasStatus_t,
};
use ferrotron_tensor::{DType, Error, Launch, Result};
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

/// Workspace of a GEMM at most: NVIDIA's recommendation for Hopper.
const WORKSPACE: usize = 32 << 20;

/// Stands for a scale pointer while algorithms are looked up; nothing is read from it.
const PLACEHOLDER: u64 = 1 << 12;

/// Epilogue: what follows the GEMM in the same kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Epilogue {
    /// Nothing.
    None,
    /// Adds a bias.
    Bias,
    /// GELU (tanh) of the GEMM plus bias; the input of the GELU is stored as aux, with leading dimension `ld`.
    Gelu { bias: bool, ld: usize },
    /// Bias gradient: the column sums of `a`, as stored, in f32.
    BiasGrad,
}

/// Which values of an operand share a scale, as the library reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum ScaleMode {
    /// f32, all values.
    PerTensor,
    /// f32, 1x128 blocks.
    Block1x128,
    /// f32, 128x128 blocks.
    Block128x128,
    /// E8M0, 32 values along k; in tiles of 128x4.
    Vec32E8m0,
    /// E4M3, 16 values along k; in tiles of 128x4. Operands are FP4, packed in u8, and alpha and beta are on the device.
    Vec16E4m3,
}

impl From<ScalingMode> for ScaleMode {
    fn from(scaling: ScalingMode) -> ScaleMode {
        match scaling {
            ScalingMode::PerTensor => ScaleMode::PerTensor,
            ScalingMode::Block1x128 => ScaleMode::Block1x128,
            ScalingMode::Block128x128 => ScaleMode::Block128x128,
        }
    }
}

/// Further parameters of a GEMM with FP8 or FP4 operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Fp8Operands {
    /// Dtype of the second operand.
    pub(super) other: DType,
    /// Scaling modes of both operands.
    pub(super) scaling: [ScaleMode; 2],
    /// Fast accumulation: sums stay in the tensor core's accumulator.
    pub(super) fast: bool,
}

/// Stacks of a batched GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Stacks {
    /// Matrices of each.
    pub(super) count: usize,
    /// Elements from one matrix of a, b and c to the next.
    pub(super) strides: [usize; 3],
}

/// What the choice of an algorithm depends on.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct GemmKey {
    pub(super) sizes: GemmSizes,
    pub(super) trans: [bool; 2],
    /// Dtypes of the operands (FP8: of the first) and of the result.
    pub(super) types: [DType; 2],
    pub(super) epilogue: Epilogue,
    /// Alignment of a, b, c and of the epilogue's tensor, in bytes.
    pub(super) align: [usize; 4],
    /// Set for FP8 and FP4 operands.
    pub(super) fp8: Option<Fp8Operands>,
    /// Set for a batched GEMM.
    pub(super) stacks: Option<Stacks>,
}

impl GemmKey {
    /// Whether operands have a microscaling format, which the library multiplies on Blackwell alone.
    pub(super) fn is_microscaled(&self) -> bool {
        let small = |mode: &ScaleMode| matches!(mode, ScaleMode::Vec32E8m0 | ScaleMode::Vec16E4m3);
        self.fp8.is_some_and(|e| e.scaling.iter().all(small))
    }

    /// Whether alpha and beta are read from the device: per-tensor scales of FP4 operands are in alpha.
    fn has_device_factors(&self) -> bool {
        self.fp8.is_some_and(|e| e.scaling[0] == ScaleMode::Vec16E4m3)
    }
}

/// Tuned choices are stored under this text: that of a single GEMM says nothing of stacks, so that older choices stand.
impl std::fmt::Debug for GemmKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let GemmKey { sizes, trans, types, epilogue, align, fp8, stacks } = self;
        let mut out = f.debug_struct("GemmKey");
        out.field("sizes", sizes).field("trans", trans).field("types", types);
        out.field("epilogue", epilogue).field("align", align).field("fp8", fp8);
        if let Some(stacks) = stacks {
            out.field("stacks", stacks);
        }
        out.finish()
    }
}

/// A cuBLASLt handle.
pub(super) struct CublasLt {
    handle: sys::cublasLtHandle_t,
}

// SAFETY: the handle may be used from any thread.
unsafe impl Send for CublasLt {}
// SAFETY: as above.
unsafe impl Sync for CublasLt {}

/// Matmul and matrix layout descriptors.
pub(super) struct MatmulDesc {
    operation: sys::cublasLtMatmulDesc_t,
    /// The library's A, B and C: our b, a and c.
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    epilogue: Epilogue,
    /// Whether the operands have scales.
    scaled: bool,
    /// The matmul descriptor holds the pointers of a call until it is launched: one call at a time.
    lock: Mutex<()>,
}

// SAFETY: descriptors are plain memory, and are changed under the lock only.
unsafe impl Send for MatmulDesc {}
// SAFETY: as above.
unsafe impl Sync for MatmulDesc {}

impl Drop for MatmulDesc {
    fn drop(&mut self) {
        // SAFETY: created in `new` (null where that failed), and no longer used.
        unsafe {
            let _ = sys::cublasLtMatmulDescDestroy(self.operation);
            for layout in self.layouts {
                let _ = sys::cublasLtMatrixLayoutDestroy(layout);
            }
        }
    }
}

/// An algorithm of the library.
#[derive(Clone, Copy)]
pub(super) struct Algorithm {
    pub(super) code: sys::cublasLtMatmulAlgo_t,
    /// Workspace in bytes.
    pub(super) workspace: usize,
}

/// Pointers of a call.
pub(super) struct GemmPointers {
    pub(super) a: u64,
    pub(super) b: u64,
    pub(super) c: u64,
    pub(super) bias: u64,
    /// What the epilogue reads or writes besides the result.
    pub(super) aux: u64,
    /// FP8: inverse scales of a and b.
    pub(super) scales: [u64; 2],
    /// FP4: alpha and beta.
    pub(super) factors: u64,
    pub(super) workspace: u64,
}

fn check(op: &'static str, status: cublasStatus_t) -> Result<()> {
    if status == cublasStatus_t::CUBLAS_STATUS_SUCCESS {
        return Ok(());
    }
    Err(Error::Cuda { op, what: format!("cuBLASLt: {status:?}") })
}

/// The library's name of a dtype; u8 stands for pairs of FP4 codes.
fn kind(t: DType) -> sys::cudaDataType_t {
    match t {
        DType::BF16 => sys::cudaDataType_t::CUDA_R_16BF,
        DType::F16 => sys::cudaDataType_t::CUDA_R_16F,
        DType::E4M3 => sys::cudaDataType_t::CUDA_R_8F_E4M3,
        DType::E5M2 => sys::cudaDataType_t::CUDA_R_8F_E5M2,
        DType::U8 => sys::cudaDataType_t::CUDA_R_4F_E2M1,
        _ => sys::cudaDataType_t::CUDA_R_32F,
    }
}

fn mode(scaling: ScaleMode) -> i32 {
    (match scaling {
        ScaleMode::PerTensor => Mode::CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F,
        ScaleMode::Block1x128 => Mode::CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F,
        ScaleMode::Block128x128 => Mode::CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F,
        ScaleMode::Vec32E8m0 => Mode::CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0,
        ScaleMode::Vec16E4m3 => Mode::CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3,
    }) as i32
}

fn set_layout<T: Copy>(layout: sys::cublasLtMatrixLayout_t, which: Layout, value: &T) -> Result<()> {
    let at = std::ptr::from_ref(value).cast::<c_void>();
    // SAFETY: a live layout; the attributes set here have the sizes of the values they are given.
    let status =
        unsafe { sys::cublasLtMatrixLayoutSetAttribute(layout, which, at, std::mem::size_of::<T>()) };
    check("cuBLASLt descriptor", status)
}

impl MatmulDesc {
    pub(super) fn new(key: &GemmKey) -> Result<MatmulDesc> {
        const OP: &str = "cuBLASLt descriptor";
        let GemmSizes { m, n, k, lda, ldb, ldc } = key.sizes;
        let [trans_a, trans_b] = key.trans;
        let [input, output] = key.types.map(kind);
        let second = key.fp8.map_or(input, |e| kind(e.other));
        // The bias of an FP8 GEMM is bf16.
        let added = key.fp8.map_or(input, |_| kind(DType::BF16));
        let mut desc = MatmulDesc {
            operation: std::ptr::null_mut(),
            layouts: [std::ptr::null_mut(); 3],
            epilogue: key.epilogue,
            scaled: key.fp8.is_some(),
            lock: Mutex::default(),
        };
        // An operand as stored, column-major.
        let stored = |trans: bool, rows: usize, cols: usize| if trans { (cols, rows) } else { (rows, cols) };
        let shapes = [
            (second, stored(trans_b, n, k), ldb),
            (input, stored(trans_a, k, m), lda),
            (output, (n, m), ldc),
        ];
        for (layout, (kind, (rows, cols), ld)) in desc.layouts.iter_mut().zip(shapes) {
            // SAFETY: a pointer for the handle.
            check(OP, unsafe {
                sys::cublasLtMatrixLayoutCreate(layout, kind, rows as u64, cols as u64, ld as i64)
            })?;
        }
        if let Some(Stacks { count, strides: [a, b, c] }) = key.stacks {
            for (layout, stride) in desc.layouts.iter().zip([b, a, c]) {
                set_layout(*layout, Layout::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &(count as i32))?;
                set_layout(*layout, Layout::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &(stride as i64))?;
            }
        }
        // Accumulates in f32, and f32 operands are multiplied in f32, never in TF32.
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        // SAFETY: a pointer for the handle.
        check(OP, unsafe {
            sys::cublasLtMatmulDescCreate(&mut desc.operation, compute, sys::cudaDataType_t::CUDA_R_32F)
        })?;
        // 0: as stored, 1: transposed.
        desc.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &i32::from(trans_b))?;
        desc.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, &i32::from(trans_a))?;
        if let Some(fp8) = key.fp8 {
            let [a, b] = fp8.scaling.map(mode);
            desc.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &b)?;
            desc.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &a)?;
            desc.set(Attribute::CUBLASLT_MATMUL_DESC_FAST_ACCUM, &i8::from(fp8.fast))?;
            if key.has_device_factors() {
                let mode = PointerMode::CUBLASLT_POINTER_MODE_DEVICE as i32;
                desc.set(Attribute::CUBLASLT_MATMUL_DESC_POINTER_MODE, &mode)?;
            }
            // The heuristics need scale pointers that are not null; calls set the real ones.
            desc.scale_from([PLACEHOLDER; 2])?;
        }
        let (epilogue, bias, aux) = match key.epilogue {
            Epilogue::None => (LtEpilogue::CUBLASLT_EPILOGUE_DEFAULT, None, None),
            Epilogue::Bias => (LtEpilogue::CUBLASLT_EPILOGUE_BIAS, Some(added), None),
            Epilogue::Gelu { bias: true, ld } => {
                (LtEpilogue::CUBLASLT_EPILOGUE_GELU_AUX_BIAS, Some(input), Some(ld))
            }
            Epilogue::Gelu { bias: false, ld } => (LtEpilogue::CUBLASLT_EPILOGUE_GELU_AUX, None, Some(ld)),
            Epilogue::BiasGrad => {
                (LtEpilogue::CUBLASLT_EPILOGUE_BGRADB, Some(sys::cudaDataType_t::CUDA_R_32F), None)
            }
        };
        desc.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &(epilogue as i32))?;
        if let Some(kind) = bias {
            desc.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &(kind as i32))?;
        }
        if let Some(ld) = aux {
            desc.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &(ld as i64))?;
            desc.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, &(input as i32))?;
        }
        Ok(desc)
    }

    fn set<T: Copy>(&self, which: Attribute, value: &T) -> Result<()> {
        let at = std::ptr::from_ref(value).cast::<c_void>();
        // SAFETY: a live descriptor; the attributes set here have the sizes of the values they are given.
        let status = unsafe {
            sys::cublasLtMatmulDescSetAttribute(self.operation, which, at, std::mem::size_of::<T>())
        };
        check("cuBLASLt descriptor", status)
    }

    /// Sets the scale pointers of a and b, swapped as a and b are.
    fn scale_from(&self, [a, b]: [u64; 2]) -> Result<()> {
        self.set(Attribute::CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &b)?;
        self.set(Attribute::CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &a)
    }

    /// Sets the pointers that are attributes of the matmul descriptor.
    fn point(&self, at: &GemmPointers) -> Result<()> {
        if self.scaled {
            self.scale_from(at.scales)?;
        }
        if matches!(self.epilogue, Epilogue::Bias | Epilogue::Gelu { bias: true, .. } | Epilogue::BiasGrad) {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &at.bias)?;
        }
        if matches!(self.epilogue, Epilogue::Gelu { .. }) {
            self.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &at.aux)?;
        }
        Ok(())
    }
}

impl CublasLt {
    pub(super) fn open() -> Result<CublasLt> {
        if !NvidiaLibrary::CublasLt.open() {
            return Err(Error::NoCuda(format!(
                "cuBLASLt, which multiplies matrices, was not found (looked for {})",
                NvidiaLibrary::CublasLt.file()
            )));
        }
        let mut handle = std::ptr::null_mut();
        // SAFETY: the library is loaded; a pointer for the handle; the context is current.
        check("open cuBLASLt", unsafe { sys::cublasLtCreate(&mut handle) })?;
        Ok(CublasLt { handle })
    }

    /// Version, as 130000.
    pub(super) fn version(&self) -> usize {
        // SAFETY: the library is loaded.
        unsafe { sys::cublasLtGetVersion() }
    }

    /// Deterministic algorithms for a GEMM, the heuristics' favourite first; empty where there is none.
    pub(super) fn algorithms(&self, key: &GemmKey, desc: &MatmulDesc) -> Result<Vec<Algorithm>> {
        const OP: &str = "cuBLASLt heuristic";
        let mut preference = std::ptr::null_mut();
        // SAFETY: a pointer for the handle; then attributes of the sizes the library documents, and an array for the
        // results.
        unsafe {
            check(OP, sys::cublasLtMatmulPreferenceCreate(&mut preference))?;
            let prefer = |which, at: *const c_void, bytes| {
                check(OP, sys::cublasLtMatmulPreferenceSetAttribute(preference, which, at, bytes))
            };
            let most = std::ptr::from_ref(&WORKSPACE).cast();
            prefer(Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, most, 8)?;
            // Split-k partial sums are reduced in f32, not in the result's dtype, and in a fixed order, not by
            // atomics.
            let scheme = Reduction::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
            let scheme = std::ptr::from_ref(&scheme).cast();
            prefer(Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, scheme, 4)?;
            let [a, b, c, _] = key.align;
            for (which, align) in [
                (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b),
                (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a),
                (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c),
                (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, c),
            ] {
                prefer(which, std::ptr::from_ref(&(align as u32)).cast(), 4)?;
            }
            let mut found: [sys::cublasLtMatmulHeuristicResult_t; MAX_CANDIDATES] = std::mem::zeroed();
            let mut count = 0;
            let [la, lb, lc] = desc.layouts;
            let status = sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                desc.operation,
                la,
                lb,
                lc,
                lc,
                preference,
                MAX_CANDIDATES as i32,
                found.as_mut_ptr(),
                &mut count,
            );
            let _ = sys::cublasLtMatmulPreferenceDestroy(preference);
            let count =
                if status == cublasStatus_t::CUBLAS_STATUS_SUCCESS { count.max(0) as usize } else { 0 };
            let usable = found.iter().take(count).filter(|f| {
                f.state == cublasStatus_t::CUBLAS_STATUS_SUCCESS
                    && f.workspaceSize <= WORKSPACE
                    && is_deterministic(&f.algo)
            });
            Ok(usable.map(|f| Algorithm { code: f.algo, workspace: f.workspaceSize }).collect())
        }
    }

    /// The algorithm with that code, if it can compute the GEMM and is deterministic.
    pub(super) fn algorithm(&self, desc: &MatmulDesc, code: [u64; 8]) -> Option<Algorithm> {
        let code = sys::cublasLtMatmulAlgo_t { data: code };
        let [la, lb, lc] = desc.layouts;
        // SAFETY: live handles, a code, which the library checks, and a pointer for the result.
        let (status, found) = unsafe {
            let mut found: sys::cublasLtMatmulHeuristicResult_t = std::mem::zeroed();
            let status =
                sys::cublasLtMatmulAlgoCheck(self.handle, desc.operation, la, lb, lc, lc, &code, &mut found);
            (status, found)
        };
        let fits = status == cublasStatus_t::CUBLAS_STATUS_SUCCESS && found.workspaceSize <= WORKSPACE;
        (fits && is_deterministic(&code)).then_some(Algorithm { code, workspace: found.workspaceSize })
    }

    /// Launches a GEMM.
    pub(super) fn run(
        &self,
        l: &Launch,
        desc: &MatmulDesc,
        algorithm: &Algorithm,
        at: &GemmPointers,
        accumulate: bool,
    ) -> Result<()> {
        let on_host = [1f32, if accumulate { 1f32 } else { 0f32 }];
        let factors = if at.factors == 0 { on_host.as_ptr() } else { at.factors as *const f32 };
        let (alpha, beta) = (factors, factors.wrapping_add(1));
        let [la, lb, lc] = desc.layouts;
        let stream = l.cuda_stream()?;
        let _guard = desc.lock.lock().unwrap_or_else(PoisonError::into_inner);
        desc.point(at)?;
        // SAFETY: live handles; addresses of the launch's arguments, of the sizes that the descriptors were created
        // for.
        let status = unsafe {
            sys::cublasLtMatmul(
                self.handle,
                desc.operation,
                alpha.cast(),
                at.b as *const c_void,
                la,
                at.a as *const c_void,
                lb,
                beta.cast(),
                at.c as *const c_void,
                lc,
                at.c as *mut c_void,
                lc,
                &algorithm.code,
                at.workspace as *mut c_void,
                algorithm.workspace,
                stream.cast(),
            )
        };
        check("gemm", status)
    }
}

/// Whether split-k partial sums, if any, are reduced in a fixed order.
fn is_deterministic(code: &sys::cublasLtMatmulAlgo_t) -> bool {
    let (mut scheme, mut written) = (0u32, 0);
    let at = std::ptr::from_mut(&mut scheme).cast();
    let which = Config::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME;
    // SAFETY: a pointer to an integer of the documented size.
    let status = unsafe { sys::cublasLtMatmulAlgoConfigGetAttribute(code, which, at, 4, &mut written) };
    let fine = [Reduction::CUBLASLT_REDUCTION_SCHEME_NONE, Reduction::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE];
    status == cublasStatus_t::CUBLAS_STATUS_SUCCESS && fine.iter().any(|f| *f as u32 == scheme)
}
