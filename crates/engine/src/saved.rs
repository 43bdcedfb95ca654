//! What a forward pass leaves for its backward pass.
//!
//! Every module has its own struct; all of them can show their tensors through [`Saved`], so that an engine
//! can move them away and back between the two passes without knowing the module. Parameters are never in
//! it: a module keeps ids and looks weights up when backward runs.

use ferrotron_tensor::Tensor;

/// May a saved tensor be moved to other memory between forward and backward?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OffloadClass {
    /// An activation: large, worth moving.
    Activation,
    /// Statistics and indices: small, or needed at once; left where they are.
    Small,
}

/// A tensor kept for backward.
#[derive(Clone, Debug)]
pub struct SavedTensor {
    tensor: Tensor,
    /// Whether it may be moved.
    pub class: OffloadClass,
}

impl SavedTensor {
    /// An activation.
    pub fn activation(tensor: &Tensor) -> SavedTensor {
        SavedTensor { tensor: tensor.clone(), class: OffloadClass::Activation }
    }

    /// A small tensor.
    pub fn small(tensor: &Tensor) -> SavedTensor {
        SavedTensor { tensor: tensor.clone(), class: OffloadClass::Small }
    }

    /// Puts other memory with the same contents in its place.
    pub fn replace(&mut self, tensor: Tensor) {
        self.tensor = tensor;
    }
}

impl std::ops::Deref for SavedTensor {
    type Target = Tensor;
    fn deref(&self) -> &Tensor {
        &self.tensor
    }
}

/// Shows every tensor in the order in which backward first reads them. Two modules may save one allocation:
/// [`Tensor::allocation_id`] tells.
pub trait Saved {
    /// Calls `f` with each tensor.
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor));
}

impl Saved for SavedTensor {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        f(self);
    }
}

impl<S: Saved> Saved for Option<S> {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        self.iter_mut().for_each(|s| s.tensors(f));
    }
}

impl<S: Saved> Saved for Vec<S> {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        self.iter_mut().rev().for_each(|s| s.tensors(f));
    }
}
