//! Shapes and strides as small `Copy` arrays.

use crate::{Result, shape_error};

/// Maximum number of axes of a tensor.
pub const MAX_RANK: usize = 5;

/// Up to [`MAX_RANK`] sizes or strides, in elements.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Dims {
    len: u8,
    dims: [usize; MAX_RANK],
}

impl Dims {
    /// Copies a slice; fails for more than [`MAX_RANK`] axes.
    pub fn new(dims: &[usize]) -> Result<Dims> {
        if dims.len() > MAX_RANK {
            return shape_error("shape", format!("{dims:?} has more than {MAX_RANK} axes"));
        }
        let mut d = [0; MAX_RANK];
        d[..dims.len()].copy_from_slice(dims);
        Ok(Dims { len: dims.len() as u8, dims: d })
    }

    /// Row-major strides of this shape.
    pub fn row_major(&self) -> Dims {
        let mut strides = *self;
        let mut next = 1;
        for axis in (0..self.len()).rev() {
            strides.dims[axis] = next;
            next *= self.dims[axis].max(1);
        }
        strides
    }

    /// Product of the sizes; 1 for no axes.
    pub fn product(&self) -> usize {
        self.iter().product()
    }

    pub(crate) fn remove(&self, axis: usize) -> Dims {
        let mut d = *self;
        d.dims.copy_within(axis + 1..self.len(), axis);
        d.len -= 1;
        d
    }
}

impl std::ops::Deref for Dims {
    type Target = [usize];
    fn deref(&self) -> &[usize] {
        &self.dims[..self.len as usize]
    }
}

impl std::ops::DerefMut for Dims {
    fn deref_mut(&mut self) -> &mut [usize] {
        &mut self.dims[..self.len as usize]
    }
}

impl std::fmt::Debug for Dims {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", &**self)
    }
}
