//! Tensors: cheap handles to strided views of shared buffers.

use crate::buffer::Buffer;
use crate::shape::Dims;
use crate::{Category, DType, Device, Result, Stream, shape_error};
use std::sync::Arc;

/// A strided view of a shared buffer. Clones and slices share memory; it is accessed only through [`Stream::launch`].
#[derive(Clone)]
pub struct Tensor {
    pub(crate) buffer: Arc<Buffer>,
    /// In elements.
    pub(crate) offset: usize,
    shape: Dims,
    strides: Dims,
    dtype: DType,
}

impl Tensor {
    /// Allocates a tensor on `stream` with unspecified contents. Freed memory is reused on the same stream, so the
    /// last use of the tensor must be on `stream`, or on a stream that `stream` has waited for.
    pub fn empty(stream: &Stream, shape: &[usize], dtype: DType, category: Category) -> Result<Tensor> {
        let (shape, bytes) = sized(shape, dtype)?;
        let buffer = Buffer::new(stream, bytes, category)?;
        Ok(Tensor { buffer: Arc::new(buffer), offset: 0, shape, strides: shape.row_major(), dtype })
    }

    /// [`Tensor::empty`] in host memory, pinned for a GPU, whose streams copy to and from it with [`Stream::copy`] beside
    /// computation. The rule of reuse is the same. It has an account and a budget of its own.
    pub fn host(stream: &Stream, shape: &[usize], dtype: DType) -> Result<Tensor> {
        let (shape, bytes) = sized(shape, dtype)?;
        let buffer = Buffer::on_host(stream, bytes)?;
        Ok(Tensor { buffer: Arc::new(buffer), offset: 0, shape, strides: shape.row_major(), dtype })
    }

    /// True for a tensor made by [`Tensor::host`].
    pub fn is_on_host(&self) -> bool {
        self.buffer.is_on_host()
    }

    /// All memory of the allocation, as bytes.
    pub fn allocation(&self) -> Result<Tensor> {
        let shape = Dims::new(&[self.buffer.bytes])?;
        let buffer = self.buffer.clone();
        Ok(Tensor { buffer, offset: 0, shape, strides: shape.row_major(), dtype: DType::U8 })
    }

    /// The same view of another allocation of the same size, which holds the same bytes.
    pub fn view_in(&self, allocation: &Tensor) -> Result<Tensor> {
        if allocation.buffer.bytes != self.buffer.bytes {
            let [mine, other] = [self, allocation].map(|t| t.buffer.bytes);
            return shape_error("view_in", format!("an allocation of {mine} bytes and one of {other}"));
        }
        Ok(Tensor { buffer: allocation.buffer.clone(), ..self.clone() })
    }

    /// Sizes of the axes.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Strides of the axes, in elements.
    pub fn strides(&self) -> &[usize] {
        &self.strides
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape.product()
    }

    /// Size of the elements in bytes.
    pub fn bytes(&self) -> usize {
        self.numel() * self.dtype.size()
    }

    /// Number of axes.
    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// The device it is on.
    pub fn device(&self) -> Device {
        Device { inner: self.buffer.device.clone() }
    }

    /// Identifies the allocation: all views of one buffer have the same id.
    pub fn allocation_id(&self) -> u64 {
        self.buffer.id
    }

    /// Size of the allocation that this tensor keeps alive, in bytes.
    pub fn allocation_bytes(&self) -> usize {
        self.buffer.bytes
    }

    /// Alignment of the first element in bytes: the largest power of two up to 256 that divides its address.
    pub fn alignment(&self) -> usize {
        let address = self.buffer.address() + self.byte_range().start;
        1 << address.trailing_zeros().min(8)
    }

    /// True if both cover exactly the same bytes of one allocation.
    pub fn same_memory(&self, other: &Tensor) -> bool {
        Arc::ptr_eq(&self.buffer, &other.buffer) && self.byte_range() == other.byte_range()
    }

    /// True if the two may share an element.
    pub fn overlaps(&self, other: &Tensor) -> bool {
        Arc::ptr_eq(&self.buffer, &other.buffer) && !self.disjoint(other)
    }

