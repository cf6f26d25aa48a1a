//! A draft's heads in the memory of the device that it runs on.

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::cuda::sampling::{DeviceHeads, DeviceKind, DeviceMarkov, DeviceVocabulary};
use crate::python::params::unknown_head;
use crate::python::tensors::Tensor;

/// The heads' tensors, kept alive.
pub struct DeviceHeadTensors {
    heads: DeviceHeads,
    owners: Vec<Py<PyAny>>,
}

impl DeviceHeadTensors {
    /// Reads what `dspark.serve.heads.heads_to_device` makes: `heads_to_core`'s dictionary over tensors of
    /// the device, with `"vocabulary": {"tokens", "column"}` as int32 tensors.
    pub fn from_py(heads: &Bound<'_, PyDict>) -> PyResult<Self> {
        let mut owners = Vec::new();
        let mut found = DeviceHeads::default();
        let mut rows = |part: &Bound<'_, PyAny>, key: &str| {
            let tensor = Tensor::anywhere(&part.get_item(key)?, key)?;
            owners.push(tensor.owner().clone_ref(part.py()));
            Ok::<_, PyErr>(tensor.device_rows())
        };
        if let Some(part) = heads.get_item("markov")? {
            let kind: String = part.get_item("kind")?.extract()?;
            let kind = match kind.as_str() {
                "gated" => DeviceKind::Gated(rows(&part, "weight")?, rows(&part, "bias")?),
                "rnn" => DeviceKind::Rnn(
                    rows(&part, "weight")?,
                    rows(&part, "bias")?,
                    part.get_item("through_anchor")?.extract()?,
                ),
                "vanilla" => DeviceKind::Vanilla,
                _ => return Err(unknown_head(&kind)),
            };
            found.markov = Some(DeviceMarkov { kind, w1: rows(&part, "w1")?, w2: rows(&part, "w2")? });
        }
        if let Some(part) = heads.get_item("confidence")? {
            let bias = part.get_item("bias")?;
            let bias = if bias.is_none() { 0.0 } else { bias.call_method0("item")?.extract()? };
            let with_markov = part.get_item("with_markov")?.extract()?;
            found.confidence = Some((rows(&part, "weight")?, bias, with_markov));
        }
        if let Some(part) = heads.get_item("vocabulary")? {
            let mut address = |key: &str| {
                let tensor = part.get_item(key)?;
                let address: u64 = tensor.call_method0("data_ptr")?.extract()?;
                owners.push(tensor.unbind());
                Ok::<_, PyErr>(address)
            };
            let (tokens, column) = (address("tokens")?, address("column")?);
            let (columns, size) = (part.get_item("tokens")?.len()?, part.get_item("column")?.len()?);
            found.vocabulary = Some(DeviceVocabulary { tokens, column, columns, size });
        }
        Ok(DeviceHeadTensors { heads: found, owners })
    }

    /// The tensors.
    pub fn owners(&self) -> &[Py<PyAny>] {
        &self.owners
    }

    /// Where the heads lie.
    pub fn view(&self) -> DeviceHeads {
        self.heads
    }
}
