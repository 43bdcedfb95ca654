//! Matrix products through cuBLASLt.
//!
//! The library thinks in columns: our row-major `c [m, n]` is its column-major `cᵀ [n, m]`, and
//! `cᵀ = op(b)ᵀ·op(a)ᵀ`. So the factors change places, nothing is moved, and a bias over our columns is its bias
//! over rows. The first algorithm its heuristics name is taken and kept for the shape: no timing, so that two
//! runs choose alike. What it refuses (odd alignments, mixed types), or rounds twice, our own plain kernel does.

use super::CudaKernels;
use super::libraries::NvidiaLibrary;
use crate::{Gemm, GemmKernels, GemmSizes};
use cudarc::cublaslt::sys::{
    self, cublasLtMatmulDescAttributes_t as Attribute, cublasLtMatmulPreferenceAttributes_t as Preference,
    cublasStatus_t,
};
use ferrotron_tensor::{Category, DType, Error, Launch, Result, Stream, Tensor, read, write};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

/// The most scratch memory a product may use; what NVIDIA advises for Hopper.
const WORKSPACE: usize = 32 << 20;

/// The library and the plans made so far.
pub(super) struct Blas {
    handle: sys::cublasLtHandle_t,
    plans: Mutex<HashMap<Key, Option<Plan>>>,
}

// SAFETY: the handle may be used from any thread; plans are behind a lock.
unsafe impl Send for Blas {}
// SAFETY: as above.
unsafe impl Sync for Blas {}

/// What a plan depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    sizes: GemmSizes,
    trans: [bool; 2],
    types: [DType; 2],
    bias: bool,
    /// Alignment of a, b, c in bytes.
    align: [u32; 3],
}

/// Descriptors and algorithm of a product. Kept for the life of the process.
#[derive(Clone, Copy)]
struct Plan {
    operation: sys::cublasLtMatmulDesc_t,
    /// The library's A, B and C: our b, a and c.
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
    workspace: usize,
}

fn check(op: &'static str, status: cublasStatus_t) -> Result<()> {
    if status == cublasStatus_t::CUBLAS_STATUS_SUCCESS {
        return Ok(());
    }
    Err(Error::Cuda { op, what: format!("cuBLASLt: {status:?}") })
}

impl Blas {
    pub(super) fn open() -> Result<Blas> {
        if !NvidiaLibrary::CublasLt.open() {
            return Err(Error::NoCuda(format!(
                "cuBLASLt, which multiplies matrices, was not found (looked for {})",
                NvidiaLibrary::CublasLt.file()
            )));
        }
        let mut handle = std::ptr::null_mut();
        // SAFETY: the library is open; a place for the handle; the context is current.
        check("open cuBLASLt", unsafe { sys::cublasLtCreate(&mut handle) })?;
        Ok(Blas { handle, plans: Mutex::default() })
    }

