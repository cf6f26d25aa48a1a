//! The text of a request with stop strings, by Python's detokenizer.

use pyo3::prelude::*;

use crate::engine::{Detokenizer, StopText};
use crate::python::errors::{RequestError, log};
use crate::stop::StopStrings;

/// What finds the request's stop strings in its text, if it has any.
pub(super) fn stop_text(
    params: &Bound<'_, PyAny>,
    detokenizer: Option<Py<PyAny>>,
) -> PyResult<Option<StopText>> {
    let strings: Vec<String> = params.getattr("stop_strings")?.extract()?;
    if strings.is_empty() {
        return Ok(None);
    }
    let detokenizer = detokenizer.ok_or_else(|| RequestError::new_err("stop strings need a detokenizer"))?;
    let keep: bool = params.getattr("include_stop_str_in_output")?.extract()?;
    Ok(Some(StopText::new(StopStrings::new(strings, keep), Box::new(PyDetokenizer(detokenizer)))))
}

/// A `dspark.text.TextStream`.
struct PyDetokenizer(Py<PyAny>);

impl Detokenizer for PyDetokenizer {
    fn push(&mut self, token: u32) -> String {
        self.call("push", Some(token))
    }

    fn flush(&mut self) -> String {
        self.call("flush", None)
    }
}

impl PyDetokenizer {
    /// Calls the detokenizer. A failure is logged and gives no text: the tokens are right all the same.
    fn call(&self, method: &str, token: Option<u32>) -> String {
        Python::attach(|py| {
            let object = self.0.bind(py);
            let text = match token {
                Some(token) => object.call_method1(method, ([token],)),
                None => object.call_method0(method),
            };
            text.and_then(|text| text.extract()).unwrap_or_else(|error| {
                log(py, "detokenizer failed", error);
                String::new()
            })
        })
    }
}
