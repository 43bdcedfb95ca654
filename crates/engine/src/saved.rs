//! Saved activations: what a forward pass leaves for its backward pass.
//!
//! Every module has its own struct. All of them show their tensors through [`Saved`], so that offloading can move them to
//! other memory and back between the two passes without knowing the module. Parameters are never saved: a module keeps
//! ids and looks weights up when backward runs.

use crate::moe::SavedRouting;
use ferrotron_tensor::Tensor;

/// Whether a saved tensor may be offloaded between forward and backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OffloadClass {
    /// An activation: large, worth offloading.
    Activation,
    /// Statistics and indices: small, or needed at once; they stay on the device.
    Small,
}

/// The module of a layer whose backward reads a saved tensor, named as offload settings name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Module {
    /// Input of the layer, where all of it is recomputed.
    LayerInput,
    /// Input of the norm before attention.
    AttnNorm,
    /// Input of the QKV projection, or of the projections of MLA.
    QkvLinear,
    /// Query, key, value, output and softmax statistics of core attention.
    CoreAttn,
    /// Input of the output projection.
    AttnProj,
    /// Input of the norm before the MLP or MoE block.
    MlpNorm,
    /// Input of the first linear of an MLP.
    Fc1,
    /// Output of the first linear: input of the activation function.
    MlpAct,
    /// Input of the second linear: output of the activation function.
    Fc2,
    /// Input of the router.
    Router,
    /// Input of the experts' first linear: permuted tokens.
    ExpertFc1,
    /// Output of the experts' first linear.
    MoeAct,
    /// Input of the experts' second linear.
    ExpertFc2,
    /// Anything else, such as norms after a block.
    Other,
}

/// A tensor saved for backward.
#[derive(Clone, Debug)]
pub struct SavedTensor {
    tensor: Tensor,
    /// Whether it may be offloaded.
    pub class: OffloadClass,
}

impl SavedTensor {
    /// Saves an activation.
    pub fn activation(tensor: &Tensor) -> SavedTensor {
        SavedTensor { tensor: tensor.clone(), class: OffloadClass::Activation }
    }

    /// Saves a small tensor, which is never offloaded.
    pub fn small(tensor: &Tensor) -> SavedTensor {
        SavedTensor { tensor: tensor.clone(), class: OffloadClass::Small }
    }

    /// Replaces it by other memory with the same contents.
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

/// Visitor over saved tensors.
pub trait Saved {
    /// Calls `f` with each tensor, in the order in which backward first reads them. Two modules may save the same
    /// allocation, see [`Tensor::allocation_id`].
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor));

    /// [`Saved::tensors`] with the module that each belongs to.
    fn modules(&mut self, f: &mut dyn FnMut(Module, &mut SavedTensor)) {
        self.tensors(&mut |t| f(Module::Other, t));
    }

    /// The routing that a recomputation of this module has to repeat, where it is or contains an MoE layer.
    fn routing(&self) -> Option<&SavedRouting> {
        None
    }
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

    fn modules(&mut self, f: &mut dyn FnMut(Module, &mut SavedTensor)) {
        self.iter_mut().for_each(|s| s.modules(f));
    }

    fn routing(&self) -> Option<&SavedRouting> {
        self.as_ref().and_then(Saved::routing)
    }
}

impl<S: Saved> Saved for Vec<S> {
    fn tensors(&mut self, f: &mut dyn FnMut(&mut SavedTensor)) {
        self.iter_mut().rev().for_each(|s| s.tensors(f));
    }
}
