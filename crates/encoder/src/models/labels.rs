//! The names of a classifier's outputs, from `config.json`.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::{Error, Result, load};

/// What a classifier's numbers stand for, in their order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Labels(Vec<String>);

/// The keys of `config.json` that tell of labels.
#[derive(Deserialize)]
struct LabelConfig {
    id2label: Option<BTreeMap<String, String>>,
    num_labels: Option<usize>,
    _num_labels: Option<usize>,
}

/// More labels than any model has.
const MAX_LABELS: usize = 1_000_000;

impl Labels {
    /// Reads `id2label`, or else the number of labels, of a `config.json`; `path` is what errors
    /// call it. Without either there are two, as in Hugging Face. If both are there and disagree,
    /// `num_labels` wins, and the names are `LABEL_0`, `LABEL_1` and so on.
    ///
    /// # Errors
    /// [`Error::Json`] if it is none; [`Error::Unsupported`] if the ids do not count from 0.
    /// # Examples
    /// ```
    /// let json = br#"{"id2label": {"1": "good", "0": "bad"}}"#;
    /// let labels = encoder::Labels::from_json(json, "config.json")?;
    /// assert_eq!(labels.names(), ["bad", "good"]);
    /// # Ok::<(), encoder::Error>(())
    /// ```
    pub fn from_json(json: &[u8], path: &str) -> Result<Self> {
        let config: LabelConfig = load::parse_json(json, path)?;
        let named = config.id2label.filter(|labels| !labels.is_empty());
        let named = named.filter(|labels| config.num_labels.is_none_or(|n| n == labels.len()));
        let Some(labels) = named else {
            let n = config.num_labels.or(config._num_labels).unwrap_or(2);
            if n > MAX_LABELS {
                let (field, expected) = ("num_labels", "at most 1,000,000");
                return Err(Error::Value { field, expected, got: n as f64 });
            }
            return Ok(Self((0..n).map(|i| format!("LABEL_{i}")).collect()));
        };
        let in_order: Option<Vec<String>> =
            (0..labels.len()).map(|id| labels.get(&id.to_string()).cloned()).collect();
        in_order.map(Self).ok_or_else(|| Error::Unsupported {
            path: path.to_string(),
            key: "id2label",
            expected: "ids that count from 0",
            got: labels.into_keys().collect::<Vec<_>>().join(", "),
        })
    }

    /// Their names.
    pub fn names(&self) -> &[String] {
        &self.0
    }
}

/// Reads the labels, for the models that have some.
pub(crate) type ReadLabels<'a> = dyn Fn() -> Result<Labels> + 'a;
