//! Kernels of Muon.

use super::args::kernel_args;
use super::grid::{LaunchList, blocks, line};
use super::multi_tensor::{LIST, TensorEntry, UPDATES};
use super::sources::Variant;
use super::{CudaKernels, Kernel};
use crate::checks::{dtypes, same_contiguous};
use crate::muon::{
    check_apply, check_combine, check_mirror, check_momentum, check_normalize, check_normuon, normuon_lines,
};
use crate::optimizer::check_scalars;
use crate::{AdaptiveScale, ApplyUpdate, MomentumUpdate, MuonKernels, MuonMomentum, WeightDecay};
use ferrotron_tensor::{Arg, Category, DType, Result, Stream, Tensor, read, write};

const THREADS: u32 = 256;
/// Elements of a block of one matrix, as in muon.cu.
const BLOCK: usize = 4 * THREADS as usize;
/// Rows and columns that a block mirrors, as in muon.cu.
const TILE: usize = 32;

kernel_args! {
    header "args/muon.cuh", includes ["args/multi_tensor.cuh"];

    /// Momentum over a list of tensors: `first` is the momentum, `second` the update, `master` the weights of L2
    /// regularization where there is one.
    struct MomentumArgs {
        list: [TensorEntry; LIST],
        scalars: u64,
        start: [u32; LIST],
        count: u32,
        momentum: f32,
        /// 1 - momentum.
        fresh: f32,
        nesterov: u32,
    }

    /// The step over a list of tensors, whose updates are in the place of gradients.
    struct ApplyArgs {
        list: [TensorEntry; LIST],
        scalars: u64,
        start: [u32; LIST],
        count: u32,
        /// 0 decoupled, 1 independent, 2 inside the gradient.
        decay: u32,
    }

    /// An operation on n elements.
    struct MatrixArgs {
        x: u64,
        /// Second operand, or 0.
        y: u64,
        /// The result; x where it is in place.
        out: u64,
        /// f64 `[1]`: the squared norm to divide by, or 0.
        square: u64,
        n: i64,
        alpha: f32,
        /// Factor of y, or the least norm.
        beta: f32,
    }

    /// Symmetric matrices of `side` rows to complete.
    struct MirrorArgs {
        x: u64,
        side: i64,
        from: i64,
    }

    /// Adaptive scaling of an orthogonalized f32 matrix.
    struct AdaptiveArgs {
        scalars: u64,
        o: u64,
        v: u64,
        /// f64, one for each line of NorMuon: sum of squares, then factor.
        sums: u64,
        rows: i64,
        cols: i64,
        beta2: f32,
        /// 1 - beta2.
        fresh: f32,
        eps: f32,
        pad: u32,
    }
}

fn kernel(name: &'static str) -> Kernel {
    Kernel::new("muon", name)
}

impl MuonKernels for CudaKernels {
    fn muon_momentum(
        &self,
        s: &Stream,
        m: MuonMomentum,
        scalars: &Tensor,
        list: &[MomentumUpdate],
    ) -> Result<()> {
        const OP: &str = "muon_momentum";
        check_scalars(OP, scalars)?;
        list.iter().try_for_each(|u| check_momentum(OP, u))?;
        for (dtype, name) in
            [(DType::F32, kernel("muon_momentum_f32")), (DType::BF16, kernel("muon_momentum_bf16"))]
        {
            let alike: Vec<_> =
                list.iter().filter(|u| u.momentum.dtype() == dtype && u.grad.numel() > 0).collect();
            for portion in alike.chunks(LIST) {
                let mut args: Vec<Arg> = vec![read(scalars)];
                for u in portion {
                    args.extend([read(u.grad), write(u.momentum), write(u.update)]);
                    args.extend(u.l2.map(read));
                }
                s.launch(OP, &args, |l| {
                    let (mut at, mut p) = (1, LaunchList::new());
                    for u in portion {
                        let n = u.grad.numel();
                        let entry = TensorEntry {
                            grad: l.address(at)?,
                            first: l.address(at + 1)?,
                            second: l.address(at + 2)?,
                            master: if u.l2.is_some() { l.address(at + 3)? } else { 0 },
                            n: n as i64,
                            wd_mult: u.wd_mult,
                            ..TensorEntry::default()
                        };
                        at += 3 + usize::from(u.l2.is_some());
                        p.push(OP, entry, n, UPDATES)?;
                    }
                    let args = MomentumArgs {
                        list: p.list,
                        scalars: l.address(0)?,
                        start: p.start,
                        count: p.count,
                        momentum: m.momentum,
                        fresh: 1.0 - m.momentum,
                        nesterov: m.nesterov.into(),
                    };
                    self.launch_kernel(l, name, line(p.blocks, THREADS), &args)
                })?;
            }
        }
        Ok(())
    }

