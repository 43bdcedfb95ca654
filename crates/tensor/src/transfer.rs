//! Transfers between host and device, copies, and zero fills.

use crate::{Category, DType, Element, Result, Stream, Tensor, read, shape_error, write};

impl Stream {
    /// Copies host values into a new tensor.
    pub fn upload<T: Element>(&self, values: &[T], shape: &[usize], category: Category) -> Result<Tensor> {
        let t = Tensor::empty(self, shape, T::DTYPE, category)?;
        self.upload_into(&t, values)?;
        Ok(t)
    }

    /// [`Stream::upload`] of values that are the same in every step. A graph being captured keeps them, so this is allowed
    /// in a capture.
    pub fn constant<T: Element>(&self, values: &[T], shape: &[usize], category: Category) -> Result<Tensor> {
        let t = Tensor::empty(self, shape, T::DTYPE, category)?;
        if !self.is_capturing() {
            self.upload_into(&t, values)?;
            return Ok(t);
        }
        if t.numel() != values.len() {
            return shape_error("constant", format!("{} values into {t:?}", values.len()));
        }
        let args = [write(&t)];
        self.launch("constant", &args, |l| match l.cuda {
            None => Ok(()),
            // SAFETY: the argument is declared as written, contiguous, and as long as the values.
            Some(q) => unsafe {
                q.shared_context().upload_constant(q, bytemuck::cast_slice(values), l.address(0)?)
            },
        })?;
        Ok(t)
    }

    /// Copies host values into a contiguous tensor.
    pub fn upload_into<T: Element>(&self, t: &Tensor, values: &[T]) -> Result<()> {
        if !t.is_contiguous() || t.numel() != values.len() {
            return shape_error("upload", format!("{} values into {:?}", values.len(), t));
        }
        let args = [write(t)];
        self.launch("upload", &args, |l| match l.cuda {
            None => {
                l.slice_mut::<T>(0)?.copy_from_slice(values);
                Ok(())
            }
            // SAFETY: the argument is declared as written, contiguous, and as long as the values.
            Some(q) => unsafe { q.context().upload(q, bytemuck::cast_slice(values), l.address(0)?) },
        })
    }

    /// Copies a contiguous tensor to another of the same dtype and size on this device or in its host memory. The two must
    /// not overlap.
    pub fn copy(&self, from: &Tensor, to: &Tensor) -> Result<()> {
        if from.dtype() != to.dtype() || from.numel() != to.numel() {
            return shape_error("copy", format!("{from:?} into {to:?}"));
        }
        let (from, to) = (from.as_bytes()?, to.as_bytes()?);
        let name = match (from.is_on_host(), to.is_on_host()) {
            (false, true) => "copy to host",
            (true, false) => "copy from host",
            _ => "copy",
        };
        if from.is_on_host() || to.is_on_host() {
            self.device().inner.host_faults.check_copy(name)?;
        }
        self.launch(name, &[read(&from), write(&to)], |l| match l.cuda {
            None => {
                l.slice_mut::<u8>(1)?.copy_from_slice(l.slice::<u8>(0)?);
                Ok(())
            }
            // SAFETY: both are arguments of that many bytes, the second is declared as written, and they do not
            // overlap.
            Some(cuda) => unsafe {
                cuda.context().copy(cuda, name, (l.address(0)?, l.address(1)?), to.numel())
            },
        })
    }

    /// Copies a tensor to the host in row-major order, whatever its strides. Blocks until it is there.
    pub fn download<T: Element>(&self, t: &Tensor) -> Result<Vec<T>> {
        if self.device().is_meta() {
            return Ok(vec![T::zeroed(); t.numel()]);
        }
        let args = [read(t)];
        let mut out = Vec::with_capacity(t.numel());
        self.launch("download", &args, |l| {
            let fetched;
            let data = match l.cuda {
                None => l.slice::<T>(0)?,
                Some(cuda) => {
                    let mut host = vec![T::zeroed(); t.span()];
                    // SAFETY: covers the argument from its first to its last element, which `address` checked.
                    unsafe {
                        cuda.context().download(cuda, l.address(0)?, bytemuck::cast_slice_mut(&mut host))?
                    };
                    fetched = host;
                    &fetched
                }
            };
            gather(data, t.shape(), t.strides(), &mut out);
            Ok(())
        })?;
        Ok(out)
    }

    /// Allocates a tensor of zeros.
    pub fn zeros(&self, shape: &[usize], dtype: DType, category: Category) -> Result<Tensor> {
        let t = Tensor::empty(self, shape, dtype, category)?;
        self.zero(&t)?;
        Ok(t)
    }

    /// Sets all bytes of a contiguous tensor to zero.
    pub fn zero(&self, t: &Tensor) -> Result<()> {
        let bytes = t.as_bytes()?;
        if t.is_on_host() && self.cuda().is_some() {
            return self.zero_host(&bytes);
        }
        self.launch("zero", &[write(&bytes)], |l| match l.cuda {
            None => {
                l.slice_mut::<u8>(0)?.fill(0);
                Ok(())
            }
            // SAFETY: the argument is declared as written and has that many bytes.
            Some(cuda) => unsafe { cuda.context().zero(cuda, l.address(0)?, bytes.numel()) },
        })
    }
}

/// Bytes of zeros copied to host memory at a time.
const ZEROS: usize = 64 << 20;

impl Stream {
    /// A memset writes device memory; host memory is filled by copies.
    fn zero_host(&self, bytes: &Tensor) -> Result<()> {
        let zeros = self.zeros(&[bytes.numel().min(ZEROS)], DType::U8, Category::Workspace)?;
        for start in (0..bytes.numel()).step_by(ZEROS) {
            let part = bytes.narrow(0, start, ZEROS.min(bytes.numel() - start))?;
            self.copy(&zeros.narrow(0, 0, part.numel())?, &part)?;
        }
        Ok(())
    }
}

fn gather<T: Copy>(data: &[T], shape: &[usize], strides: &[usize], out: &mut Vec<T>) {
    match (shape, strides) {
        ([n], [1]) => out.extend_from_slice(&data[..*n]),
        ([n, rest @ ..], [s, inner @ ..]) => {
            (0..*n).filter(|_| !rest.contains(&0)).for_each(|i| gather(&data[i * s..], rest, inner, out));
        }
        _ => out.push(data[0]),
    }
}