    /// The plan of a product, or none where the library has no algorithm for it.
    fn plan(&self, key: Key) -> Result<Option<Plan>> {
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plan) = plans.get(&key) {
            return Ok(*plan);
        }
        // SAFETY: see `make`.
        let plan = unsafe { self.make(&key)? };
        plans.insert(key, plan);
        Ok(plan)
    }

    /// # Safety
    /// The library is open.
    unsafe fn make(&self, key: &Key) -> Result<Option<Plan>> {
        const OP: &str = "plan a product";
        let GemmSizes { m, n, k, lda, ldb, ldc } = key.sizes;
        let [trans_a, trans_b] = key.trans;
        let kind = |t: DType| match t {
            DType::BF16 => sys::cudaDataType_t::CUDA_R_16BF,
            _ => sys::cudaDataType_t::CUDA_R_32F,
        };
        let [input, output] = key.types.map(kind);
        // The factor as stored, seen by columns.
        let stored = |trans: bool, rows: usize, cols: usize| if trans { (cols, rows) } else { (rows, cols) };
        let layout = |kind, (rows, cols): (usize, usize), ld: usize| {
            let mut layout = std::ptr::null_mut();
            // SAFETY: a place for the handle.
            let status = unsafe {
                sys::cublasLtMatrixLayoutCreate(&mut layout, kind, rows as u64, cols as u64, ld as i64)
            };
            check(OP, status).map(|()| layout)
        };
        let layouts = [
            layout(input, stored(trans_b, n, k), ldb)?,
            layout(input, stored(trans_a, k, m), lda)?,
            layout(output, (n, m), ldc)?,
        ];
        let mut operation = std::ptr::null_mut();
        let mut preference = std::ptr::null_mut();
        // SAFETY: places for handles and results; attributes have the sizes the library documents.
        unsafe {
            // Sums in f32, and f32 products in f32: never TF32.
            let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
            check(
                OP,
                sys::cublasLtMatmulDescCreate(&mut operation, compute, sys::cudaDataType_t::CUDA_R_32F),
            )?;
            let set = |which, value: i32| {
                let at = std::ptr::from_ref(&value).cast::<c_void>();
                check(OP, sys::cublasLtMatmulDescSetAttribute(operation, which, at, 4))
            };
            // 0 as stored, 1 transposed.
            set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, i32::from(trans_b))?;
            set(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, i32::from(trans_a))?;
            if key.bias {
                let bias = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as i32;
                set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, bias)?;
                set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, input as i32)?;
            }
            check(OP, sys::cublasLtMatmulPreferenceCreate(&mut preference))?;
            let prefer = |which, at: *const c_void, bytes| {
                check(OP, sys::cublasLtMatmulPreferenceSetAttribute(preference, which, at, bytes))
            };
            let most = std::ptr::from_ref(&WORKSPACE).cast();
            prefer(Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, most, 8)?;
            // Parts of a sum are joined in f32, never in the type of the result.
            let scheme = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
            let scheme = std::ptr::from_ref(&scheme).cast();
            prefer(Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, scheme, 4)?;
            let [a, b, c] = key.align;
            for (which, align) in [
                (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b),
                (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a),
                (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c),
                (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, c),
            ] {
                prefer(which, std::ptr::from_ref(&align).cast(), 4)?;
            }
            let mut best: sys::cublasLtMatmulHeuristicResult_t = std::mem::zeroed();
            let mut found = 0;
            let [la, lb, lc] = layouts;
            let status = sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                operation,
                la,
                lb,
                lc,
                lc,
                preference,
                1,
                &mut best,
                &mut found,
            );
            let _ = sys::cublasLtMatmulPreferenceDestroy(preference);
            let usable = status == cublasStatus_t::CUBLAS_STATUS_SUCCESS && found > 0;
            Ok(usable.then_some(Plan {
                operation,
                layouts,
                algorithm: best.algo,
                workspace: best.workspaceSize,
            }))
        }
    }

    fn run(&self, l: &Launch, plan: &Plan, accumulate: bool, bias: bool, scratch: bool) -> Result<()> {
        const OP: &str = "gemm";
        let address = |i| l.address(i).map(|x| x as *mut c_void);
        let (a, b, c) = (address(0)?, address(1)?, address(2)?);
        let (alpha, beta) = (1f32, if accumulate { 1f32 } else { 0f32 });
        let workspace = if scratch { address(3 + usize::from(bias))? } else { std::ptr::null_mut() };
        let [la, lb, lc] = plan.layouts;
        // The bias pointer belongs to the shared descriptor: nobody else may use it meanwhile.
        let _alone = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: live handles; addresses of the launch's arguments, of the sizes the plan was made for.
        unsafe {
            if bias {
                let at = l.address(3)?;
                let which = Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
                let at = std::ptr::from_ref(&at).cast();
                check(OP, sys::cublasLtMatmulDescSetAttribute(plan.operation, which, at, 8))?;
            }
            let status = sys::cublasLtMatmul(
                self.handle,
                plan.operation,
                std::ptr::from_ref(&alpha).cast(),
                b,
                la,
                a,
                lb,
                std::ptr::from_ref(&beta).cast(),
                c,
                lc,
                c,
                lc,
                &plan.algorithm,
                workspace,
                plan.workspace,
                l.cuda_stream()?.cast(),
            );
            check(OP, status)
        }
    }
}

/// The largest power of two, up to 256, that divides the address of a tensor's first element.
fn alignment(l: &Launch, i: usize) -> Result<u32> {
    Ok(1 << l.address(i)?.trailing_zeros().min(8))
}

impl GemmKernels for CudaKernels {
    fn gemm(&self, s: &Stream, g: &Gemm) -> Result<()> {
        let sizes = g.sizes()?;
        let input = g.a.dtype();
        if !matches!(input, DType::F32 | DType::BF16) {
            return Err(Error::DType { op: "gemm", found: input, wanted: DType::BF16 });
        }
        if sizes.m == 0 || sizes.n == 0 {
            return Ok(());
        }
        let scratch = Tensor::empty(s, &[WORKSPACE], DType::U8, Category::Workspace)?;
        let mut args = vec![read(g.a), read(g.b), write(g.c)];
        args.extend(g.bias.map(read));
        args.push(write(&scratch));
        s.launch(g.name(), &args, |l| {
            let align = [alignment(l, 0)?, alignment(l, 1)?, alignment(l, 2)?];
            let bias = g.bias.is_some();
            let types = [input, g.c.dtype()];
            let key = Key { sizes, trans: [g.trans_a, g.trans_b], types, bias, align };
            // A bf16 result is rounded once here. The library rounds the product before it adds what is there, and
            // before it adds a bias where rows are off 16 bytes: those are ours.
            let rows = [(sizes.lda, input), (sizes.ldb, input), (sizes.ldc, g.c.dtype())];
            let odd = rows.iter().any(|(ld, t)| !(ld * t.size()).is_multiple_of(16));
            let rough = || Ok::<_, Error>(odd || align.iter().any(|a| *a < 16) || alignment(l, 3)? < 16);
            let onto = g.accumulate && (bias || g.c.dtype() == DType::BF16);
            let ours = sizes.k == 0 || onto || (bias && rough()?);
            let plan = if ours { None } else { self.blas.plan(key)? };
            match plan {
                Some(plan) => self.blas.run(l, &plan, g.accumulate, bias, plan.workspace > 0),
                None => self.product(l, g, &sizes),
            }
        })
    }
}