    fn apply_update(
        &self,
        s: &Stream,
        decay: WeightDecay,
        scalars: &Tensor,
        list: &[ApplyUpdate],
    ) -> Result<()> {
        const OP: &str = "apply_update";
        check_scalars(OP, scalars)?;
        list.iter().try_for_each(|u| check_apply(OP, u))?;
        let storage = |u: &ApplyUpdate| {
            (u.master.dtype() == DType::I16, u.weight.is_some_and(|w| w.dtype() == DType::F16))
        };
        for kind in [(false, false), (true, false), (false, true)] {
            let (split, half) = kind;
            let name = if split { kernel("apply_update_split") } else { kernel("apply_update_f32") };
            let name = if half { Kernel { variant: Variant::F16, ..name } } else { name };
            let alike: Vec<_> = list.iter().filter(|u| storage(u) == kind && u.update.numel() > 0).collect();
            for portion in alike.chunks(LIST) {
                let mut args: Vec<Arg> = vec![read(scalars)];
                for u in portion {
                    args.extend([write(u.master), read(u.update)]);
                    args.extend(u.weight.map(write));
                }
                s.launch(OP, &args, |l| {
                    let (mut at, mut p) = (1, LaunchList::new());
                    for u in portion {
                        let n = u.update.numel();
                        let entry = TensorEntry {
                            master: l.address(at)?,
                            grad: l.address(at + 1)?,
                            weight: if u.weight.is_some() { l.address(at + 2)? } else { 0 },
                            n: n as i64,
                            lr_mult: u.lr_mult,
                            wd_mult: u.wd_mult,
                            ..TensorEntry::default()
                        };
                        at += 2 + usize::from(u.weight.is_some());
                        p.push(OP, entry, n, UPDATES)?;
                    }
                    let decay = match decay {
                        WeightDecay::Decoupled => 0,
                        WeightDecay::Independent => 1,
                        WeightDecay::L2 => 2,
                    };
                    let args = ApplyArgs {
                        list: p.list,
                        scalars: l.address(0)?,
                        start: p.start,
                        count: p.count,
                        decay,
                    };
                    self.launch_kernel(l, name, line(p.blocks, THREADS), &args)
                })?;
            }
        }
        Ok(())
    }

    fn normalize(&self, s: &Stream, x: &Tensor, square: &Tensor, eps: f32, out: &Tensor) -> Result<()> {
        const OP: &str = "normalize";
        check_normalize(OP, x, square, out)?;
        let name = if out.dtype() == DType::F32 { "normalize_f32" } else { "normalize_bf16" };
        s.launch(OP, &[read(x), read(square), write(out)], |l| {
            let (n, [x, square, out]) = (x.numel(), [l.address(0)?, l.address(1)?, l.address(2)?]);
            let args = MatrixArgs { x, y: 0, out, square, n: n as i64, alpha: 1.0, beta: eps };
            self.launch_kernel(l, kernel(name), line(blocks(OP, n, BLOCK)?, THREADS), &args)
        })
    }