    /// True if the elements are contiguous in row-major order.
    pub fn is_contiguous(&self) -> bool {
        let want = self.shape.row_major();
        self.numel() == 0 || (0..self.rank()).all(|a| self.shape[a] == 1 || self.strides[a] == want[a])
    }

    /// Slice `start..start + len` of one axis.
    pub fn narrow(&self, axis: usize, start: usize, len: usize) -> Result<Tensor> {
        if axis >= self.rank() || start.checked_add(len).is_none_or(|end| end > self.shape[axis]) {
            return shape_error("narrow", format!("{start}+{len} on axis {axis} of {:?}", self.shape));
        }
        let mut t = self.clone();
        t.shape[axis] = len;
        // What has no element has no place: a part of an empty tensor must not begin past its buffer.
        if t.numel() > 0 {
            t.offset += start * self.strides[axis];
        }
        Ok(t)
    }

    /// Entry `index` of one axis, which is removed.
    pub fn select(&self, axis: usize, index: usize) -> Result<Tensor> {
        let mut t = self.narrow(axis, index, 1)?;
        (t.shape, t.strides) = (t.shape.remove(axis), t.strides.remove(axis));
        Ok(t)
    }

    /// The same elements under another shape, without a copy. Each new axis must split one old axis, or merge old
    /// axes that are contiguous with each other.
    pub fn view(&self, shape: &[usize]) -> Result<Tensor> {
        let new = Dims::new(shape)?;
        if new.product() != self.numel() {
            return shape_error(
                "view",
                format!("{:?} and {new:?} have different numbers of elements", self.shape),
            );
        }
        let strides = if self.is_contiguous() {
            Some(new.row_major())
        } else {
            restride(&self.shape, &self.strides, &new)
        };
        match strides {
            Some(strides) => Ok(Tensor { shape: new, strides, ..self.clone() }),
            None => shape_error(
                "view",
                format!(
                    "{:?} with strides {:?} cannot be viewed as {new:?}; copy it first",
                    self.shape, self.strides
                ),
            ),
        }
    }

    /// Swaps two axes, without a copy.
    pub fn transpose(&self, a: usize, b: usize) -> Result<Tensor> {
        if a.max(b) >= self.rank() {
            return shape_error("transpose", format!("axes {a}, {b} of {:?}", self.shape));
        }
        let mut t = self.clone();
        t.shape.swap(a, b);
        t.strides.swap(a, b);
        Ok(t)
    }

    /// The memory of a contiguous tensor as a flat u8 tensor.
    pub fn as_bytes(&self) -> Result<Tensor> {
        if !self.is_contiguous() {
            return shape_error("as_bytes", format!("{:?} is not contiguous", self.shape));
        }
        let shape = Dims::new(&[self.bytes()])?;
        let offset = self.offset * self.dtype.size();
        Ok(Tensor {
            offset,
            shape,
            strides: shape.row_major(),
            dtype: DType::U8,
            buffer: self.buffer.clone(),
        })
    }

    /// The memory of a contiguous tensor as a flat i32 tensor; fails unless start and size are multiples of 4 bytes.
    pub fn as_i32_words(&self) -> Result<Tensor> {
        let bytes = self.as_bytes()?;
        if !bytes.offset.is_multiple_of(4) || !bytes.numel().is_multiple_of(4) {
            return shape_error(
                "as_i32_words",
                format!("{:?} of {} does not start and end at multiples of 4 bytes", self.shape, self.dtype),
            );
        }
        let shape = Dims::new(&[bytes.numel() / 4])?;
        Ok(Tensor {
            offset: bytes.offset / 4,
            shape,
            strides: shape.row_major(),
            dtype: DType::I32,
            buffer: bytes.buffer,
        })
    }

    /// Contiguous bytes as a flat tensor of `dtype`; fails unless start and size are multiples of its size.
    pub fn with_dtype(&self, dtype: DType) -> Result<Tensor> {
        let (bytes, size) = (self.as_bytes()?, dtype.size());
        if !bytes.offset.is_multiple_of(size) || !bytes.numel().is_multiple_of(size) {
            let what = format!("{:?} does not start and end at multiples of {size} bytes", self.shape);
            return shape_error("with_dtype", what);
        }
        let shape = Dims::new(&[bytes.numel() / size])?;
        let strides = shape.row_major();
        Ok(Tensor { offset: bytes.offset / size, shape, strides, dtype, buffer: bytes.buffer })
    }

