//! Kernels of mixtures that cards do not have yet.

use super::CudaKernels;
use crate::{Act, PermuteKernels, RowBias, RowBiasKernels, RowMap, WeightedKernels};
use ferrotron_tensor::{Error, Result, Stream, Tensor};

fn missing(op: &'static str) -> Result<()> {
    Err(Error::Unsupported { op, what: "not on a card yet; use --device cpu".into() })
}

impl PermuteKernels for CudaKernels {
    fn sort(&self, _s: &Stream, _index: &Tensor, _first: usize, _align: usize, _map: &RowMap) -> Result<()> {
        missing("sort")
    }

    fn gather_rows(
        &self,
        _s: &Stream,
        _x: &Tensor,
        _source: &Tensor,
        _k: usize,
        _out: &Tensor,
    ) -> Result<()> {
        missing("gather_rows")
    }

    fn gather_weighted(
        &self,
        _s: &Stream,
        _x: &Tensor,
        _source: &Tensor,
        _weights: &Tensor,
        _out: &Tensor,
    ) -> Result<()> {
        missing("gather_weighted")
    }

    fn sum_rows(
        &self,
        _s: &Stream,
        _x: &Tensor,
        _rows: &Tensor,
        _weights: Option<&Tensor>,
        _out: &Tensor,
    ) -> Result<()> {
        missing("sum_rows")
    }

    fn row_products(
        &self,
        _s: &Stream,
        _x: &Tensor,
        _rows: &Tensor,
        _dy: &Tensor,
        _out: &Tensor,
    ) -> Result<()> {
        missing("row_products")
    }

    fn gather_values(&self, _s: &Stream, _x: &Tensor, _source: &Tensor, _out: &Tensor) -> Result<()> {
        missing("gather_values")
    }

    fn chunk_map(
        &self,
        _s: &Stream,
        _sizes: &Tensor,
        _order: &Tensor,
        _source: &Tensor,
        _back: &Tensor,
    ) -> Result<()> {
        missing("chunk_map")
    }

    fn pad_map(&self, _s: &Stream, _align: usize, _map: &Tensor) -> Result<()> {
        missing("pad_map")
    }
}

impl WeightedKernels for CudaKernels {
    fn act_weighted(
        &self,
        _s: &Stream,
        _act: Act,
        _gated: bool,
        _x: &Tensor,
        _p: &Tensor,
        _y: &Tensor,
    ) -> Result<()> {
        missing("act_weighted")
    }

    fn act_weighted_backward(
        &self,
        _s: &Stream,
        _act: Act,
        _gated: bool,
        _x: &Tensor,
        _p: &Tensor,
        _live: &Tensor,
        _dy: &Tensor,
        _dx: &Tensor,
        _dp: &Tensor,
    ) -> Result<()> {
        missing("act_weighted_backward")
    }
}

impl RowBiasKernels for CudaKernels {
    fn add_bias(&self, _s: &Stream, _b: &RowBias, _y: &Tensor) -> Result<()> {
        missing("add_bias")
    }

    fn add_bias_backward(
        &self,
        _s: &Stream,
        _b: &RowBias,
        _dy: &Tensor,
        _dbias: (&Tensor, bool),
        _dweights: Option<&Tensor>,
    ) -> Result<()> {
        missing("add_bias_backward")
    }
}