    fn combine(&self, s: &Stream, factors: [f32; 2], x: &Tensor, y: &Tensor) -> Result<()> {
        const OP: &str = "combine";
        check_combine(OP, x, y)?;
        let name = if x.dtype() == DType::F32 { "combine_f32" } else { "combine_bf16" };
        s.launch(OP, &[write(x), read(y)], |l| {
            let (n, [x, y], [alpha, beta]) = (x.numel(), [l.address(0)?, l.address(1)?], factors);
            let args = MatrixArgs { x, y, out: x, square: 0, n: n as i64, alpha, beta };
            self.launch_kernel(l, kernel(name), line(blocks(OP, n, BLOCK)?, THREADS), &args)
        })
    }

    fn mirror(&self, s: &Stream, x: &Tensor, from: usize) -> Result<()> {
        const OP: &str = "mirror";
        let [count, side] = check_mirror(OP, x, from)?;
        let name = if x.dtype() == DType::F32 { "mirror_f32" } else { "mirror_bf16" };
        let tiles = count * from.div_ceil(TILE) * (side - from).div_ceil(TILE);
        if tiles == 0 {
            return Ok(());
        }
        s.launch(OP, &[write(x)], |l| {
            let args = MirrorArgs { x: l.address(0)?, side: side as i64, from: from as i64 };
            self.launch_kernel(l, kernel(name), line(blocks(OP, tiles, 1)?, THREADS), &args)
        })
    }

    fn adamuon(&self, s: &Stream, a: AdaptiveScale, scalars: &Tensor, o: &Tensor, v: &Tensor) -> Result<()> {
        const OP: &str = "adamuon";
        check_scalars(OP, scalars)?;
        same_contiguous(OP, &[o, v])?;
        dtypes(OP, DType::F32, &[o, v])?;
        s.launch(OP, &[read(scalars), write(o), write(v)], |l| {
            let n = o.numel();
            let at = [l.address(0)?, l.address(1)?, l.address(2)?, 0];
            let grid = line(blocks(OP, n, BLOCK)?, THREADS);
            self.launch_kernel(l, kernel("adamuon"), grid, &adaptive(a, at, [1, n]))
        })
    }

    fn normuon(&self, s: &Stream, a: AdaptiveScale, scalars: &Tensor, o: &Tensor, v: &Tensor) -> Result<()> {
        const OP: &str = "normuon";
        check_scalars(OP, scalars)?;
        let [rows, cols] = check_normuon(OP, o, v)?;
        let sums = Tensor::empty(s, &[normuon_lines([rows, cols])], DType::F64, Category::Workspace)?;
        s.launch(OP, &[read(scalars), write(o), write(v), write(&sums)], |l| {
            let at = [l.address(0)?, l.address(1)?, l.address(2)?, l.address(3)?];
            let args = adaptive(a, at, [rows, cols]);
            let n = rows * cols;
            if n == 0 {
                return Ok(());
            }
            match rows >= cols {
                true => {
                    self.launch_kernel(l, kernel("normuon_rows"), line(blocks(OP, rows, 1)?, THREADS), &args)?
                }
                false => {
                    let grid = line(blocks(OP, cols, 32)?, THREADS);
                    self.launch_kernel(l, kernel("normuon_columns"), grid, &args)?
                }
            }
            self.launch_kernel(l, kernel("normuon_factors"), line(1, 1024), &args)?;
            let grid = line(blocks(OP, n, THREADS as usize)?, THREADS);
            self.launch_kernel(l, kernel("normuon_scale"), grid, &args)
        })
    }
}

fn adaptive(a: AdaptiveScale, [scalars, o, v, sums]: [u64; 4], [rows, cols]: [usize; 2]) -> AdaptiveArgs {
    AdaptiveArgs {
        scalars,
        o,
        v,
        sums,
        rows: rows as i64,
        cols: cols as i64,
        beta2: a.beta2,
        fresh: 1.0 - a.beta2,
        eps: a.eps,
        pad: 0,
    }
}