    /// The same memory reinterpreted as another element type of the same size.
    pub fn view_dtype(&self, dtype: DType) -> Result<Tensor> {
        if dtype.size() != self.dtype.size() {
            return shape_error("view_dtype", format!("{} and {dtype} have different sizes", self.dtype));
        }
        Ok(Tensor { dtype, ..self.clone() })
    }

    /// Number of elements from the first to the last one touched, including gaps.
    pub(crate) fn span(&self) -> usize {
        if self.numel() == 0 {
            return 0;
        }
        1 + self.shape.iter().zip(self.strides.iter()).map(|(n, s)| (n - 1) * s).sum::<usize>()
    }

    /// Byte range of the buffer from the first to the last element touched.
    pub(crate) fn byte_range(&self) -> std::ops::Range<usize> {
        let size = self.dtype.size();
        self.offset * size..(self.offset + self.span()) * size
    }

    /// True if two views of one buffer have no element in common. Exact for column slices of one matrix and heads of
    /// one projection, with any number of leading axes; conservative otherwise.
    pub(crate) fn disjoint(&self, other: &Tensor) -> bool {
        let (a, b) = (self.byte_range(), other.byte_range());
        if a.is_empty() || b.is_empty() || a.end <= b.start || b.end <= a.start {
            return true;
        }
        // Modulo a stride that divides all larger strides, each view covers one range; disjoint ranges mean disjoint
        // views.
        self.dtype == other.dtype
            && self.strides.iter().chain(other.strides.iter()).any(|step| {
                match (self.residues(*step), other.residues(*step)) {
                    (Some(x), Some(y)) => x.end <= y.start || y.end <= x.start,
                    _ => false,
                }
            })
    }

    /// The offsets of all elements modulo `step`, if they form a range that does not wrap around.
    fn residues(&self, step: usize) -> Option<std::ops::Range<usize>> {
        let axes = || self.shape.iter().zip(self.strides.iter()).filter(|(n, _)| **n > 1);
        if step == 0 || axes().any(|(_, s)| *s >= step && s % step != 0) {
            return None;
        }
        let width = 1 + axes().filter(|(_, s)| **s < step).map(|(n, s)| (n - 1) * s).sum::<usize>();
        let start = self.offset % step;
        (start + width <= step).then_some(start..start + width)
    }
}

/// The shape, and its size in bytes.
fn sized(shape: &[usize], dtype: DType) -> Result<(Dims, usize)> {
    let shape = Dims::new(shape)?;
    let bytes = shape.iter().try_fold(dtype.size(), |n, d| n.checked_mul(*d));
    match bytes.filter(|b| *b <= isize::MAX as usize) {
        Some(bytes) => Ok((shape, bytes)),
        None => shape_error("allocate", format!("{shape:?} {dtype} exceeds the address space")),
    }
}

/// Strides that view (shape, strides) as `new`, if groups of axes with equal products can be matched.
fn restride(shape: &Dims, strides: &Dims, new: &Dims) -> Option<Dims> {
    let mut out = *new;
    // Axes of size one have no meaningful stride.
    let old: Vec<(usize, usize)> =
        shape.iter().copied().zip(strides.iter().copied()).filter(|(n, _)| *n != 1).collect();
    let (mut i, mut j) = (0, 0);
    while i < old.len() {
        // The shortest runs of old and new axes with equal products.
        let (mut p, mut q, i0, j0) = (old[i].0, 1, i, j);
        while p != q {
            if q < p {
                q *= *new.get(j)?;
                j += 1;
            } else {
                i += 1;
                p *= old.get(i)?.0;
            }
        }
        if (i0..i).any(|k| old[k].1 != old[k + 1].0 * old[k + 1].1) {
            return None;
        }
        let mut step = old[i].1;
        for k in (j0..j).rev() {
            out[k] = step;
            step *= new[k];
        }
        i += 1;
    }
    for k in j..new.len() {
        out[k] = 1;
    }
    Some(out)
}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tensor({} {:?})", self.dtype, self.shape)
    }
}
