//! Writing one tensor.

use super::Source;
use super::layout::{Head, OutFile, OutTensor};
use crate::convert::{convert, convertible, transpose};
use crate::error::{Error, Result};
use crate::expected::HfTensor;
use crate::plan::{Plan, zeros};
use ferrotron_core::tensorfile::{TensorDecl, TensorFileWriter};
use ferrotron_tensor::DType;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// The values of a parameter: little-endian, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct Values {
    /// f32, bf16 or f16.
    pub dtype: DType,
    /// As many elements as the parameter has.
    pub bytes: Vec<u8>,
}

/// Bytes converted at once.
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
        Ok(match &file.head {
            Head::New => ShardWriter::New(TensorFileWriter::create(path, &decls(), &file.metadata)?),
            Head::Ordered => {
                ShardWriter::New(TensorFileWriter::create_in_order(path, &decls(), &file.metadata)?)
            }
            Head::Copied(head) => {
                let file = File::create(path).map_err(|e| Error::io(path, "create", e))?;
                let mut out = BufWriter::with_capacity(1 << 20, file);
                out.write_all(head).map_err(|e| Error::io(path, "write", e))?;
                ShardWriter::Copied { out, path: path.into() }
            }
        })
    }

    /// Names in the order their bytes must come.
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

/// Fetches a parameter and checks it.
fn fetch(name: &str, shape: &[usize], source: &Source) -> Result<Values> {
    let values = source(name)?;
    if !convertible(values.dtype) {
        let what = format!("weights are given as f32, bf16 or f16, not as {}", values.dtype);
        return Err(Error::tensor(name, what));
    }
    let wanted = shape.iter().product::<usize>() * values.dtype.size();
    if values.bytes.len() != wanted {
        let what =
            format!("{} bytes were given, but {} {shape:?} has {wanted}", values.bytes.len(), values.dtype);
        return Err(Error::tensor(name, what));
    }
    Ok(values)
}

fn float_type(t: &OutTensor) -> Result<DType> {
    match t.dtype.native() {
        Some(d) if convertible(d) => Ok(d),
        _ => Err(Error::tensor(&t.name, format!("weights cannot be written as {}", t.dtype))),
    }
}

/// Writes a tensor made of one or more parameters.
pub(super) fn write_parameters(
    out: &mut ShardWriter,
    t: &OutTensor,
    hf: &HfTensor,
    source: &Source,
) -> Result<()> {
    if !hf.transposed {
        for part in &hf.parts {
            let values = fetch(&part.name, &part.shape, source)?;
            write_rows(out, t, &values)?;
        }
        return Ok(());
    }
    let dtype = float_type(t)?;
    let [cols, width] = t.shape[..] else {
        return Err(Error::tensor(&t.name, "only matrices can be transposed"));
    };
    let mut whole = zeros(&t.name, cols * width * dtype.size())?;
    let rows_at_once = (BUFFER / (cols * dtype.size()).max(1)).max(1);
    let mut buffer = vec![0u8; rows_at_once * cols * dtype.size()];
    let mut at = 0;
    for part in &hf.parts {
        let values = fetch(&part.name, &part.shape, source)?;
        for chunk in values.bytes.chunks((rows_at_once * cols * values.dtype.size()).max(1)) {
            let rows = chunk.len() / (cols * values.dtype.size());
            let converted = &mut buffer[..rows * cols * dtype.size()];
            convert(chunk, values.dtype, converted, dtype);
            transpose(converted, rows, cols, &mut whole, width, at, dtype.size());
            at += rows;
        }
    }
    out.write(&t.name, &whole)
}

/// Writes rows as they lie, converting piece by piece.
fn write_rows(out: &mut ShardWriter, t: &OutTensor, values: &Values) -> Result<()> {
    let dtype = float_type(t)?;
    if values.dtype == dtype {
        return out.write(&t.name, &values.bytes);
    }
    let elements = BUFFER / 4;
    let mut buffer = vec![0u8; elements.min(values.bytes.len()) * dtype.size()];
    for chunk in values.bytes.chunks(elements * values.dtype.size()) {
        let converted = &mut buffer[..chunk.len() / values.dtype.size() * dtype.size()];
        convert(chunk, values.dtype, converted, dtype);
        out.write(&t.name, converted)?;
    }
    Ok(())
}

/// Copies a tensor that is nobody's parameter.
pub(super) fn copy_stray(out: &mut ShardWriter, plan: &Plan, t: &OutTensor) -> Result<()> {
    let Some(shard) = plan.shards().files.iter().find(|s| s.file.get(&t.name).is_some()) else {
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
