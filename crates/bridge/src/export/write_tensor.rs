//! Writes one tensor.

use super::TensorSource;
use super::sharding::{Header, OutFile, OutTensor};
use crate::cast::{cast, is_castable};
use crate::error::{Error, Result};
use crate::expected::HfTensor;
use crate::hf_checkpoint::{HfCheckpoint, zeros};
use crate::logical::LogicalTensor;
use crate::view::{View, copy};
use ferrotron_core::tensorfile::{TensorDecl, TensorFileWriter};
use ferrotron_tensor::DType;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// The values of a parameter: little-endian, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorData {
    /// f32, bf16 or f16.
    pub dtype: DType,
    /// As many elements as the parameter has.
    pub bytes: Vec<u8>,
}

/// Buffer size for casting.
const BUFFER: usize = 4 << 20;

/// A weight file being written, under a new header or a copied one.
pub(super) enum ShardWriter {
    New(TensorFileWriter),
    Copied { out: BufWriter<File>, path: PathBuf },
}

impl ShardWriter {
    pub fn create(path: &Path, file: &OutFile) -> Result<ShardWriter> {
        let decls = || -> Vec<TensorDecl> {
            let decl =
                |t: &OutTensor| TensorDecl { name: t.name.clone(), dtype: t.dtype, shape: t.shape.clone() };
            file.tensors.iter().map(decl).collect()
        };
        Ok(match &file.header {
            Header::New => ShardWriter::New(TensorFileWriter::create(path, &decls(), &file.metadata)?),
            Header::Ordered => {
                ShardWriter::New(TensorFileWriter::create_in_order(path, &decls(), &file.metadata)?)
            }
            Header::Copied(header) => {
                let file = File::create(path).map_err(|e| Error::io(path, "create", e))?;
                let mut out = BufWriter::with_capacity(1 << 20, file);
                out.write_all(header).map_err(|e| Error::io(path, "write", e))?;
                ShardWriter::Copied { out, path: path.into() }
            }
        })
    }

    /// Tensor names in the order their bytes are written.
    pub fn order(&self, file: &OutFile) -> Vec<String> {
        match self {
            ShardWriter::New(w) => w.tensors().iter().map(|t| t.name.clone()).collect(),
            ShardWriter::Copied { .. } => file.tensors.iter().map(|t| t.name.clone()).collect(),
        }
    }

    fn write(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        match self {
            ShardWriter::New(w) => Ok(w.write(name, bytes)?),
            ShardWriter::Copied { out, path } => {
                out.write_all(bytes).map_err(|e| Error::io(path, "write", e))
            }
        }
    }

    pub fn finish(self) -> Result<()> {
        match self {
            ShardWriter::New(w) => {
                w.finish()?;
            }
            ShardWriter::Copied { mut out, path } => {
                out.flush()
                    .and_then(|()| out.get_ref().sync_all())
                    .map_err(|e| Error::io(&path, "write", e))?;
            }
        }
        Ok(())
    }
}

/// Fetches a parameter and checks its size.
fn fetch(part: &LogicalTensor, source: &TensorSource) -> Result<TensorData> {
    let (name, shape) = (&part.name, &part.shape);
    let values = source(name)?;
    if !is_castable(values.dtype) {
        let what = format!("weights are given as f32, bf16 or f16, not as {}", values.dtype);
        return Err(Error::tensor(name, what));
    }
    let (dtype, got) = (values.dtype, values.bytes.len());
    let wanted = shape.iter().product::<usize>() * dtype.size();
    if got != wanted {
        return Err(Error::tensor(
            name,
            format!("{got} bytes were given, but {dtype} {shape:?} has {wanted}"),
        ));
    }
    Ok(values)
}

/// Assembles a Hugging Face tensor from its parameters, or from other tensors of their shapes, such as gradients.
pub fn assemble(t: &HfTensor, dtype: DType, source: &TensorSource) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    emit(t, dtype, source, &mut |bytes| {
        out.extend_from_slice(bytes);
        Ok(())
    })?;
    Ok(out)
}

/// Writes a tensor that holds one or more parameters.
pub(super) fn write_parameters(
    out: &mut ShardWriter,
    t: &OutTensor,
    hf: &HfTensor,
    source: &TensorSource,
) -> Result<()> {
    let Some(dtype) = t.dtype.native() else {
        return Err(Error::tensor(&t.name, format!("weights cannot be written as {}", t.dtype)));
    };
    emit(hf, dtype, source, &mut |bytes| out.write(&t.name, bytes))
}

/// Passes the bytes of a tensor to `out` in chunks, in order.
fn emit(
    t: &HfTensor,
    dtype: DType,
    source: &TensorSource,
    out: &mut dyn FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    if !is_castable(dtype) {
        return Err(Error::tensor(&t.name, format!("weights cannot be written as {dtype}")));
    }
    // One expert at a time where the tensor stacks all of them.
    for (b, parts) in t.each_block().enumerate() {
        if !t.layout.transposed && !t.layout.interleaved {
            for part in parts {
                emit_rows(&fetch(&part.tensor, source)?, dtype, out)?;
            }
            continue;
        }
        let elements: usize = parts.iter().map(|p| p.tensor.elements()).sum();
        let mut block = zeros(&t.name, elements * dtype.size())?;
        let mut buffer = Vec::new();
        for part in parts {
            let values = fetch(&part.tensor, source)?;
            let cols = part.tensor.shape.get(1).copied().unwrap_or(1);
            let rows_at_once = (BUFFER / (cols * dtype.size()).max(1)).max(1);
            let mut view = part.view.from(b * elements);
            for chunk in values.bytes.chunks((rows_at_once * cols * values.dtype.size()).max(1)) {
                let rows = chunk.len() / (cols * values.dtype.size()).max(1);
                buffer.resize(rows * cols * dtype.size(), 0);
                cast(chunk, values.dtype, &mut buffer, dtype);
                copy((&buffer, View::contiguous(cols)), (&mut block, view), rows, cols, dtype.size());
                view.offset += rows * view.row;
            }
        }
        out(&block)?;
    }
    Ok(())
}

/// Passes contiguous rows to `out`, cast in chunks.
fn emit_rows(values: &TensorData, dtype: DType, out: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
    if values.dtype == dtype {
        return out(&values.bytes);
    }
    let mut buffer = Vec::new();
    for chunk in values.bytes.chunks(BUFFER / 4 * values.dtype.size()) {
        buffer.resize(chunk.len() / values.dtype.size() * dtype.size(), 0);
        cast(chunk, values.dtype, &mut buffer, dtype);
        out(&buffer)?;
    }
    Ok(())
}

/// Copies a tensor that the model does not use.
pub(super) fn copy_unused(out: &mut ShardWriter, checkpoint: &HfCheckpoint, t: &OutTensor) -> Result<()> {
    let Some(shard) = checkpoint.shards().files.iter().find(|s| s.file.get(&t.name).is_some()) else {
        return Err(Error::tensor(&t.name, "is in none of the reference's files"));
    };
    let total = t.bytes();
    let mut buffer = vec![0u8; total.min(BUFFER as u64) as usize];
    let mut at = 0;
    while at < total {
        let n = (total - at).min(BUFFER as u64) as usize;
        shard.file.read_range(&t.name, at, &mut buffer[..n])?;
        out.write(&t.name, &buffer[..n])?;
        at += n as u64;
    }
    Ok(())
}
